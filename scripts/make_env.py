"""Makes and repairs the environment of the Makefile: ``make_env.py --venv .venv LAYER...``.

Layers: host (a headless ComfyUI with this pack), page (its graph editor), newer-host (what COMFYUI_PATH needs),
test (``make test``). A layer whose versions are in place costs nothing, an interrupted one is done again. An
environment that this script did not make is used as it is: nothing is installed in it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
LAYERS = {
    "host": ["host.txt"],
    "page": ["page.txt"],
    "newer-host": ["newer-host.txt"],
    "test": ["test.txt", "test-cpu.txt"],
}
ALLOWED = ((3, 10), (3, 13))
STAMP = "h3-env.json"  # in the environment; written before its first file, so a half-made one is known as ours
NEEDED = ("torch", "torchvision", "torchaudio", "transformers", "safetensors", "av", "aiohttp", "websocket")

# PyPI's torchvision looks for operators that only its native part registers, and that part links CUDA. Beside a CPU
# torch its Python part is enough for the host once the two names exist.
SHIM = '''"""Lets PyPI's torchvision import beside a torch without CUDA; written by ComfyUI-H3's `make env`."""
import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for op in ("torchvision::nms", "torchvision::qnms"):
                try:
                    torch.library.define(op, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                except RuntimeError:
                    pass  # a native build has registered it
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
'''


def stop(message: str) -> None:
    raise SystemExit(f"make env: {message}")


def check_python() -> None:
    """Exit with what to do when this interpreter cannot carry the environment."""
    low, high = (".".join(map(str, version)) for version in ALLOWED)
    if not ALLOWED[0] <= sys.version_info[:2] <= ALLOWED[1]:
        found = ".".join(map(str, sys.version_info[:3]))
        stop(f"Python {low} to {high} is needed, {sys.executable} is {found}; choose one: make env PYTHON=python3.11")
    if any(importlib.util.find_spec(module) is None for module in ("venv", "ensurepip")):
        stop(
            f"{sys.executable} cannot make environments, its module venv or ensurepip is missing; install it "
            "(Debian and Ubuntu: apt install python3-venv) or choose another Python: make env PYTHON=python3.11"
        )


class Environment:
    """One virtual environment and the record of what was installed in it."""

    def __init__(self, folder: Path, pip_args: list[str]):
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp = folder / STAMP
        self.pip_args = pip_args

    @property
    def is_foreign(self) -> bool:
        return not self.stamp.is_file() and self.folder.is_dir() and any(self.folder.iterdir())

    def recorded(self) -> dict[str, str]:
        try:
            return dict(json.loads(self.stamp.read_text())["layers"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def record(self, layers: dict[str, str]) -> None:
        partial = self.stamp.with_suffix(".partial")
        partial.write_text(json.dumps({"layers": layers}, indent=1))
        partial.replace(self.stamp)

    def answers(self, code: str) -> bool:
        """Whether the environment's Python starts and ``code`` exits with 0."""
        try:
            return subprocess.run([self.python, "-c", code], capture_output=True).returncode == 0
        except OSError:
            return False

    def make(self) -> None:
        """An environment with a working pip; a broken one of ours is emptied first."""
        if self.stamp.is_file() and self.answers("import pip"):
            return
        check_python()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record({})
        for entry in self.folder.iterdir():
            if entry.name != STAMP:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        print(f"env: making {self.folder} with {sys.executable}", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", str(self.folder)]).returncode:
            stop(f"{sys.executable} -m venv failed, see above")

    def pip(self, what: str, *args: str, quiet: bool = True) -> None:
        print(f"env: installing {what}", flush=True)
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            *(["--quiet"] if quiet else []),
            "--disable-pip-version-check",
            *self.pip_args,
            *args,
        ]
        if subprocess.run(command).returncode:
            stop(
                f"pip could not install {what}, see above; the next run goes on from here. "
                "A mirror or an index of CPU builds can be named: make env PIP_ARGS='--extra-index-url ADDRESS'"
            )

    @property
    def has_cpu_torch(self) -> bool:
        return self.answers("import sys, torch; sys.exit(bool(torch.version.cuda or torch.version.hip))")

    def add_cpu_shim(self) -> None:
        """Make the pure Python parts of torchvision and torchaudio usable without their CUDA libraries."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        found = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        packages = Path(found)
        for library in (packages / "torchaudio" / "lib").glob("*.so"):
            library.unlink()  # torchaudio falls back to Python
        (packages / "_h3_torchvision_cpu.py").write_text(SHIM)
        (packages / "h3_torchvision_cpu.pth").write_text("import _h3_torchvision_cpu\n")

    def install(self, layer: str, options: argparse.Namespace) -> None:
        files = [str(REQUIREMENTS / name) for name in LAYERS[layer]]
        if layer == "host":
            self.pip(
                options.torch, *shlex.split(options.torch), quiet=False
            )  # may be gigabytes: pip shows its progress
            self.pip("the host's packages", "-r", files[0])
            extra = shlex.split(options.torch_extras)
            self.pip(options.torch_extras, "--no-deps", *extra)
            if self.has_cpu_torch:
                self.add_cpu_shim()
            self.pip("this pack (editable)", "--no-deps", "--editable", str(ROOT))
        elif layer == "test":
            self.pip("the test tools", "-r", files[0])
            if self.has_cpu_torch:
                self.pip("Triton's interpreter", "-r", files[1])
        else:
            self.pip(f"the {layer} packages", "-r", files[0])


def digest(layer: str, options: argparse.Namespace) -> str:
    """Changes when a version of ``layer`` does, or the way it is installed."""
    parts = [Path(__file__).read_bytes(), *((REQUIREMENTS / name).read_bytes() for name in LAYERS[layer])]
    parts += [options.torch.encode(), options.torch_extras.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="+", choices=list(LAYERS), metavar="LAYER", help=", ".join(LAYERS))
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--torch", required=True)
    parser.add_argument("--torch-extras", required=True)
    parser.add_argument("--pip-args", default="")
    options = parser.parse_args()

    environment = Environment(options.venv, shlex.split(options.pip_args))
    if environment.is_foreign:
        modules = NEEDED + (("pytest", "ruff", "mypy") if "test" in options.layers else ())
        code = f"from importlib.util import find_spec; print(*[m for m in {modules!r} if find_spec(m) is None])"
        if not environment.answers(code):
            stop(f"{options.venv} is not a Python environment; remove it or choose another one with VENV=")
        found = subprocess.run([environment.python, "-c", code], capture_output=True, text=True)
        if found.stdout.strip():
            stop(f"{options.venv} was not made by `make env` and is left as it is; it lacks {found.stdout.strip()}")
        return
    environment.make()
    done = environment.recorded()
    for layer in options.layers:
        wanted = digest(layer, options)
        if done.get(layer) != wanted:
            environment.install(layer, options)
            done[layer] = wanted
            environment.record(done)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("make env: interrupted; the next run goes on from here") from None
