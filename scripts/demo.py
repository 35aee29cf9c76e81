"""``make demo``: a prompt to an MP4 through the API queue of a real ComfyUI. ``make serve``: the same server, left up.

Settings are environment variables: WORKFLOW MODEL PROMPT WIDTH HEIGHT FRAMES SEED SIGMA_POINTS OUT, of the server
LISTEN PORT.
Exit codes: 0 the file is there, 1 the host or the job failed, 2 a setting is wrong, 128 + n ended by signal n.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyui_h3.scripts.checkpoints import CACHE, ROOT, TINY_NAME, tiny_checkpoint, user_checkpoint
from comfyui_h3.scripts.comfy_host import ComfyHost, Event, HostError, Job, PromptRefused, port_is_free
from comfyui_h3.scripts.terminal import StageLines, table

PACK_NAME = "ComfyUI-H3"
JOB_TIMEOUT_S = 24 * 3600
TINY_SIZE = {"width": 128, "height": 96, "num_frames": 22}  # half a minute on two CPU cores
TINY_MEDIA: dict[str, dict[str, Any]] = {  # the same for workflows with media
    "H3Canvas": {"short_edge": 96, "duration": 0.9},
    "H3ReferenceImage": {"size": "match"},
    "H3ReferenceVideo": {"short_edge": 96},
}


class SettingError(ValueError):
    """A setting that cannot be used; the message names it."""


class Ended(BaseException):
    """A signal asked this program to end."""

    def __init__(self, number: int):
        self.number = number


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run; None leaves the value of the workflow."""

    workflow: str
    model_name: str
    model: Path
    out: Path
    prompt: str | None
    width: int | None
    height: int | None
    num_frames: int | None
    seed: int | None
    sigma_points: int | None

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        workflow = env.get("WORKFLOW") or "t2va"
        known = sorted(path.stem for path in (ROOT / "workflows" / "api").glob("*.json"))
        if workflow not in known:
            raise SettingError(f"WORKFLOW={workflow} does not exist; use one of {', '.join(known)}")
        model = env.get("MODEL")
        try:
            model_name, folder = user_checkpoint(model) if model else (TINY_NAME, tiny_checkpoint())
        except ValueError as error:
            raise SettingError(str(error)) from error
        size: Mapping[str, int] = {} if model else TINY_SIZE
        out = Path(env.get("OUT") or "out")
        try:
            out.mkdir(parents=True, exist_ok=True)  # before a job that may take long
        except OSError as error:
            raise SettingError(f"OUT={out} cannot be used as a folder: {error.strerror}; choose another") from error
        return cls(
            workflow=workflow,
            model_name=model_name,
            model=folder,
            out=out,
            prompt=env.get("PROMPT") or None,
            width=number(env, "WIDTH", size.get("width")),
            height=number(env, "HEIGHT", size.get("height")),
            num_frames=number(env, "FRAMES", size.get("num_frames")),
            seed=number(env, "SEED"),
            sigma_points=number(env, "SIGMA_POINTS"),
        )


