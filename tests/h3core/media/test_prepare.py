"""What the encoders get of each medium: its frames, the view with its times, and sound that may count as none."""

from fractions import Fraction

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.clips import FileClip, MemoryClip
from comfyui_h3.h3core.media.prepare import PreparedMedium, prepare
from comfyui_h3.h3core.media.references import (
    Keyframe,
    MediaRequest,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
)
from comfyui_h3.h3core.models.text_encoder.template import block_timestamps
from comfyui_h3.h3core.types import Audio, ResolvedRequest
from comfyui_h3.tests.h3core.media.clip_files import EDGE, bar_file, bar_pixels, click_at

RESOLVED = ResolvedRequest(
    task="ref2va", width=96, height=64, num_frames=39, num_latent_frames=12, num_audio_latents=65
)


def prepared(resolved=RESOLVED, **media):
    def announce(name):
        return lambda done, total: None

    return list(prepare(MediaRequest(**media), resolved, announce))


def noise(num_channels, num_samples):
    return torch.rand(num_channels, num_samples, generator=torch.Generator().manual_seed(0))


def picture(height=40, width=56):
    return torch.full((height, width, 3), 99, dtype=torch.uint8)


@pytest.mark.parametrize("fit", ["release", "cover"])
def test_keyframes_come_to_the_canvas_and_references_to_their_own(fit):
    # A black edge that cropping to 96x64 takes away, and stretching keeps.
    edged = picture(64, 192)
    edged[:, :40] = 0
    media = prepared(
        keyframes=(Keyframe(pixels=edged), Keyframe(pixels=edged, frame=38)),
        references=(
            ReferenceImage(pixels=picture(64, 96), size="match"),
            ReferenceAudio(audio=Audio(samples=noise(1, 8000))),
        ),
        fit=fit,
    )
    assert [(medium.name, medium.kind, medium.frame) for medium in media] == [
        ("keyframe 1", "keyframe", 0),
        ("keyframe 2", "keyframe", 38),
        ("reference picture 1", "image", None),
        ("reference sound 1", "audio", None),
    ]
    assert [medium.frames.shape for medium in media[:3]] == [(1, 64, 96, 3)] * 3
    assert [bool((medium.frames[0, :, 0] == 0).all()) for medium in media[:2]] == [fit == "release", False]
    assert media[3].samples.shape == (2, 8000)


def test_what_the_encoder_sees_does_not_change_with_the_picture():
    pixels = picture(64, 96)
    (medium,) = prepared(references=(ReferenceImage(pixels=pixels, size="match"),))
    view = medium.view
    pixels.zero_()
    assert view.unique().tolist() == [99]


def test_a_clip_is_read_from_its_start_with_its_sound():
    sound = Audio(samples=noise(2, 2 * 32000), sample_rate=32000)
    clip = MemoryClip(bar_pixels(24, 48), Fraction(24), sound)
    (medium,) = prepared(references=(ReferenceVideo(clip=clip, start_s=0.5, short_edge=EDGE),))
    assert torch.equal(medium.frames, bar_pixels(24, 48)[12:])
    assert torch.equal(medium.samples, sound.samples[:, 16000:])
    assert len(medium.encoded_frames) == 22


@pytest.mark.parametrize("num_samples", [0, 1, 799])
def test_a_soundtrack_shorter_than_one_latent_counts_as_none(num_samples):
    clip = MemoryClip(bar_pixels(24, 24), Fraction(24), Audio(samples=noise(2, num_samples), sample_rate=32000))
    (medium,) = prepared(references=(ReferenceVideo(clip=clip, short_edge=EDGE),))
    assert medium.samples is None
    assert clip.notices == (
        "the sound of reference video 1 is shorter than 25 ms where its picture is used: it counts as none",
    )


def test_a_soundtrack_of_a_file_that_ends_in_the_window_counts_as_none(tmp_path):
    path = bar_file(tmp_path, Fraction(24), 2.0, "bar.mkv", sound=click_at(0.1, length_s=0.52))
    clip = FileClip(path)
    (medium,) = prepared(references=(ReferenceVideo(clip=clip, start_s=0.5, short_edge=EDGE),))
    assert medium.samples is None
    assert len(clip.notices) == 1
    assert clip.notices[0].endswith("it counts as none")


def test_a_soundtrack_of_one_latent_is_taken():
    clip = MemoryClip(bar_pixels(24, 24), Fraction(24), Audio(samples=noise(2, 800), sample_rate=32000))
    (medium,) = prepared(references=(ReferenceVideo(clip=clip, short_edge=EDGE),))
    assert medium.samples.shape == (2, 800)
    assert clip.notices == ()


def test_a_short_sound_that_was_handed_in_is_refused_by_name():
    short = Audio(samples=noise(2, 799), sample_rate=32000)
    clip = MemoryClip(bar_pixels(24, 24), Fraction(24))
    with pytest.raises(RequestError, match=r"^the sound of reference video 1 is too short"):
        prepared(references=(ReferenceVideo(clip=clip, soundtrack=short, short_edge=EDGE),))
    with pytest.raises(RequestError, match=r"^reference sound 1 is too short"):
        prepared(references=(ReferenceAudio(audio=short),))


def test_a_silenced_clip_has_no_sound():
    clip = MemoryClip(bar_pixels(24, 24), Fraction(24), Audio(samples=noise(2, 32000), sample_rate=32000))
    (medium,) = prepared(references=(ReferenceVideo(clip=clip, soundtrack=None, short_edge=EDGE),))
    assert medium.samples is None


@pytest.mark.parametrize(
    ("num_frames", "num_sampled", "shown"),
    [
        (107, 9, ["0.2", "1.2", "2.2", "3.2", "4.0"]),
        (124, 11, ["0.2", "1.2", "2.2", "3.2", "4.2", "5.0"]),
        (22, 2, ["0.2"]),
        (13, 2, ["0.2"]),
    ],
)
def test_the_encoder_sees_two_frames_a_second_with_their_times(num_frames, num_sampled, shown):
    frames = torch.arange(num_frames)[:, None, None, None]
    view = PreparedMedium(name="reference video 1", kind="video", frames=frames).view
    assert view.flatten().tolist() == list(range(0, num_frames, 12))
    assert len(view) == num_sampled
    assert [f"{time:.1f}" for time in block_timestamps(len(view))] == shown
