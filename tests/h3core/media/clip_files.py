"""Small video files made for one test: a bar that tells the time, colours in the corners, a soundtrack with a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

WIDTH, HEIGHT = 256, 64
BAR_WIDTH = 8
PIXELS_PER_SECOND = 60
BAR_S = 0.002  # how exactly a bar tells the time: an eighth of a pixel
SLOT_S = 1 / 24
EDGE = 64  # short edge of the canvas in tests: that of the bar's own 4:1 picture
NTSC_FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)
RATES = (NTSC_FILM, Fraction(24), Fraction(25), NTSC, Fraction(30), Fraction(50), Fraction(60))
LOSSLESS = {"crf": "0", "preset": "ultrafast"}


def bar_at(seconds: Fraction | float, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """(height, width, 3) uint8: a white bar, ``seconds * PIXELS_PER_SECOND`` pixels from the left, on black."""
    x = np.arange(width) - float(seconds) * PIXELS_PER_SECOND
    row = 255 * np.clip(np.minimum(x + 1, BAR_WIDTH - x), 0, 1)  # edges between two pixels are gray
    return np.broadcast_to(np.rint(row)[None, :, None], (height, width, 3)).astype(np.uint8)


def time_of(frame: np.ndarray) -> float:
    """Seconds that the bar of a frame of any size shows."""
    row = frame[frame.shape[0] // 2, :, 0].astype(np.float64)
    row[row < 40] = 0
    centre = (row * (np.arange(len(row)) + 0.5)).sum() / row.sum() * WIDTH / len(row)
    return (centre - BAR_WIDTH / 2) / PIXELS_PER_SECOND


def times_shown(frames: Tensor) -> list[float]:
    """Seconds that the bar shows, of each frame."""
    return [time_of(frame.numpy()) for frame in frames]


def bar_pixels(rate: Fraction | int, num_frames: int) -> Tensor:
    """(F, HEIGHT, WIDTH, 3) uint8: the bar at ``rate``."""
    return torch.from_numpy(np.stack([bar_at(index / Fraction(rate)) for index in range(num_frames)]))


def bar_file(folder: Path, rate: Fraction, seconds: float = 2.0, name: str = "bar.mp4", **options: Any) -> Path:
    """The bar at ``rate`` as a file; options: of ``write_clip``."""
    num_frames = math.ceil(seconds * rate)
    return write_clip(folder / name, (bar_at(index / rate) for index in range(num_frames)), rate=rate, **options)


def click_at(seconds: float, rate: int = 48000, length_s: float = 2.0, num_channels: int = 2) -> np.ndarray:
    """Silence, then full sound from ``seconds`` on."""
    sound = np.zeros((num_channels, round(rate * length_s)), np.float32)
    sound[:, round(rate * seconds) :] = 0.5
    return sound


def corners(width: int = 64, height: int = 48) -> np.ndarray:
    """Red at the top left, green at the top right, blue at the bottom left, black at the bottom right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2, 0] = 255
    pixels[: height // 2, width // 2 :, 1] = 255
    pixels[height // 2 :, : width // 2, 2] = 255
    return pixels


def write_clip(
    path: Path,
    frames: Iterable[np.ndarray],  # (height, width), (height, width, 3) or (height, width, 4) uint8
    *,
    rate: Fraction | int = 24,
    times: Iterable[int] | None = None,
    time_base: Fraction | None = None,
    codec: str = "libx264",
    pix_fmt: str = "yuv444p",
    options: dict[str, str] | None = None,
    aspect: Fraction | None = None,
    rotation: float | None = None,
    matrix: list[int] | None = None,
    sound: np.ndarray | None = None,
    sound_rate: int = 48000,
    sound_start_s: Fraction = Fraction(0),
    container: dict[str, Any] | None = None,
) -> Path:
    """Writes the frames at ``rate``, or at ``times`` in units of ``time_base``; sound: (channels, N) as FLAC or AAC."""
    pictures = list(frames)
    height, width = pictures[0].shape[:2]
    base = time_base or 1 / Fraction(rate)
    with av.open(str(path), "w", **(container or {})) as output:
        stream = output.add_stream(codec, rate=rate, options=options or (LOSSLESS if codec == "libx264" else {}))
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.time_base = stream.time_base = base
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if matrix is not None:
            stream.set_display_matrix(matrix)
        track = None if sound is None else _add_sound(output, path, sound_rate, len(sound))
        for index, (pixels, time) in enumerate(zip(pictures, times or range(len(pictures)), strict=True)):
            kind = "gray" if pixels.ndim == 2 else {3: "rgb24", 4: "rgba"}[pixels.shape[-1]]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=kind)
            frame.pts, frame.time_base = time, base
            output.mux(stream.encode(frame))
            if index == 0 and track is not None and sound is not None:
                _write_sound(output, track, sound, sound_rate, sound_start_s)
        output.mux(stream.encode(None))
    return path


def _add_sound(output: Any, path: Path, rate: int, num_channels: int) -> Any:
    codecs = {".mp4": "aac", ".mkv": "pcm_f32le", ".ts": "mp2", ".mpg": "mp2"}
    codec = codecs.get(path.suffix, "pcm_s16le")
    return output.add_stream(codec, rate=rate, layout="mono" if num_channels == 1 else "stereo")


def _write_sound(output: Any, track: Any, sound: np.ndarray, rate: int, start_s: Fraction) -> None:
    layout = track.codec_context.layout.name
    convert = av.AudioResampler(format=track.codec_context.format, layout=layout, rate=rate)
    for start in range(0, sound.shape[1], 1024):
        piece = np.ascontiguousarray(sound[:, start : start + 1024], dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), start + round(start_s * rate)
        for converted in convert.resample(frame):
            output.mux(track.encode(converted))
    output.mux(track.encode(None))
