"""Frames of a file are upright and in the colours that it was made with."""

from fractions import Fraction

import av
import numpy as np
import pytest

from comfyui_h3.h3core.media.clips import FileClip
from comfyui_h3.h3core.media.conform import conform
from comfyui_h3.tests.h3core.media.clip_files import corners, write_clip


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_turned_file_is_upright(tmp_path, turns):
    path = write_clip(tmp_path / "turned.mp4", [corners()] * 3, rotation=-90 * turns)  # FFmpeg counts to the left
    clip = FileClip(path)
    expected = np.rot90(corners(), -turns)
    pixels = next(clip.frames()).pixels
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() < 4
    assert (clip.info.height, clip.info.width) == expected.shape[:2]


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [([-1, 0, 0, 1], np.fliplr), ([1, 0, 0, -1], np.flipud), ([0, 1, 1, 0], lambda pixels: pixels.swapaxes(0, 1))],
)
def test_a_mirrored_file_is_mirrored(tmp_path, matrix, expected):
    a, b, c, d = (value << 16 for value in matrix)
    path = write_clip(tmp_path / "mirrored.mp4", [corners()] * 3, matrix=[a, b, 0, c, d, 0, 0, 0, 1 << 30])
    pixels = next(FileClip(path).frames()).pixels
    assert np.abs(pixels.astype(int) - expected(corners())).max() < 4


@pytest.mark.parametrize(("rotation", "size"), [(None, (128, 48)), (90, (48, 128))])
def test_pixels_that_are_not_square_count_in_the_ratio(tmp_path, rotation, size):
    path = write_clip(tmp_path / "wide.mp4", [corners()] * 3, aspect=Fraction(2), rotation=rotation)
    clip = FileClip(path)
    assert (clip.info.width, clip.info.height) == size
    frames = conform(clip, max_frames=9, short_edge=96)
    assert frames.shape[1:] == ((96, 256, 3) if rotation is None else (256, 96, 3))


@pytest.mark.parametrize("size", [(63, 47), (65, 33), (17, 9)])
def test_odd_sizes_are_taken(tmp_path, size):
    pixels = np.full((size[1], size[0], 3), 200, np.uint8)
    path = write_clip(tmp_path / "odd.mkv", [pixels] * 3, codec="ffv1", pix_fmt="yuv420p")
    clip = FileClip(path)
    assert (clip.info.width, clip.info.height) == size
    assert next(clip.frames()).pixels.shape == (size[1], size[0], 3)


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv420p10le"])
@pytest.mark.parametrize(("matrix", "kr", "kb"), [(1, 0.2126, 0.0722), (6, 0.299, 0.114), (2, 0.299, 0.114)])
@pytest.mark.parametrize("full_range", [False, True])
def test_colours_follow_the_tags(tmp_path, pix_fmt, matrix, kr, kb, full_range):
    colour = np.array([200.0, 60.0, 30.0])
    depth = 4 if "10" in pix_fmt else 1
    luma = np.dot([kr, 1 - kr - kb, kb], colour) / 255
    chroma = [(colour[2] / 255 - luma) / (2 - 2 * kb), (colour[0] / 255 - luma) / (2 - 2 * kr)]
    if full_range:
        codes = [255 * luma, *(128 + 255 * value for value in chroma)]
    else:
        codes = [16 + 219 * luma, *(128 + 224 * value for value in chroma)]
    path = tmp_path / "colour.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pix_fmt
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, 2 if full_range else 1
        frame = av.VideoFrame(64, 48, pix_fmt)
        frame.colorspace, frame.color_range = matrix, 2 if full_range else 1
        for plane, code in zip(frame.planes, codes, strict=True):
            kind = np.uint16 if depth > 1 else np.uint8
            plane.update(np.full(plane.buffer_size // kind().itemsize, round(code * depth), kind).tobytes())
        frame.pts = 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    pixels = next(FileClip(path).frames()).pixels
    assert np.abs(pixels.reshape(-1, 3) - colour).max() <= 2  # 8-bit codes are worth up to 1.9 steps of red or blue


def test_gray_becomes_three_equal_channels(tmp_path):
    path = write_clip(tmp_path / "gray.mkv", [np.full((48, 64), 99, np.uint8)] * 2, codec="ffv1", pix_fmt="gray")
    assert np.unique(next(FileClip(path).frames()).pixels).tolist() == [99]


def test_transparent_parts_are_put_on_white(tmp_path):
    pixels = np.zeros((48, 64, 4), np.uint8)
    pixels[:, 32:] = (10, 20, 30, 255)
    path = write_clip(tmp_path / "alpha.mkv", [pixels] * 2, codec="ffv1", pix_fmt="bgra")
    shown = next(FileClip(path).frames()).pixels
    assert shown[0, 0].tolist() == [255, 255, 255]
    assert shown[0, 63].tolist() == [10, 20, 30]
