"""One headless ComfyUI for the whole run, with this pack and the tiny H3."""

import copy
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from comfyui_h3.scripts.checkpoints import TINY_NAME, tiny_checkpoint
from comfyui_h3.scripts.comfy_host import ComfyHost
from comfyui_h3.scripts.demo import example_media, model_choice, set_inputs

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".cache" / "host" / "ComfyUI"
HOSTS = ["fetched", *(["COMFYUI_PATH"] if os.environ.get("COMFYUI_PATH") else [])]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.host)


@pytest.fixture(scope="session", params=HOSTS)
def host_dir(request):
    """Folder of a ComfyUI: the fetched one and, when COMFYUI_PATH is set, that one too."""
    missing = [name for name in ("torchvision", "aiohttp", "websocket") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"this Python has no {', '.join(missing)}, which ComfyUI needs: use the environment of make env")
    folder = FETCHED if request.param == "fetched" else Path(os.environ["COMFYUI_PATH"])
    if not (folder / "main.py").is_file():
        pytest.skip(f"no ComfyUI in {folder}: run scripts/fetch_comfy_host.sh .cache/host")
    return folder


@pytest.fixture(scope="session")
def start_host(host_dir, tmp_path_factory):
    """Builds (does not start) a host with the tiny H3: ``start_host(packs=..., extra_args=...)``."""
    checkpoint = tiny_checkpoint()

    def build(packs=None, extra_args=()):
        base = tmp_path_factory.mktemp("host 基") / "base"
        packs = packs or {"ComfyUI-H3": ROOT}
        # The interpreter is for kernel tests; a server that inherits it would run unlike a user's.
        env = {"TRITON_INTERPRET": "0"}
        models, inputs = {TINY_NAME: checkpoint}, example_media()
        return ComfyHost(host_dir, base, packs=packs, models=models, inputs=inputs, extra_args=extra_args, env=env)

    return build


@pytest.fixture(scope="session")
def host(start_host):
    with start_host() as host:
        yield host


@pytest.fixture(scope="session")
def tiny_prompt():
    """``tiny_prompt(host, seed=..., ...)``: the shipped T2VA workflow, small enough for seconds on a CPU."""
    shipped = json.loads((ROOT / "workflows" / "api" / "t2va.json").read_text())

    def build(host, seed=1, sigma_points=4, **request):
        prompt = copy.deepcopy(shipped)
        set_inputs(prompt, "H3LoadModel", {"model": model_choice(host, TINY_NAME)})
        set_inputs(prompt, "H3EncodePrompt", {"width": 64, "height": 64, "frames": 22, **request})
        set_inputs(prompt, "H3SampleDiT", {"seed": seed, "sigma_points": sigma_points})
        return prompt

    return build


@pytest.fixture(scope="session")
def node_id():
    """``node_id(prompt, class_type)``: id of the one node of a class."""

    def find(prompt, class_type):
        (found,) = (key for key, node in prompt.items() if node["class_type"] == class_type)
        return found

    return find


@pytest.fixture
def throttles_progress(host):
    """Whether this host drops progress messages that follow each other fast (0.4 and later may)."""
    version = host.get("/system_stats")["system"]["comfyui_version"]
    major, minor, patch = (int(part) for part in re.findall(r"\d+", version)[:3])
    return (major, minor, patch) > (0, 3, 75)


@pytest.fixture
def open_video(tmp_path):
    """``open_video(job, node=None)``: PyAV container of the MP4 that a job (or one node of it) saved."""
    import av

    def load(job, node=None):
        outputs = job.outputs()
        found = [outputs[node]] if node else outputs.values()
        (file,) = (file for output in found for file in output.get("images", []) if file["filename"].endswith(".mp4"))
        path = tmp_path / file["filename"]
        path.write_bytes(job.host.view(file))
        return av.open(str(path))

    return load