def number(env: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    """A variable as an integer; ``default`` when it is unset or empty."""
    try:
        return int(env[name]) if env.get(name) else default
    except ValueError:
        raise SettingError(f"{name}={env[name]} is not a whole number") from None


def host_folder() -> Path:
    return Path(os.environ.get("COMFYUI_PATH") or CACHE / "host" / "ComfyUI")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def model_choice(host: ComfyHost, name: str) -> str:
    """The entry of Load H3's list that stands for the linked checkpoint."""
    kind, *rest = host.object_info("H3LoadModel")["input"]["required"]["model"]
    offered = kind if isinstance(kind, list) else rest[0]["options"]
    for choice in offered:
        if choice == name or choice.startswith((f"{name}/", f"{name}\\")):
            return choice
    raise HostError(f"Load H3 does not list {name}, only {', '.join(offered)}; log: {host.log_path}")


def set_inputs(prompt: dict[str, Any], class_type: str, values: Mapping[str, object]) -> None:
    """Replace inputs of the nodes of a class; None leaves one as it is."""
    nodes = [node for node in prompt.values() if node["class_type"] == class_type]
    if not nodes:
        raise HostError(f"the workflow has no {class_type} node")
    for node in nodes:
        node["inputs"].update({name: value for name, value in values.items() if value is not None})


def prepare_prompt(host: ComfyHost, settings: Settings) -> dict[str, Any]:
    prompt = json.loads((ROOT / "workflows" / "api" / f"{settings.workflow}.json").read_text())
    set_inputs(prompt, "H3LoadModel", {"model": model_choice(host, settings.model_name)})
    set_inputs(prompt, "H3EncodePrompt", {"prompt": settings.prompt})
    set_inputs(prompt, "H3SampleDiT", {"seed": settings.seed, "sigma_points": settings.sigma_points})
    size = {"width": settings.width, "height": settings.height, "frames": settings.num_frames}
    for class_type in {node["class_type"] for node in prompt.values() if size.keys() <= node["inputs"].keys()}:
        set_inputs(prompt, class_type, size)  # media and prompt have one size; it takes the place of a linked canvas
    if settings.model_name == TINY_NAME:
        for class_type in TINY_MEDIA.keys() & {node["class_type"] for node in prompt.values()}:
            set_inputs(prompt, class_type, TINY_MEDIA[class_type])
    return prompt


def follow(job: Job, titles: Mapping[str, str]) -> list[str]:
    """Show the job's progress in the terminal until it ends. The notices it gave; HostError unless it ended well."""
    lines = StageLines(sys.stdout)
    notices: dict[str, None] = {}
    try:
        for event in job.events(JOB_TIMEOUT_S):
            node = str(event.data.get("display_node") or event.data.get("node") or "")
            if event.type == "executing" and node:
                lines.begin(titles.get(node, node))
            elif event.type == "progress" and node:
                lines.step(int(event.data["value"]), int(event.data["max"]))
            elif event.type == "text":
                for line in str(event.data["text"]).splitlines():
                    if line.startswith("notice: "):
                        notices.update(dict.fromkeys(line.removeprefix("notice: ").split("; ")))
            elif event.type in ("execution_error", "execution_interrupted"):
                raise HostError(describe_failure(event, job.host))
    finally:
        lines.end()
    return list(notices)


def describe_failure(event: Event, host: ComfyHost) -> str:
    if event.type == "execution_interrupted":
        return f"the job was cancelled; log: {host.log_path}"
    message = str(event.data.get("exception_message", "")).strip() or str(event.data.get("exception_type"))
    return f"{event.data.get('node_type')}: {message.splitlines()[0]}\nlog: {host.log_path}"


def fetch_video(host: ComfyHost, output: Mapping[str, Any], out: Path) -> Path:
    """Copy the saved file into ``out`` under the next free number."""
    content = host.view(output["images"][0])
    count = 1
    while (path := out / f"h3_{count:05}.mp4").exists():
        count += 1
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)
    return path


def describe_video(path: Path) -> str:
    import av

    with av.open(str(path)) as container:
        video, sound = container.streams.video[0], next(iter(container.streams.audio), None)
        text = f"{path}: {video.width}x{video.height}, {video.frames} frames at {float(video.average_rate or 0):g} fps"
        return f"{text}, sound {sound.rate} Hz {sound.layout.name}" if sound else f"{text}, no sound"


def run_demo(settings: Settings, base: Path) -> None:
    started = time.monotonic()
    print(f"starting ComfyUI with {settings.model_name} ({settings.model})", flush=True)
    packs, models = {PACK_NAME: ROOT}, {settings.model_name: settings.model}
    inputs = example_media()
    with ComfyHost(host_folder(), base, packs=packs, models=models, inputs=inputs, cpu=not has_gpu()) as host:
        print(f"ready at {host.url} after {time.monotonic() - started:.1f} s", flush=True)
        nodes = host.object_info()
        if "H3LoadModel" not in nodes:
            raise HostError(f"ComfyUI could not import the pack; log: {host.log_path}\n{host.log_tail()}")
        prompt = prepare_prompt(host, settings)
        titles = {key: nodes[node["class_type"]]["display_name"] for key, node in prompt.items()}
        job_started = time.monotonic()
        job = host.submit(prompt)
        notices = follow(job, titles)
        job_seconds = time.monotonic() - job_started
        saved = next(output for output in job.outputs().values() if "h3_timings" in output)
        try:
            path = fetch_video(host, saved, settings.out)
        except OSError as error:
            kept = host.base_dir / "output" / saved["images"][0]["subfolder"] / saved["images"][0]["filename"]
            raise HostError(f"cannot write to {settings.out}: {error.strerror}; the video is at {kept}") from error
    rows = [(row["name"], f"{row['seconds']:.2f}", str(row["num_units"] or "")) for row in saved["h3_timings"]]
    rows += [("job, as seen by the client", f"{job_seconds:.2f}", "")]
    print("\n" + table(("stage", "seconds", "units"), rows) + "\n")
    for notice in notices:
        print(f"notice: {notice}")
    print(describe_video(path))


