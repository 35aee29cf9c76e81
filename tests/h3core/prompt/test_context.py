"""What a prompt is written for: its mode, its length and its media, and what contradicts."""

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.prompt import MODES, PromptContext, check, context_for, detect_mode
from comfyui_h3.h3core.types import Condition, EncodedMedia, EncodedMedium, ResolvedRequest
from comfyui_h3.tests.h3core.prompt.samples import BODY, GOOD


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_recognised(mode):
    assert detect_mode(GOOD[mode]) == mode


def test_word_summary_makes_no_reference_prompt():
    assert detect_mode("A cat. Summary: it sleeps.") == "t2va"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "i2va"}, "mode='i2va'"),
        ({"num_frames": 1}, "frames=1"),
        ({"num_frames": 125}, "17k + 5; use 141"),
        ({"num_pictures": 1}, "mode=t2va takes 0 pictures, and 1 is connected; choose the mode that fits"),
        ({"mode": "first", "num_pictures": 2}, "mode=first takes 1 picture, and 2 are connected; choose"),
        ({"mode": "first_last", "num_pictures": 0}, "mode=first_last takes 2 pictures or more, and none is connected"),
        ({"mode": "last", "num_audios": 1}, "mode=last takes 0 sounds, and 1 is connected"),
        ({"mode": "ref2va", "num_videos": -1}, "not a number of media"),
    ],
)
def test_contradicting_context_is_refused(fields, words):
    with pytest.raises(RequestError) as info:
        PromptContext(**{"mode": "t2va", "num_frames": 124, **fields})
    assert words in str(info.value)


def media(*conditions, task="fl2va"):
    request = ResolvedRequest(
        width=64, height=64, num_frames=124, num_latent_frames=37, num_audio_latents=207, task=task
    )
    return EncodedMedia(request=request, media=tuple(EncodedMedium(condition=condition) for condition in conditions))


def keyframes(*places):
    return media(*(Condition(kind="keyframe", frame=place) for place in places))


@pytest.mark.parametrize(
    ("places", "mode"), [((0,), "first"), ((0, 123), "first_last"), ((123,), "last"), ((0, 51, 123), "first_last")]
)
def test_places_of_keyframes_decide_the_mode(places, mode):
    assert context_for(BODY, "auto", 124, keyframes(*places)).mode == mode


@pytest.mark.parametrize(("places", "mode"), [((0,), "last"), ((123,), "first"), ((0,), "t2va"), ((0, 123), "ref2va")])
def test_mode_of_other_media_is_refused(places, mode):
    with pytest.raises(RequestError, match=f"mode={mode}, but the connected media are for"):
        context_for(BODY, mode, 124, keyframes(*places))


def test_soundtracks_are_told_from_other_sounds():
    sound = torch.zeros(2, 32, 1)
    given = media(
        Condition(kind="audio", audio=sound),
        Condition(kind="video", audio=sound),
        Condition(kind="image"),
        Condition(kind="video"),
        Condition(kind="video", audio=sound),
        task="ref2va",
    )
    found = context_for(BODY, "auto", 22, given)
    assert (found.mode, found.num_frames, found.soundtracks) == ("ref2va", 124, (2, 3))
    assert [found.attached(kind) for kind in ("Picture", "Video", "Audio")] == [1, 3, 3]


def test_length_off_the_grid_is_the_one_that_runs():
    assert context_for(BODY, "auto", 125).num_frames == 141


@pytest.mark.parametrize("places", [(51,), (0, 51), (0, 51, 123)])
def test_keyframes_elsewhere_have_no_first_line(places):
    given = context_for(BODY, "auto", 124, keyframes(*places))
    codes = {finding.code: finding.level for finding in check(GOOD[given.mode], given).findings}
    assert codes["first-line-unknown"] == "warning"
    assert "first-line" not in codes
