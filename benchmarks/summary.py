"""The figures of all benchmarks in one file, and the README's tables of them.

    python _bootstrap.py benchmarks.summary

Reads benchmarks/results/<device>_*.json, one per program, and writes <device>_pipeline.json and the part of README.md
between the two marks. A figure that no program has measured stays out.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyui_h3.benchmarks.record import RESULTS, ROOT

BEGIN, END = "<!-- benchmarks: made by benchmarks/summary.py -->", "<!-- end of benchmarks -->"

# figure -> the record that has it, and its name there. Figures have the names that others report them under: ``exact``
# and ``lossless`` run the same transformer here, ``fp8_attention`` is with 8-bit linears as well, and ``tf32`` stands
# for one product of numbers with 11 significant bits, which are float16 here.
SOURCES = {
    "forward_5s.lossless_s": ("peers", "5s.ours_s"),
    "forward_5s.exact_s": ("peers", "5s.ours_s"),
    "forward_5s.diffusers_s": ("peers", "5s.diffusers_s"),
    "forward_5s.floor_s": ("peers", "5s.floor_s"),
    "forward_10s.lossless_s": ("peers", "10s.ours_s"),
    "forward_10s.exact_s": ("peers", "10s.ours_s"),
    "forward_10s.fp8_s": ("fp8", "fp8.forward_s"),
    "forward_10s.fp8_attention_s": ("fp8", "fp8_both.forward_s"),
    "forward_10s.diffusers_s": ("peers", "10s.diffusers_s"),
    "forward_10s.floor_s": ("peers", "10s.floor_s"),
    "vae.decode_243_s": ("vae_decode", "243_frames.decode_s"),
    "vae.decode_124_s": ("vae_decode", "124_frames.decode_s"),
    "vae.encode_124_exact_s": ("media", "clip.encode_s"),
    "vae.encode_124_split_s": ("vae_encode", "clip.split_s"),
    "vae.encode_124_tf32_s": ("vae_encode", "clip.half_s"),
    "vae.encode_1_split_s": ("vae_encode", "keyframe.split_s"),
    "vae.audio_decode_10s_ms": ("audio_decode", "triton.decode_ms"),
    "job_10s.prompt_s": ("job", "seconds.encode"),
    "job_10s.modulation_s": ("job", "seconds.modulate"),
    "job_10s.dit_s": ("job", "seconds.sample"),
    "job_10s.video_vae_s": ("job", "seconds.decode_video"),
    "job_10s.audio_vae_s": ("job", "seconds.decode_audio"),
    "job_10s.mp4_s": ("job", "seconds.save_mp4"),
    "job_10s.total_s": ("job", "seconds.total"),
    "memory_gib.bf16": ("job", "memory.peak_gib"),
    "memory_gib.fp8": ("job_fp8", "memory.peak_gib"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All records of one device."""

    device: str
    records: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, slug: str) -> "Results":
        files = sorted(folder.glob(f"{slug}_*.json"))
        records = {file.stem.removeprefix(f"{slug}_"): json.loads(file.read_text()) for file in files}
        records.pop("pipeline", None)
        if not records:
            raise SystemExit(f"{folder} has no results of {slug}: run the benchmarks there first")
        return cls(device=next(iter(records.values()))["device"], records=records)

    def figure(self, record: str, name: str) -> float | None:
        return self.records.get(record, {}).get("figures", {}).get(name)

    def pipeline(self) -> dict[str, Any]:
        """The content of ``<device>_pipeline.json``."""
        figures = {name: self.figure(*source) for name, source in SOURCES.items()}
        keyframe = figures.pop("vae.encode_1_split_s")
        figures["vae.encode_1_split_ms"] = None if keyframe is None else 1e3 * keyframe
        return {
            "name": "pipeline",
            "device": self.device,
            "records": {
                name: {key: self.records[name][key] for key in ("commit", "versions", "shapes")}
                for name in sorted({record for record, _ in SOURCES.values()} & self.records.keys())
            },
            "figures": {name: value for name, value in figures.items() if value is not None},
        }


def tables(results: Results) -> str:
    """The README's tables, in Markdown."""
    return "\n\n".join([_intro(results), _forwards(results), _stages(results), _operators(results)])


def _intro(results: Results) -> str:
    return (
        f"Measured on one {results.device} with random weights of the released sizes at 1344x768. The floor is the "
        "time of the matrix products and the attention alone, on the same shapes, in the same run."
    )


def _forwards(results: Results) -> str:
    rows = ["| one forward of the transformer | 5 s clip | 10 s clip |", "|---|---|---|"]
    for label, record, name, unit in (
        ("ComfyUI-H3", "peers", "ours_s", " s"),
        ("the floor", "peers", "floor_s", " s"),
        ("diffusers", "peers", "diffusers_s", " s"),
        ("ComfyUI-H3, peak memory", "peers", "ours_peak_gib", " GiB"),
        ("diffusers, peak memory", "peers", "diffusers_peak_gib", " GiB"),
    ):
        cells = [_cell(results.figure(record, f"{clip}.{name}"), unit) for clip in ("5s", "10s")]
        rows.append(f"| {label} | {cells[0]} | {cells[1]} |")
    for label, name in (("8-bit linears", "fp8"), ("8-bit linears and attention", "fp8_both")):
        cell = _cell(results.figure("fp8", f"{name}.forward_s"), " s")
        rows.append(f"| ComfyUI-H3, {label} (approximations) | | {cell} |")
    return "\n".join(rows)


def _stages(results: Results) -> str:
    rows = ["| stage | time |", "|---|---|"]
    for label, record, name, unit in (
        ("video decode, 124 frames, to 8-bit frames in host memory", "vae_decode", "124_frames.decode_s", " s"),
        ("video decode, 243 frames", "vae_decode", "243_frames.decode_s", " s"),
        ("keyframe encode, to float32 accuracy", "vae_encode", "keyframe.split_s", " s"),
        ("clip encode, 124 frames, to float32 accuracy", "vae_encode", "clip.split_s", " s"),
        ("clip encode, in float32 (`exact`)", "media", "clip.encode_s", " s"),
        ("audio decode, 10 s", "audio_decode", "triton.decode_ms", " ms"),
        ("a 10 s job with 4 forwards, prompt to MP4", "job", "seconds.total", " s"),
        ("its peak memory, everything resident", "job", "memory.peak_gib", " GiB"),
        ("its peak memory with 8-bit linears", "job_fp8", "memory.peak_gib", " GiB"),
    ):
        rows.append(f"| {label} | {_cell(results.figure(record, name), unit)} |")
    return "\n".join(rows)


def _operators(results: Results) -> str:
    rows = ["| operation, 4,722 rows | Triton | PyTorch | floor of its bytes |", "|---|---|---|---|"]
    for name in ("norm_modulate", "gate_residual", "gate_residual_norm", "swiglu", "qk_norm", "qk_norm_rope"):
        cells = [_cell(results.figure("ops", f"{name}_4722.{kind}_us"), " µs") for kind in ("triton", "torch", "floor")]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "not measured"
    if unit == " s" and value < 1:
        return _cell(1e3 * value, " ms")
    return f"{value:.3g}{unit}" if value < 100 else f"{value:.0f}{unit}"


def with_tables(readme: str, results: Results) -> str:
    """The README with its tables made anew."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has not both of the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.summary", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h200", help="as the names of the results begin (default h200)")
    args = parser.parse_args()
    results = Results.read(RESULTS, args.device)
    path = RESULTS / f"{args.device}_pipeline.json"
    path.write_text(json.dumps(results.pipeline(), indent=2) + "\n", encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
