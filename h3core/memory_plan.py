"""Which weights stay on the device through a job, and the memory of each stage: computed before any weight is read.

The arithmetic of memory has its one place here: what a stage takes, whether it fits, and who leaves when it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

MARGIN = 1.1  # of what the work of a stage is said to need: allocators round up, and libraries have workspaces
FIXED_BYTES = 1 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one stage of a job takes on the device.

    part: the module it runs, with ``weight_bytes`` of weights. working_bytes: its activations. setup_bytes: what is
    beside the weights before the work begins, and gone when it does.
    """

    stage: str
    part: str
    weight_bytes: int
    working_bytes: int
    setup_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.weight_bytes + max(self.working_bytes, self.setup_bytes)

    @property
    def room_bytes(self) -> int:
        """What must be free for it, its weights included."""
        return self.weight_bytes + room_bytes(self.working_bytes, self.setup_bytes)


def room_bytes(working_bytes: int, setup_bytes: int = 0) -> int:
    """What must be free beside the weights of a stage."""
    return max(int(MARGIN * working_bytes), setup_bytes) + FIXED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Residency of one kind of job, whoever runs it first or again.

    needs: of its stages, in order. leaving: parts that leave the device after their stage, as later stages need the
    room; the others stay, for the next job too. tables_bytes: there in every stage. capacity_bytes: what the device
    has for all of it, None without a limit; it changes with what others do there, so it does not tell plans apart.
    """

    needs: tuple[Need, ...] = ()
    leaving: frozenset[str] = frozenset()
    tables_bytes: int = 0
    capacity_bytes: int | None = field(default=None, compare=False)

    @property
    def fits(self) -> bool:
        if self.capacity_bytes is None:
            return True
        return all(self.beside_bytes(need) + need.room_bytes <= self.capacity_bytes for need in self.needs)

    @property
    def peak_bytes(self) -> int:
        """Of the whole job, from the second of its kind on; the first reads some weights only in later stages."""
        return max((self.stage_peak_bytes(need) for need in self.needs), default=0)

    def stage_peak_bytes(self, need: Need) -> int:
        return self.beside_bytes(need) + need.peak_bytes

    def beside_bytes(self, need: Need) -> int:
        """Weights of other stages that are there in this one, and the tables."""
        weights = {other.part: other.weight_bytes for other in self.needs if other.part not in self.leaving}
        return self.tables_bytes + sum(size for part, size in weights.items() if part != need.part)

    def leave_order(self, part: str, loaded: Iterable[str]) -> list[str]:
        """Of ``loaded``, who leaves first when the stage of ``part`` needs the room.

        First what this job does not use, the longest loaded first; then who leaves after its stage anyhow; last who
        was to stay. Among these, the one whose stage comes again last.
        """
        place = {need.part: index for index, need in enumerate(self.needs)}

        def key(other: str) -> tuple[int, int]:
            if part not in place or other not in place:
                return 0, 0
            stages_until = (place[other] - place[part]) % len(self.needs)
            return 1 if other in self.leaving else 2, -stages_until

        return sorted((other for other in loaded if other != part), key=key)

    def residence(self, part: str) -> str:
        """Of a part's weights: whether they are kept, or after which stage they leave."""
        if part not in self.leaving:
            return "kept"
        return f"leaves after {next(need.stage for need in self.needs if need.part == part)}"

    def describe(self) -> str:
        """A line of sums, and one of each stage."""
        limit = "" if self.capacity_bytes is None else f" of {self.capacity_bytes / GIB:.1f}"
        short = "" if self.fits else ", which does not fit: the stage with the peak may run out of memory"
        rows = [f"GiB: peak {self.peak_bytes / GIB:.1f}{limit}{short}"]
        for need in self.needs:
            weights, work = need.weight_bytes / GIB, need.working_bytes / GIB
            beside, peak = self.beside_bytes(need) / GIB, self.stage_peak_bytes(need) / GIB
            residence = self.residence(need.part)
            rows.append(
                f"  {need.stage:<12} {need.part:<13} {weights:5.1f} weights ({residence}) + {work:.1f} work "
                f"+ {beside:.1f} beside = {peak:.1f}"
            )
        return "\n".join(rows)


def plan_memory(needs: Sequence[Need], capacity_bytes: int | None, tables_bytes: int = 0) -> MemoryPlan:
    """The plan in which the fewest bytes of weights have to be read again in the next job.

    Where even the largest stage alone does not fit, all parts leave after their stages: nothing else helps.
    """
    sizes = {need.part: need.weight_bytes for need in needs}
    choices = [chosen for count in range(len(sizes) + 1) for chosen in combinations(sizes, count)]
    for leaving in sorted(choices, key=lambda chosen: sum(sizes[part] for part in chosen)):
        plan = MemoryPlan(
            needs=tuple(needs),
            leaving=frozenset(leaving),
            tables_bytes=tables_bytes,
            capacity_bytes=capacity_bytes,
        )
        if plan.fits:
            break
    return plan
