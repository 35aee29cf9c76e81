"""H3 Save MP4: any VIDEO becomes a file in the host's output folder, with a player on the node."""

import json
import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import io

from comfyui_h3.h3core.errors import OutputError, RequestError
from comfyui_h3.h3core.media.mp4 import CRF_MAX, CRF_MIN, DEFAULT_CRF, DEFAULT_PRESET, PRESETS, check_options, write_mp4
from comfyui_h3.nodes import audio as host_audio
from comfyui_h3.nodes._compat import make
from comfyui_h3.nodes.checks import verdict
from comfyui_h3.nodes.progress import HostProgress
from comfyui_h3.nodes.video import from_host

MAX_NAME_BYTES = 200  # file systems take 255; the number and the ending follow


class H3SaveMP4(io.ComfyNode):
    """Takes the VIDEO of any node; ours goes to the encoder without a float copy."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make(
            io.Schema,
            node_id="H3SaveMP4",
            display_name="H3 Save MP4",
            category="MiniMax H3",
            description="Writes H.264 and AAC into an MP4 in the output folder: BT.709 colours, index first, exact "
            "frame times. Takes the VIDEO of any node; frame rate and sample rate are kept.",
            search_aliases=["minimax", "hailuo", "h3", "save video", "export", "mp4"],
            is_output_node=True,
            inputs=[
                io.Video.Input("video", tooltip="From H3 Decode Video or any other node; both sides even."),
                io.Audio.Input(
                    "audio", optional=True, tooltip="Mono or stereo. Takes the place of the sound that the video has."
                ),
                io.String.Input(
                    "filename_prefix",
                    default="video/H3",
                    tooltip="Name below the output folder; a number is added. %width%, %height%, %year%, %month%, "
                    "%day%, %hour%, %minute% and %second% are filled in.",
                ),
                make(
                    io.Int.Input,
                    "crf",
                    default=DEFAULT_CRF,
                    min=CRF_MIN,
                    max=CRF_MAX,
                    tooltip=f"Quality, {CRF_MIN} (lossless, which few players show) to {CRF_MAX} (smallest file). "
                    "18 shows hardly any loss.",
                    advanced=True,
                ),
                make(
                    io.Combo.Input,
                    "preset",
                    options=list(PRESETS),
                    default=DEFAULT_PRESET,
                    tooltip="Speed of the encoder: slower ones make smaller files of the same quality.",
                    advanced=True,
                ),
                make(
                    io.Boolean.Input,
                    "save_metadata",
                    default=True,
                    tooltip="Keep prompt and workflow in the file: dropped on the page, it brings its graph back. "
                    "The host's --disable-metadata wins.",
                    advanced=True,
                ),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def validate_inputs(cls, filename_prefix=None, crf=DEFAULT_CRF, preset=DEFAULT_PRESET) -> bool | str:
        return verdict(
            lambda: filename_prefix is None or check_prefix(filename_prefix),
            lambda: check_options(DEFAULT_CRF if crf is None else crf, DEFAULT_PRESET if preset is None else preset),
            check_output_folder,
        )

    @classmethod
    def execute(cls, video, filename_prefix, crf, preset, save_metadata, audio=None) -> io.NodeOutput:
        frames, sound = from_host(video)
        if audio is not None:
            sound = host_audio.from_host(audio)
        path, subfolder = output_path(filename_prefix, frames.pixels.shape[2], frames.pixels.shape[1])
        metadata = graph_tags(cls.hidden.prompt, cls.hidden.extra_pnginfo) if save_metadata else {}
        on_progress = HostProgress("Writing the MP4", waiting_for="the encoder")
        mp4 = write_mp4(path, frames, sound, metadata=metadata, crf=crf, preset=preset, on_progress=on_progress)
        stages = [
            {"name": stage.name, "seconds": stage.seconds, "num_units": stage.num_units} for stage in mp4.timings.stages
        ]
        saved = {"filename": path.name, "subfolder": subfolder, "type": "output"}
        return io.NodeOutput(ui={"images": [saved], "animated": (True,), "h3_timings": stages})


def check_prefix(prefix: str) -> str:
    """The prefix without control characters. Raises RequestError for what would leave the output folder."""
    clean = "".join(letter for letter in prefix if not _is_control(letter)).strip()
    windows = PureWindowsPath(clean)
    if windows.drive or windows.root or ".." in windows.parts or ".." in PurePosixPath(clean).parts:
        raise RequestError(f"filename_prefix={clean!r} leaves the output folder; use a name like video/H3")
    if max(len(os.fsencode(part)) for part in PurePosixPath(clean).parts or ("",)) > MAX_NAME_BYTES:
        raise RequestError(
            f"filename_prefix={clean[:40]!r}… is too long for a file name; use {MAX_NAME_BYTES} bytes or less"
        )
    if not clean or clean.endswith(("/", "\\")) or windows.name in ("", "."):
        raise RequestError(f"filename_prefix={clean!r} has no file name; use a name like video/H3")
    return clean


def check_output_folder() -> None:
    """Raises OutputError when the host's output folder takes no files: better before the job than after it."""
    root = folder_paths.get_output_directory()
    if os.path.isdir(root) and not os.access(root, os.W_OK | os.X_OK):
        raise OutputError(f"the output folder {root} is not writable; start the host with another --output-directory")


def _is_control(letter: str) -> bool:
    """Control characters, half surrogates, and the marks that turn the reading direction; not the joiner of emoji."""
    return unicodedata.category(letter) in ("Cc", "Cf", "Cs") and letter != "\u200d"


def output_path(prefix: str, width: int, height: int) -> tuple[Path, str]:
    """A free file name in the output folder, and its subfolder as the host's page asks for it."""
    prefix = check_prefix(prefix)
    root = folder_paths.get_output_directory()
    try:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root, width, height)
    except OSError as error:
        raise OutputError(
            f"cannot use the output folder {root} for {prefix!r}: {error.strerror or error}; "
            "choose another filename_prefix or start the host with another --output-directory"
        ) from error
    return Path(folder) / f"{name}_{counter:05}_.mp4", subfolder


def graph_tags(prompt: object, extra_pnginfo: dict[str, object] | None) -> dict[str, str]:
    """The graph as tags of the file, as the host tags its own; empty when it runs with --disable-metadata."""
    if args.disable_metadata:
        return {}
    extra = extra_pnginfo if isinstance(extra_pnginfo, Mapping) else {}  # a client may send anything
    tags = {name: json.dumps(value) for name, value in extra.items() if name.isprintable() and name.isascii()}
    return tags if prompt is None else {**tags, "prompt": json.dumps(prompt)}
