"""Frames of a media file as a player shows them: upright, in true colours, transparent parts on white."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.video.stream import VideoStream

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.decode import REMEDY, MediaFile

# Exactly the formula of the colour matrix, rounded; the default is up to 3 steps off and does not interpolate chroma.
# The numbers are swscale's, which older PyAV has no names for: bicubic, full chroma, accurate rounding.
SCALER = 0x4 | 0x2000 | 0x40000
# ITU-T H.273 number of a colour matrix -> swscale's. Older PyAV does not follow the tag by itself.
ITU601, FULL_RANGE = 5, 2
MATRICES = {1: 1, 4: 4, 5: ITU601, 6: ITU601, 7: 7}
UNTAGGED, RESERVED = 2, 3
BY_TAG_OR_DEFAULT = (0, UNTAGGED, RESERVED, 9)  # RGB; BT.601, as FFmpeg reads what has no tag; BT.2020
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}
OPAQUE = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How a file is to be shown: first rows and columns change places, then each may run backwards."""

    transposed: bool = False
    flips_rows: bool = False
    flips_columns: bool = False


def turn_of(frame: av.VideoFrame) -> Turn:
    """The quarter turn and mirroring of a frame's display matrix, which is that of its file.

    To be asked of one frame only: PyAV ties a frame that was asked to itself, and its pixels stay until Python looks
    for such circles (0.5 GB in a clip of 15 s).
    """
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return Turn()
    # Pixel (x, y) is shown at (a x + c y, b x + d y), up to a shift.
    a, b, _, c, d = np.frombuffer(data, np.int32)[:5].tolist()
    if abs(b) > abs(a):
        return Turn(transposed=True, flips_rows=b < 0, flips_columns=c < 0)
    return Turn(flips_rows=d < 0, flips_columns=a < 0)


def display_size(frame: av.VideoFrame, aspect: Fraction | None, turn: Turn) -> tuple[int, int]:
    """(width, height) of a frame as a player shows it: upright, in square pixels.

    aspect: width over height of a pixel in the file; None or 0: unknown.
    """
    width, height = frame.width, frame.height
    if aspect:
        width = max(1, round(width * aspect))
    return (height, width) if turn.transposed else (width, height)


def notice_hdr(stream: VideoStream, file: MediaFile) -> None:
    """Notices a transfer function that is not brought to that of SDR."""
    transfer = HDR_TRANSFERS.get(stream.codec_context.color_trc)
    if transfer:
        file.notices.add("file", f"{file.name} is HDR ({transfer}), which is not tone-mapped: its colours look flat")


def upright(frame: av.VideoFrame, turn: Turn, file: MediaFile) -> np.ndarray:
    """(h, w, 3) uint8 RGB, turned and mirrored for display; pixels may not be square.

    Follows the tags for colour matrix and range; untagged is BT.601 limited. Transparent parts are put on white, with a
    notice. HDR is not tone-mapped. Raises RequestError for pixels or a colour matrix that FFmpeg's scaler does not
    know.
    """
    if frame.colorspace not in MATRICES and frame.colorspace not in BY_TAG_OR_DEFAULT:
        raise RequestError(
            f"{file.name} has the colour matrix {frame.colorspace} (ITU-T H.273), not supported; {REMEDY}"
        )
    try:
        pixels = _on_white(_converted(frame, "rgba"), file) if has_alpha(frame) else _converted(frame, "rgb24")
    except (av.FFmpegError, OSError) as error:
        raise RequestError(f"{file.name} cannot be read as RGB from {frame.format.name} ({error}); {REMEDY}") from error
    if turn.transposed:
        pixels = pixels.swapaxes(0, 1)
    pixels = pixels[:: -1 if turn.flips_rows else 1, :: -1 if turn.flips_columns else 1]
    return np.ascontiguousarray(pixels, dtype=np.uint8)


def has_alpha(frame: av.VideoFrame) -> bool:
    """Whether a frame may be transparent; palettes have an alpha of their own."""
    return frame.format.has_palette or any(component.is_alpha for component in frame.format.components)


def _on_white(rgba: np.ndarray, file: MediaFile) -> np.ndarray:
    """(h, w, 4) -> (h, w, 3) uint8."""
    if rgba[..., 3].min() == OPAQUE:
        return rgba[..., :3]
    file.notices.add("video", f"{file.name} is partly transparent; it is put on white")
    alpha = rgba[..., 3:].astype(np.float32) / OPAQUE
    return np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def _converted(frame: av.VideoFrame, pix_fmt: str) -> np.ndarray:
    if frame.colorspace == RESERVED:
        frame.colorspace = UNTAGGED
    matrix = MATRICES.get(frame.colorspace)
    if matrix is None:
        return frame.to_ndarray(format=pix_fmt, interpolation=SCALER)
    return frame.to_ndarray(
        format=pix_fmt,
        interpolation=SCALER,
        src_colorspace=matrix,
        dst_colorspace=ITU601,  # without meaning for RGB, but older PyAV looks at the source's only where they differ
        src_color_range=frame.color_range or None,
        dst_color_range=FULL_RANGE,
    )
