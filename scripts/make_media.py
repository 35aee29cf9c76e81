"""Draws the pictures, the clip and the voice of the example workflows into workflows/media/.

python _bootstrap.py scripts.make_media

Pixels and samples are the same in every run; the files differ with the versions of zlib and x264.
"""

from __future__ import annotations

import math
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.types import Audio, Frames

ROOT = Path(__file__).resolve().parents[1]
MEDIA = ROOT / "workflows" / "media"
FIRST_FRAME, LAST_FRAME = "h3_first_frame.png", "h3_last_frame.png"
PICTURE, CLIP, VOICE = "h3_robot.png", "h3_hills.mp4", "h3_voice.wav"

SCALE = 3  # shapes are drawn this much larger, for smooth edges
CLIP_SECONDS, FPS, CLIP_RATE, VOICE_RATE = 3, 24, 32000, 24000

Colour = tuple[int, int, int]
DAWN: tuple[Colour, Colour] = ((108, 160, 214), (252, 226, 188))  # sky above and at the horizon
DUSK: tuple[Colour, Colour] = ((52, 44, 96), (246, 140, 92))
HILLS: tuple[tuple[Colour, Colour], ...] = (  # far to near, at dawn and at dusk
    ((150, 182, 178), (120, 92, 128)),
    ((112, 164, 128), (88, 72, 108)),
    ((70, 136, 84), (52, 54, 76)),
)


def scene(width: int, height: int, day: float, camera: float, balloon: tuple[float, float] | None) -> Image.Image:
    """Hills below a sky. day: 0 dawn to 1 dusk. camera: how far it has moved to the right, in widths of the picture.

    balloon: (x, y) of the middle of its envelope as parts of width and height; None leaves it out.
    """
    image = _gradient(width, height, *(_mix(DAWN[end], DUSK[end], day) for end in (0, 1)))
    sun = (0.78 - 0.1 * camera, 0.30 + 0.22 * day)
    _disc(image, sun[0] * width, sun[1] * height, 0.075 * height, _mix((255, 246, 214), (255, 206, 132), day))
    for layer, colours in enumerate(HILLS):
        colour = _mix(*colours, day)
        shift = camera * (0.25 + 0.35 * layer)  # nearer ridges pass faster
        _paint(image, [_ridge(layer, x / width + shift) * height for x in _columns(width)], colour)
        if layer == 1 and balloon is not None:
            _balloon(image, balloon[0] * width, balloon[1] * height, 0.17 * height, day)
    return image


def first_frame() -> Image.Image:
    return scene(1344, 768, 0.0, 0.0, (0.27, 0.42))


def last_frame() -> Image.Image:
    return scene(1344, 768, 1.0, 0.12, (0.60, 0.24))


def robot(size: int = 768) -> Image.Image:
    """A toy robot of blue tin on a cream ground."""
    unit = size * SCALE / 768
    image = Image.new("RGB", (size * SCALE, size * SCALE), (246, 238, 220))
    pen = ImageDraw.Draw(image)
    blue, dark, light = (66, 122, 178), (38, 74, 116), (136, 184, 222)
    red, cream = (214, 74, 58), (250, 244, 228)

    def box(x: float, y: float, right: float, bottom: float, radius: float, fill: Colour) -> None:
        pen.rounded_rectangle([value * unit for value in (x, y, right, bottom)], radius * unit, fill=fill)

    def disc(x: float, y: float, radius: float, fill: Colour) -> None:
        pen.ellipse([value * unit for value in (x - radius, y - radius, x + radius, y + radius)], fill=fill)

    pen.ellipse([value * unit for value in (214, 676, 554, 724)], fill=(222, 210, 186))  # shadow
    for x in (292, 412):  # legs, feet
        box(x, 560, x + 64, 684, 20, dark)
        box(x - 18, 664, x + 82, 704, 20, red)
    for x, right in ((178, 248), (520, 590)):  # arms, hands
        box(x, 356, right, 548, 34, dark)
        disc((x + right) / 2, 560, 38, red)
    box(232, 328, 536, 584, 44, blue)
    box(232, 328, 300, 584, 44, light)
    box(272, 328, 536, 584, 44, blue)
    box(300, 380, 468, 470, 18, cream)  # the panel with its dial and lamps
    pen.arc([value * unit for value in (330, 396, 438, 504)], 180, 360, fill=dark, width=round(8 * unit))
    pen.line([value * unit for value in (384, 450, 414, 412)], fill=red, width=round(8 * unit))
    for number, colour in enumerate((red, (240, 180, 60), (92, 168, 96))):
        disc(324 + 60 * number, 524, 18, colour)
    box(356, 296, 412, 340, 10, dark)  # neck
    box(262, 128, 506, 306, 56, light)
    box(278, 128, 506, 306, 56, blue)
    for x in (334, 434):
        disc(x, 206, 38, cream)
        disc(x, 206, 20, dark)
        disc(x + 7, 198, 7, cream)
    box(336, 258, 432, 276, 9, dark)
    box(379, 64, 389, 132, 5, dark)
    disc(384, 62, 20, red)
    return image.resize((size, size), Image.Resampling.BOX)


