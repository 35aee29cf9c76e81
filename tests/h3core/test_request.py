"""What is refused, with which remedy, and what a legal request resolves to."""

import math

import pytest

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.canvas import align_num_frames, frames_for_duration
from comfyui_h3.h3core.request import check_seed, check_sigma_points, resolve
from comfyui_h3.h3core.types import Request


def ask(prompt="a cat", **fields):
    return resolve(Request(prompt=prompt, **fields))[0]


@pytest.mark.parametrize(
    ("seconds", "frames", "latents", "audio"),
    [
        (4, 107, 32, 178),
        (5, 124, 37, 207),
        (6, 158, 47, 263),
        (8, 192, 57, 320),
        (10, 243, 72, 405),
        (12, 294, 87, 490),
        (15, 362, 107, 603),
    ],
)
def test_durations_resolve_as_the_release_does(seconds, frames, latents, audio):
    resolved = ask(duration_s=seconds)
    assert (resolved.num_frames, resolved.num_latent_frames, resolved.num_audio_latents) == (frames, latents, audio)


def test_default_is_five_seconds_at_1344x768():
    resolved = ask()
    assert (resolved.width, resolved.height, resolved.num_frames) == (1344, 768, 124)
    assert (resolved.latent_height, resolved.latent_width) == (48, 84)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"width": 0}, ("width=0", "32")),
        ({"width": 33, "height": 32}, ("width=33", "32 or 64")),
        ({"height": -768}, ("height=-768", "32")),
        ({"height": 720}, ("height=720", "704 or 736")),
        ({"width": 496, "height": 640}, ("width=496", "480 or 512")),
        ({"width": 768.5}, ("width=768.5", "whole number")),
        ({"width": True}, ("width=True",)),
        ({"width": 99968}, ("4096",)),
        ({"width": 2048, "height": 256}, ("4:1", "1024", "512")),
        ({"num_frames": 1}, ("frames=1", "5", "22")),
        ({"num_frames": 4}, ("frames=4", "5", "22")),
        ({"num_frames": 0}, ("frames=0", "5")),
        ({"num_frames": -5}, ("frames=-5", "5")),
        ({"num_frames": 124.0}, ("frames=124.0", "whole number")),
        ({"num_frames": 10**9}, ("3592",)),
        ({"duration_s": math.nan}, ("duration=nan", "4 to 15")),
        ({"duration_s": math.inf}, ("duration=inf",)),
        ({"duration_s": 0}, ("not positive",)),
        ({"duration_s": -1.0}, ("not positive",)),
        ({"duration_s": 1e9}, ("longer than 150 s",)),
        ({"duration_s": "5"}, ("duration='5'",)),
        ({"duration_s": 5, "num_frames": 124}, ("both",)),
        ({"prompt": ""}, ("empty",)),
        ({"prompt": " \r\n\t\u3000"}, ("empty",)),
        ({"prompt": "x" * 100_001}, ("100001 characters",)),
        ({"prompt": None}, ("NoneType",)),
        ({"prompt": "\u200b\ufeff"}, ("empty",)),
        ({"prompt": "a \ud800 cat"}, ("half a character at place 2",)),
        ({"prompt": "<Picture 3> a dog"}, ("<Picture 3>", "no media", "remove")),
    ],
)
def test_impossible_request_is_refused_with_the_remedy(fields, words):
    with pytest.raises(RequestError) as info:
        ask(**fields)
    for word in words:
        assert word in str(info.value).splitlines()[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_frames": 22}, "outside the trained range"),
        ({"num_frames": 379}, "outside the trained range"),
        ({"num_frames": 100}, "frames=100 is not 17k + 5: rounded up to 107 (4.46 s)"),
        ({"num_frames": 125}, "rounded up to 141 (5.88 s)"),
        ({"duration_s": 3}, "frames=73 (3.04 s) is outside the trained range"),
        ({"duration_s": 20}, "frames=481 (20.04 s) is outside the trained range"),
        ({"width": 1376, "height": 768}, "more pixels"),
        ({"prompt": "x" * 7001}, "7001 characters"),
    ],
)
def test_unusual_request_runs_with_a_notice(fields, words, caplog):
    _, notices = resolve(Request(**{"prompt": "a cat"} | fields))
    assert any(words in notice for notice in notices)
    assert words in caplog.text


@pytest.mark.parametrize("fields", [{"num_frames": 22}, {"num_frames": 125}, {"prompt": "x" * 7001}])
def test_strict_request_is_refused_for_what_would_only_be_noticed(fields):
    with pytest.raises(RequestError, match="strict"):
        ask(**{"prompt": "a cat"} | fields, strict=True)
    ask(num_frames=124, strict=True)


def test_frames_off_the_grid_are_rounded_up():
    assert [ask(num_frames=frames).num_frames for frames in (8, 100, 124, 125)] == [22, 107, 124, 141]


def test_usual_request_runs_without_a_warning(caplog):
    ask(prompt="x" * 7000, num_frames=107)
    assert not caplog.records


@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1, 2**63 - 1])
def test_seed_in_range(seed):
    check_seed(seed)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None])
def test_seed_out_of_range(seed):
    with pytest.raises(RequestError, match="seed="):
        check_seed(seed)


@pytest.mark.parametrize("points", [1, 0, -3, 1001, 50.0, True])
def test_sigma_points_out_of_range(points):
    with pytest.raises(RequestError, match="sigma_points="):
        check_sigma_points(points)


def test_frames_align_upwards():
    assert [align_num_frames(n) for n in (1, 5, 6, 22, 23, 124, 125)] == [5, 5, 22, 22, 39, 124, 141]
    assert frames_for_duration(0.01) == 5
