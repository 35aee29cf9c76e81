"""Our frames and the host's VIDEO, in both directions."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, BinaryIO

import torch
from comfy_api.latest import Input, InputImpl, Types

from comfyui_h3.h3core.media.clips import Clip, FileClip, MemoryClip
from comfyui_h3.h3core.media.frames import images_to_uint8
from comfyui_h3.h3core.media.mp4 import write_mp4, write_mp4_stream
from comfyui_h3.h3core.types import Audio, Frames
from comfyui_h3.nodes import audio as host_audio
from comfyui_h3.nodes.checks import expect


class H3Video(Input.Video):
    """A VIDEO of the host over uint8 frames: a quarter of the host's float batch, which is made only when asked for."""

    def __init__(self, frames: Frames, audio: Audio | None = None):
        self.frames, self.audio = frames, audio

    def get_components(self) -> Types.VideoComponents:
        """Everything as the host holds it: images (F, H, W, 3) float32 in [0, 1]. Made anew in each call."""
        sound = None if self.audio is None else host_audio.H3Audio(self.audio)
        images = self.frames.pixels.to(torch.float32).div_(255)
        return Types.VideoComponents(images=images, audio=sound, frame_rate=self.frames.fps)

    def save_to(
        self,
        path: str | BinaryIO,
        format: Any = "auto",
        codec: Any = "auto",
        metadata: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """H.264 in MP4 straight from the frames. Any other format is left to the host's encoder."""
        named = [str(getattr(value, "value", value)).lower() for value in (format, codec)]
        ours = named[0] in ("auto", "mp4") and named[1] in ("auto", "h264")
        if not ours or not all(_is_default(name, value) for name, value in options.items()):
            floats = InputImpl.VideoFromComponents(self.get_components())
            floats.save_to(path, format=format, codec=codec, metadata=metadata, **options)
            return
        tags = {name: json.dumps(value) for name, value in (metadata or {}).items()}
        if isinstance(path, str | os.PathLike):
            write_mp4(path, self.frames, self.audio, metadata=tags)
        else:
            write_mp4_stream(path, self.frames, self.audio, metadata=tags)

    def as_trimmed(
        self, start_time: float | None = None, duration: float | None = None, strict_duration: bool = False
    ) -> "H3Video | None":
        """The part from ``start_time`` seconds (negative: from the end) of ``duration`` seconds (None, 0: to the end).

        None when nothing is left, or with ``strict_duration`` less than asked for. Nothing is copied.
        """
        fps, num_frames = self.frames.fps, self.get_frame_count()
        start = round(Fraction(start_time or 0) * fps)
        start = max(0, start + num_frames if start < 0 else start)
        wanted = round(Fraction(duration) * fps) if duration else num_frames - start
        stop = min(start + wanted, num_frames)
        if stop <= start or (strict_duration and stop - start < wanted):
            return None
        sound = self.audio
        if sound is not None:
            first, last = (round(index / fps * sound.sample_rate) for index in (start, stop))
            last = sound.samples.shape[1] if stop == num_frames else last
            samples = sound.samples[:, first:last]
            sound = replace(sound, samples=samples) if samples.shape[1] else None  # it may be shorter than the picture
        return H3Video(replace(self.frames, pixels=self.frames.pixels[start:stop]), sound)

    def get_dimensions(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.frames.pixels.shape[2], self.frames.pixels.shape[1]

    def get_duration(self) -> float:
        """Seconds of picture."""
        return float(self.get_frame_count() / self.frames.fps)

    def get_frame_count(self) -> int:
        return self.frames.pixels.shape[0]

    def get_frame_rate(self) -> Fraction:
        return self.frames.fps

    def get_container_format(self) -> str:
        """The name FFmpeg gives to what ``save_to`` writes."""
        return "mov,mp4,m4a,3gp,3g2,mj2"


def from_host(video: Input.Video) -> tuple[Frames, Audio | None]:
    """Frames and sound of any VIDEO. Float images are rounded to 8 bits; frame rate and sample rate are kept."""
    if isinstance(video, H3Video):
        return video.frames, video.audio
    components = expect(video, Input.Video, "a node that gives VIDEO").get_components()
    sound = None if components.audio is None else host_audio.from_host(components.audio)
    return Frames(pixels=images_to_uint8(components.images), fps=Fraction(components.frame_rate)), sound


def clip_from_host(video: Any) -> Clip:
    """Any VIDEO as a reference clip. A file is decoded in a stream when it is needed, never into one float batch.

    What a host trimmed stays trimmed. Frames that a node made are taken as they are, without a copy.
    """
    expect(video, Input.Video, "a node that gives VIDEO")
    if isinstance(video, H3Video):
        return MemoryClip(video.frames.pixels, video.frames.fps, video.audio)
    if type(video).get_stream_source is not Input.Video.get_stream_source:  # else the host would encode a file for it
        window = getattr(video, "get_active_trim_window", None)  # older hosts have none
        start_s, duration_s = (0.0, 0.0) if window is None else window()
        return FileClip(video.get_stream_source(), start_s=start_s, duration_s=duration_s or None)
    components = video.get_components()
    sound = None if components.audio is None else host_audio.first_clip(components.audio, "the sound of the video")[0]
    return MemoryClip(components.images, Fraction(components.frame_rate), sound)


def _is_default(name: str, value: Any) -> bool:
    """Whether an option of ``save_to`` asks for what we write anyway: 8 bits, sRGB, our own quality."""
    return value is None or (name, value) in (("bit_depth", 8), ("color_space", "sRGB"), ("color_space", "auto"))
