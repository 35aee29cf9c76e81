"""Which media a request may have: each row of the request rules, with its message."""

from fractions import Fraction

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.clips import MemoryClip
from comfyui_h3.h3core.media.references import (
    Keyframe,
    MediaRequest,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
)
from comfyui_h3.h3core.media_request import check_keyframe_place, resolve_media
from comfyui_h3.h3core.request import check_labels, resolve, unnamed
from comfyui_h3.h3core.types import Audio, Condition, EncodedMedia, EncodedMedium, Request

SIZE = {"width": 96, "height": 64, "num_frames": 124}


def image(width=1024, height=640):
    return ReferenceImage(pixels=torch.zeros(height, width, 3, dtype=torch.uint8))


def video(seconds=4.0, width=640, height=384, fps=24):
    frame = torch.zeros(1, height, width, 3, dtype=torch.uint8)
    return ReferenceVideo(clip=MemoryClip(frame.expand(round(seconds * fps), -1, -1, -1), Fraction(fps)))


def sound(seconds=4.0):
    return ReferenceAudio(audio=Audio(samples=torch.zeros(1, round(seconds * 32000))))


def keyframe(frame=0, width=96, height=64):
    return Keyframe(pixels=torch.zeros(height, width, 3, dtype=torch.uint8), frame=frame)


def ask(references=(), keyframes=(), **fields):
    return resolve_media(MediaRequest(**SIZE | fields, references=tuple(references), keyframes=tuple(keyframes)))


@pytest.mark.parametrize(
    ("references", "keyframes", "words"),
    [
        ([], [], ("no media", "connect")),
        ([image()] * 10, [], ("10 reference pictures", "takes 9", "remove 1")),
        ([image(), *[video()] * 4], [], ("4 reference videos", "takes 3", "remove 1")),
        ([image(), *[sound()] * 4], [], ("4 reference sounds", "takes 3")),
        ([*[image()] * 9, *[video()] * 3, sound()], [], ("13 references", "takes 12", "remove 1")),
        ([*[image()] * 9, *[video()] * 3], [keyframe()], ("13 media", "12 or fewer")),
        ([sound()], [], ("sound", "alone", "picture or video")),
        ([], [keyframe(0), keyframe(0)], ("two keyframes", "frame 0")),
        ([], [keyframe(-1), keyframe(123)], ("two keyframes", "frame 123")),
        ([], [keyframe(124)], ("frame 124", "124 frames", "0 to 123")),
        ([], [keyframe(-2)], ("frame -2", "0 to 123")),
        ([], [keyframe(True)], ("frame True",)),
        ([], [keyframe(2)], ("frame 2", "use 1 or 5")),
        ([], [keyframe(16)], ("frame 16", "use 13 or 17")),
        ([], [keyframe(50)], ("frame 50", "use 47 or 51")),
        ([], [keyframe(121)], ("frame 121", "use 120 (17k", "-1 for the last")),
    ],
)
def test_impossible_media_are_refused_with_the_remedy(references, keyframes, words):
    with pytest.raises(RequestError) as info:
        ask(references, keyframes)
    for word in words:
        assert word in str(info.value).splitlines()[0]


@pytest.mark.parametrize(("width", "height"), [(496, 640), (1280, 720), (33, 32), (0, 768), (2048, 256)])
def test_sizes_are_refused_as_those_of_a_request_from_text(width, height):
    with pytest.raises(RequestError) as media:
        ask(keyframes=[keyframe()], width=width, height=height)
    with pytest.raises(RequestError) as text:
        resolve(Request(prompt="x", width=width, height=height))
    assert str(media.value) == str(text.value)


def test_canvas_above_the_trained_area_is_noticed_with_media_too():
    assert any("more pixels" in notice for notice in ask(keyframes=[keyframe(0, 1376, 768)], width=1376, height=768)[2])