def clip() -> tuple[Frames, Audio]:
    """The camera moves to the right past the hills; wind, and a bell at each second."""
    pictures = [
        np.asarray(scene(640, 352, 0.15, 0.9 * _ease(index / (CLIP_SECONDS * FPS - 1)), None))
        for index in range(CLIP_SECONDS * FPS)
    ]
    rng = np.random.default_rng(7)
    time = np.arange(CLIP_SECONDS * CLIP_RATE) / CLIP_RATE
    wind = np.convolve(rng.standard_normal(len(time) + 255), np.hanning(256) / 64, mode="valid")
    wind *= 0.12 * (0.6 + 0.4 * np.sin(2 * math.pi * time / CLIP_SECONDS))
    bells = np.zeros_like(time)
    for start, pitch in ((0.25, 660.0), (1.25, 880.0), (2.25, 740.0)):
        since = np.clip(time - start, 0, None)
        ring = sum(np.sin(2 * math.pi * pitch * part * since) / part for part in (1, 2.76, 5.4))
        bells += 0.12 * ring * np.exp(-4 * since) * (time >= start)
    sound = np.stack([wind + bells, np.roll(wind, 400) + 0.8 * bells])
    frames = Frames(pixels=torch.from_numpy(np.stack(pictures)))
    return frames, Audio(samples=torch.from_numpy(sound.astype(np.float32)), sample_rate=CLIP_RATE)


def voice() -> np.ndarray:
    """(N,) float: three sung vowels, ah, oh, ee, from a pulse train through the resonances of each."""
    num_samples = CLIP_SECONDS * VOICE_RATE
    time = np.arange(num_samples) / VOICE_RATE
    pitch = 128 + 18 * np.sin(2 * math.pi * 0.45 * time) + 2.5 * np.sin(2 * math.pi * 5.2 * time)
    phase = np.cumsum(pitch) / VOICE_RATE
    pulses = np.diff(np.floor(phase), prepend=0.0)
    vowels = ((730, 1090, 2440), (570, 840, 2410), (270, 2290, 3010))
    total = np.zeros(num_samples)
    for number, formants in enumerate(vowels):
        level = np.clip(1.6 - np.abs(time - (number + 0.5)) * 3.2, 0, 1)
        spoken = sum(_resonance(pulses, frequency) / (1 + part) for part, frequency in enumerate(formants))
        total += level * spoken
    return 0.4 * total / np.abs(total).max()