def example_media() -> list[Path]:
    """The files that the example workflows load."""
    return sorted((ROOT / "workflows" / "media").iterdir())


def widget_names(host: ComfyHost, class_type: str) -> list[str]:
    """Inputs of a node that are widgets, in the order of ``widgets_values``; the others are sockets."""
    info = host.object_info(class_type)
    groups = [(info["input"].get(group, {}), info["input_order"].get(group, [])) for group in ("required", "optional")]
    return [name for inputs, order in groups for name in order if _is_widget(inputs[name][0])]


def _is_widget(kind: object) -> bool:
    return isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def offer_workflows(host: ComfyHost, settings: Settings) -> None:
    """Put the workflows of this pack into the page's list, with the served checkpoint chosen. Saved ones stay.

    A tiny checkpoint gets a tiny size: at the size of the release, a CPU would need minutes for each forward of it.
    """
    sizes = {"width": settings.width, "height": settings.height, "frames": settings.num_frames}
    values: dict[str, dict[str, Any]] = {
        "H3LoadModel": {"model": model_choice(host, settings.model_name)},
        "H3EncodePrompt": {name: value for name, value in sizes.items() if value is not None},
        **(TINY_MEDIA if settings.model_name == TINY_NAME else {}),
    }
    widgets = {class_type: widget_names(host, class_type) for class_type in values}
    folder = host.base_dir / "user" / "default" / "workflows"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted((ROOT / "workflows").glob("*.json")):
        workflow = json.loads(source.read_text())
        for node in workflow["nodes"]:
            for name, value in values.get(node["type"], {}).items():
                node["widgets_values"][widgets[node["type"]].index(name)] = value
        target = folder / source.name
        if not target.exists():
            target.write_text(json.dumps(workflow))


def run_server(settings: Settings, base: Path) -> None:
    """Serve the graph editor until Ctrl-C. Models, inputs, outputs and saved workflows stay in ``base``."""
    user = base / "user" / "default"
    user.mkdir(parents=True, exist_ok=True)
    if not (user / "comfy.settings.json").exists():
        # Else the first visit shows a dialog of templates over the graph.
        (user / "comfy.settings.json").write_text(json.dumps({"Comfy.TutorialCompleted": True}))
    address = os.environ.get("LISTEN") or "127.0.0.1"
    port = number(os.environ, "PORT", 8188) or 0
    if port and not port_is_free(address, port):
        if os.environ.get("PORT"):
            raise SettingError(f"PORT={port} is in use; choose another, or 0 for any free one")
        print(f"port {port} is in use, taking another")
        port = 0
    print(f"starting ComfyUI with {settings.model_name} ({settings.model})", flush=True)
    packs, models = {PACK_NAME: ROOT}, {settings.model_name: settings.model}
    host = ComfyHost(
        host_folder(),
        base,
        packs=packs,
        models=models,
        inputs=example_media(),
        page=True,
        address=address,
        port=port,
        cpu=not has_gpu(),
    )
    with host:
        offer_workflows(host, settings)
        print(f"ComfyUI is up: {host.url}  (workflows: press w in the page; log: {host.log_path}; Ctrl-C stops it)")
        sys.stdout.flush()
        while True:
            host.check_alive(grace_s=1)


def end(number: int, _frame: object) -> None:
    raise Ended(number)


def main() -> int:
    serve = sys.argv[1:] == ["--serve"]
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, end)
    base: Path | None = None
    failed = True
    try:
        settings = Settings.from_env(os.environ)
        (CACHE / "runs").mkdir(parents=True, exist_ok=True)
        base = CACHE / "serve" if serve else Path(tempfile.mkdtemp(prefix="demo-", dir=CACHE / "runs"))
        (run_server if serve else run_demo)(settings, base)
        failed = False
        return 0
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    except PromptRefused as error:
        print(f"{error}\nlog: {base}/comfyui.log", file=sys.stderr)
        return 1
    except (HostError, OSError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    except Ended as error:
        print("stopped", file=sys.stderr)
        failed = False
        return 0 if serve and error.number == signal.SIGINT else 128 + error.number
    finally:
        if base is not None and not serve and not failed:
            shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