def test_as_many_as_allowed_are_taken():
    request, resolved, _ = ask([*[image()] * 9, *[video()] * 3])
    assert resolved.task == "ref2va"
    assert len(request.references) == 12
    ask([image(), *[sound()] * 3])
    ask([video(), sound()])


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (image(1000, 200), ("1000x200", "4:1")),
        (video(4, 1000, 200), ("1000x200", "4:1")),
        (sound(0.01), ("too short", "0.025 s")),
        (ReferenceAudio(audio=Audio(samples=torch.full((2, 32000), torch.nan))), ("NaN", "0.000 s")),
        (ReferenceAudio(audio=Audio(samples=torch.zeros(9, 32000))), ("9 channels", "stereo")),
        (ReferenceVideo(clip=video().clip, soundtrack=Audio(samples=torch.zeros(2, 32000), sample_rate=0)), ("0 Hz",)),
    ],
)
def test_content_that_cannot_be_used_is_refused_before_anything_is_encoded(reference, words):
    with pytest.raises(RequestError) as info:
        ask([image(), reference])
    for word in words:
        assert word in str(info.value)


def test_what_was_changed_in_a_medium_is_a_notice_of_the_request():
    changed = ReferenceImage(pixels=image().pixels, notices=("the picture is a batch of 3",))
    assert ask([changed])[2] == ("the picture is a batch of 3",)
    with pytest.raises(RequestError, match="batch of 3"):
        ask([changed], strict=True)


def test_keyframes_are_sorted_by_time():
    request, resolved, _ = ask(keyframes=[keyframe(-1), keyframe(17), keyframe(0)])
    assert [k.frame for k in request.keyframes] == [0, 17, 123]
    assert resolved.task == "fl2va"


@pytest.mark.parametrize("frame", [0, 1, 5, 9, 13, 17, 18, 119, 123])
def test_keyframe_may_stand_where_a_latent_frame_begins_and_at_the_end(frame):
    check_keyframe_place(frame, 124)


@pytest.mark.parametrize(
    ("references", "keyframes", "words"),
    [
        ([image(200, 300)], [], "reference picture 1 is 200x300; the hosted service takes sides of 256 to 5760"),
        ([image(), image(5800, 3000)], [], "reference picture 2 is 5800x3000"),
        ([image(900, 300)], [], "ratios of 2:5 to 5:2"),
        ([video(1.5)], [], "reference video 1 is 1.5 s long; the hosted service takes 2 to 15 s"),
        ([video(16)], [], "reference video 1 is 16.0 s long"),
        ([video(8), video(8)], [], "the reference videos are 16.0 s together"),
        ([image(), sound(1)], [], "reference sound 1 is 1.0 s long"),
        ([image(), sound(8), sound(8)], [], "the reference sounds are 16.0 s together"),
        ([video(4, fps=12)], [], "reference video 1 has 12 frames a second"),
        ([], [keyframe(0, 64, 64)], "keyframe at frame 0 is 64x64 and is stretched to 96x64"),
        ([], [keyframe(17)], "between the first and the last"),
    ],
)
def test_unusual_media_run_with_a_notice(references, keyframes, words, caplog):
    _, _, notices = ask(references, keyframes)
    assert any(words in notice for notice in notices), notices
    assert words in caplog.text
    with pytest.raises(RequestError, match="strict"):
        ask(references, keyframes, strict=True)


def test_usual_media_run_without_a_notice():
    assert ask([image(), video(), sound()])[2] == ()
    assert ask(keyframes=[keyframe(0), keyframe(-1, 64, 64)])[2] == ()  # the last one is cropped, not stretched
    assert ask(keyframes=[keyframe(0, 64, 64)], fit="cover")[2] == ()


def test_length_follows_the_rules_of_every_request():
    _, resolved, notices = ask([image()], num_frames=100)
    assert resolved.num_frames == 107
    assert "rounded up to 107" in notices[0]