def _resonance(signal: np.ndarray, frequency: float, width: float = 90.0) -> np.ndarray:
    """Signal through a two-pole filter, as a convolution with its ringing."""
    time = np.arange(VOICE_RATE // 25) / VOICE_RATE
    ringing = np.exp(-math.pi * width * time) * np.sin(2 * math.pi * frequency * time)
    return np.convolve(signal, ringing)[: len(signal)]


def _balloon(image: Image.Image, x: float, y: float, radius: float, day: float) -> None:
    """A striped hot-air balloon; x, y is the middle of its envelope."""
    side = math.ceil(radius * 4)
    left, top = round(x) - side // 2, round(y) - side // 2
    layer = Image.new("RGBA", (side * SCALE, side * SCALE))
    pen, middle, size = ImageDraw.Draw(layer), side * SCALE / 2, radius * SCALE
    stripes = ((206, 58, 50), (244, 206, 116), (206, 58, 50), (244, 206, 116), (206, 58, 50))
    for number, colour in enumerate(stripes):  # each a narrower ellipse over the last
        half = size * (1 - number * 0.2)
        pen.polygon(_envelope(middle, middle, half, size), fill=(*_mix(colour, (96, 40, 72), 0.45 * day), 255))
    rope, basket = _mix((120, 84, 56), (52, 36, 48), day), _mix((156, 104, 60), (70, 46, 52), day)
    for offset in (-0.2, 0.2):
        pen.line(
            (middle + 1.2 * offset * size, middle + 1.12 * size, middle + 0.7 * offset * size, middle + 1.5 * size),
            fill=(*rope, 255),
            width=SCALE * 2,
        )
    pen.rounded_rectangle(
        (middle - 0.17 * size, middle + 1.48 * size, middle + 0.17 * size, middle + 1.72 * size),
        0.05 * size,
        fill=(*basket, 255),
    )
    small = layer.resize((side, side), Image.Resampling.BOX)
    image.paste(small, (left, top), small)


def _envelope(x: float, y: float, half_width: float, size: float) -> Sequence[tuple[float, float]]:
    """Outline of a balloon: round above, drawn in towards the basket."""
    points = []
    for angle in np.linspace(-math.pi, math.pi, 120):
        down = -math.cos(angle)
        narrow = 1.0 if down < 0 else 1 - 0.72 * down**2
        points.append((x + half_width * math.sin(angle) * narrow, y + size * down * (1.0 if down < 0 else 1.15)))
    return points


def _ridge(layer: int, x: float) -> float:
    """Height of a ridge at x, as a part of the picture's height, from above."""
    base, swing = 0.60 + 0.13 * layer, 0.075 - 0.012 * layer
    return base + swing * (math.sin(5.1 * x + 1.7 * layer) + 0.45 * math.sin(11.3 * x + 2.9 * layer))


def _columns(width: int) -> range:
    return range(0, width + 8, 4)


def _paint(image: Image.Image, ridge: Sequence[float], colour: Colour) -> None:
    """Everything below a ridge, which is given at each of ``_columns``, in one colour."""
    width, height = image.size
    mask = Image.new("L", (width * SCALE, height * SCALE))
    points = [(x * SCALE, y * SCALE) for x, y in zip(_columns(width), ridge, strict=True)]
    corners = [(points[-1][0], height * SCALE), (0, height * SCALE)]
    ImageDraw.Draw(mask).polygon([*points, *corners], fill=255)
    image.paste(Image.new("RGB", image.size, colour), (0, 0), mask.resize(image.size, Image.Resampling.BOX))


def _disc(image: Image.Image, x: float, y: float, radius: float, colour: Colour) -> None:
    side = math.ceil(2 * radius) + 2
    mask = Image.new("L", (side * SCALE, side * SCALE))
    middle = side * SCALE / 2
    ImageDraw.Draw(mask).ellipse([middle - radius * SCALE] * 2 + [middle + radius * SCALE] * 2, fill=255)
    small = mask.resize((side, side), Image.Resampling.BOX)
    image.paste(Image.new("RGB", small.size, colour), (round(x) - side // 2, round(y) - side // 2), small)


def _gradient(width: int, height: int, above: Colour, below: Colour) -> Image.Image:
    part = np.linspace(0, 1, height)[:, None]
    column = np.round((1 - part) * np.array(above) + part * np.array(below)).astype(np.uint8)
    return Image.fromarray(np.broadcast_to(column[:, None], (height, width, 3)).copy())


def _mix(one: Colour, other: Colour, part: float) -> Colour:
    red, green, blue = (round((1 - part) * a + part * b) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _ease(part: float) -> float:
    return part * part * (3 - 2 * part)


def main() -> int:
    MEDIA.mkdir(parents=True, exist_ok=True)
    first_frame().save(MEDIA / FIRST_FRAME, optimize=True)
    last_frame().save(MEDIA / LAST_FRAME, optimize=True)
    robot().save(MEDIA / PICTURE, optimize=True)
    frames, sound = clip()
    write_mp4(MEDIA / CLIP, frames, sound, crf=26, preset="medium")
    with wave.open(str(MEDIA / VOICE), "wb") as file:
        file.setparams((1, 2, VOICE_RATE, 0, "NONE", ""))
        file.writeframes(np.round(voice() * 32767).astype("<i2").tobytes())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
