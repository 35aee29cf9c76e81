"""``triton`` and ``triton.language`` where they are installed, inert stand-ins where they are not.

The only module that guards this import. With the stand-ins a kernel decorates and never runs; ``MISSING`` says why, for
``dispatch.use_triton``. ``INTERPRETED`` is true where Triton runs kernels in Python (TRITON_INTERPRET=1 when it was
first imported), which is for tests. ``VERSION`` is (major, minor). ``TensorDescriptor`` is None where Triton has no
tensor descriptors.
"""

from types import SimpleNamespace

MISSING: str | None
INTERPRETED: bool


def _inert(kernel=None, **options):
    return _inert if kernel is None else kernel


try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError as error:
    MISSING = f"triton cannot be imported ({error})"
    INTERPRETED = False
    triton = SimpleNamespace(jit=_inert)  # type: ignore[assignment]
    tl = SimpleNamespace(constexpr=object)  # type: ignore[assignment]
    libdevice = None
    VERSION: tuple[int, ...] = ()
else:
    MISSING = None
    VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

    @triton.jit
    def _probe():
        pass

    INTERPRETED = not isinstance(_probe, triton.JITFunction)

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4, or none
    TensorDescriptor = None  # type: ignore[assignment, misc]