def encoded(num_pictures=1, num_videos=0, num_sounds=0, task="ref2va"):
    request = ask([image()])[1] if task == "ref2va" else ask(keyframes=[keyframe()])[1]
    view, latents = torch.zeros(1, 32, 32, 3, dtype=torch.uint8), torch.zeros(24, 1, 2, 2)
    picture = "image" if task == "ref2va" else "keyframe"
    media = [EncodedMedium(condition=Condition(kind=picture, video=latents, frame=0), view=view)] * num_pictures
    media += [
        EncodedMedium(condition=Condition(kind="video", video=latents, audio=torch.zeros(2, 32, 4)), view=view)
    ] * num_videos
    media += [EncodedMedium(condition=Condition(kind="audio", audio=torch.zeros(2, 32, 4)))] * num_sounds
    return EncodedMedia(request=request, media=tuple(media))


@pytest.mark.parametrize(
    ("prompt", "counts", "words"),
    [
        ("<Picture 3> dances", (1, 0, 0), ("<Picture 3>", "connected is <Picture 1>;")),
        ("<Picture 0> dances", (1, 0, 0), ("<Picture 0>",)),
        ("<Picture 01> dances", (1, 0, 0), ("<Picture 01>", "write <Picture 1>")),
        ("<Video 1> dances", (1, 0, 0), ("<Video 1>", "connect it, or remove it")),
        ("<Audio 2> sings", (0, 1, 1), ("<Audio 2>", "<Video 1>, <Audio 1>")),
        ("<Picture 99999999999999999999> dances", (1, 0, 0), ("<Picture 99999",)),
        ("<Picture 1> dances", (0, 0, 0), ("no media",)),
    ],
)
def test_label_without_its_medium_is_refused(prompt, counts, words):
    with pytest.raises(RequestError) as info:
        check_labels(prompt, *counts)
    for word in words:
        assert word in str(info.value)


def test_labels_of_what_is_there_are_taken():
    check_labels("<Picture 1> and <Picture 2>, <Video 1>, <Audio 1>, <Subject 9>", 2, 1, 1)


def test_medium_without_its_label_is_noticed():
    media = encoded(num_pictures=2, num_videos=1, num_sounds=1)
    _, notices = resolve(Request(prompt="<Picture 1> with the sound of <Audio 2>", **SIZE), media)
    assert media.labels == (("Picture 1",), ("Picture 2",), ("Audio 1", "Video 1"), ("Audio 2",))
    assert [notice.split(" is ")[0] for notice in notices] == ["<Picture 2>", "<Video 1>"]
    with pytest.raises(RequestError, match="<Video 1>"):
        resolve(Request(prompt="<Picture 1> <Picture 2> <Audio 1> <Audio 2>", **SIZE, strict=True), media)


def test_soundtrack_need_not_be_named():
    media = encoded(num_pictures=0, num_videos=1, num_sounds=1)
    assert resolve(Request(prompt="<Video 1> with the voice of <Audio 2>", **SIZE), media)[1] == ()
    assert unnamed("<Video 1>", media) == ["Audio 2"]


def test_pictures_of_first_and_last_frame_may_be_named_without_brackets():
    prompt = "How the reference pictures align with the target video — Picture 1 (from Shot 1) aligns with the start."
    assert unnamed(prompt, encoded(task="fl2va")) == []
    assert unnamed("Picture 10", encoded(task="fl2va")) == ["Picture 1"]
    assert resolve(Request(prompt=prompt, **SIZE), encoded(task="fl2va"))[1] == ()


def test_thin_picture_that_would_be_cropped_is_refused_before_memory_is_full():
    with pytest.raises(RequestError, match=r"frame 123.*1x8192"):
        ask(keyframes=[keyframe(0), keyframe(-1, 1, 8192)], width=1344, height=768)
    with pytest.raises(RequestError, match=r"frame 0.*1x8192"):
        ask(keyframes=[keyframe(0, 1, 8192)], width=1344, height=768, fit="cover")
    ask(keyframes=[keyframe(0, 4000, 40)], width=1344, height=768, fit="cover")
