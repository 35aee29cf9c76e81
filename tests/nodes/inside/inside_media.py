"""Media on their way in: the host's IMAGE, AUDIO and VIDEO, chains of keyframes and references."""

import io
from fractions import Fraction

import pytest
import torch
from comfy_api.latest import Input, InputImpl, Types

from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.media.clips import FileClip, MemoryClip
from comfyui_h3.h3core.media.mp4 import write_mp4
from comfyui_h3.h3core.types import Audio, Frames
from comfyui_h3.nodes import audio as host_audio
from comfyui_h3.nodes.decode_audio import H3DecodeAudio
from comfyui_h3.nodes.decode_video import H3DecodeVideo
from comfyui_h3.nodes.encode_fl_media import H3EncodeFLMedia, H3Keyframe
from comfyui_h3.nodes.encode_media import labels
from comfyui_h3.nodes.encode_prompt import H3EncodePrompt
from comfyui_h3.nodes.references import (
    H3EncodeRefMedia,
    H3ReferenceAudio,
    H3ReferenceImage,
    H3ReferenceVideo,
)
from comfyui_h3.nodes.sample import H3SampleDiT
from comfyui_h3.nodes.video import H3Video, clip_from_host

RATE = 16000
HAS_TRIM = hasattr(Input.Video, "as_trimmed")


def image(height=64, width=96, channels=3, batch=1, value=0.5):
    return torch.full((batch, height, width, channels), value)


def sound(num_channels=2, num_samples=RATE, batch=1):
    t = torch.arange(num_samples) / RATE
    return {"waveform": (0.3 * torch.sin(2000 * t)).expand(batch, num_channels, -1).clone(), "sample_rate": RATE}


def frames(num_frames=24, height=64, width=96):
    ramp = torch.arange(num_frames, dtype=torch.uint8)[:, None, None, None] * 10
    return ramp.expand(num_frames, height, width, 3).contiguous()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A clip of one second, with sound, whose frames get lighter."""
    path = tmp_path_factory.mktemp("clips") / "clip 片.mp4"
    write_mp4(path, Frames(pixels=frames()), Audio(samples=sound()["waveform"][0], sample_rate=RATE))
    return path


def picture(node, *inputs):
    return node.execute(*inputs)[0][-1].pixels


# Pictures


@pytest.mark.parametrize("node", [H3Keyframe, H3ReferenceImage])
class TestPictures:
    def run(self, node, images):
        return picture(node, images, 0 if node is H3Keyframe else "match")

    def test_picture_is_rounded_to_8_bits(self, node, shown):
        assert torch.equal(self.run(node, image(value=0.5)), torch.full((64, 96, 3), 128, dtype=torch.uint8))
        assert not [line for line in shown if "notice" in line]

    def test_transparent_picture_is_put_on_white(self, node, shown):
        images = image(channels=4, value=0.0)
        assert self.run(node, images).unique().tolist() == [255]
        assert "white" in shown[-1]

    def test_gray_picture_becomes_three_equal_channels(self, node, shown):
        assert self.run(node, image(channels=1)).shape == (64, 96, 3)

    def test_batch_gives_its_first_picture_with_a_notice(self, node, shown):
        images = torch.cat([image(value=1.0), image(value=0.0, batch=2)])
        assert self.run(node, images).unique().tolist() == [255]
        assert "batch of 3" in shown[-1]

    def test_values_outside_are_clipped_with_a_notice(self, node, shown):
        assert self.run(node, image(value=1.5)).unique().tolist() == [255]
        assert "clipped" in shown[-1]

    def test_one_pixel_is_a_picture(self, node, shown):
        assert self.run(node, image(1, 1)).shape == (1, 1, 3)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_picture_that_is_not_finite_is_refused(self, node, value, shown):
        with pytest.raises(RequestError, match="NaN or Inf"):
            self.run(node, image(value=value))

    @pytest.mark.parametrize("value", ["abc", 3, None, {}])
    def test_value_in_place_of_a_link_is_refused(self, node, value):
        with pytest.raises(RequestError, match="IMAGE belongs"):
            self.run(node, value)

    def test_empty_batch_is_refused(self, node):
        with pytest.raises(RequestError, match="empty"):
            self.run(node, image(batch=0))


def test_long_picture_is_no_reference_but_a_keyframe(shown):
    with pytest.raises(RequestError, match="4000x40, longer than 4:1"):
        H3ReferenceImage.execute(image(40, 4000), "match")
    assert picture(H3Keyframe, image(40, 4000), 0).shape == (40, 4000, 3)


# Sounds


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_sound_keeps_its_channels_and_rate(channels, shown):
    (reference,) = H3ReferenceAudio.execute(sound(channels))[0]
    assert (tuple(reference.audio.samples.shape), reference.audio.sample_rate) == ((channels, RATE), RATE)
    assert shown == ["sound, 1.00 s"]


def test_batch_of_sounds_gives_its_first_with_a_notice(shown):
    batch = sound(batch=2)
    batch["waveform"][1] = 9
    (reference,) = H3ReferenceAudio.execute(batch)[0]
    assert reference.audio.samples.abs().max() < 1
    assert "batch of 2; only its first clip is used" in shown[-1]


@pytest.mark.parametrize(
    ("audio", "remedy"),
    [
        ("abc", "AUDIO belongs"),
        ({"waveform": torch.zeros(2, 100), "sample_rate": RATE}, r"give \[1, channels, samples\]"),
        ({"waveform": torch.zeros(0, 2, 100), "sample_rate": RATE}, "empty batch"),
        ({"waveform": None, "sample_rate": RATE}, r"give \[1, channels, samples\]"),
    ],
)
def test_what_is_no_sound_is_refused(audio, remedy):
    with pytest.raises(RequestError, match=remedy):
        H3ReferenceAudio.execute(audio)


def test_audio_of_a_video_may_be_a_batch():
    clip, notices = host_audio.first_clip(sound(batch=3), "the audio")
    assert clip.samples.shape == (2, RATE)
    assert notices == ("the audio is a batch of 3; only its first clip is used",)


@pytest.mark.parametrize("num_samples", [0, 1])
def test_sound_without_length_is_refused_with_the_remedy(tiny_engine, num_samples):
    chain = H3ReferenceAudio.execute(sound(2, num_samples), H3ReferenceImage.execute(image(), "match")[0])[0]
    with pytest.raises(RequestError, match=r"too short.*give at least"):
        H3EncodeRefMedia.execute(tiny_engine, chain, 64, 64, 5, "release")


# Videos


def test_our_own_video_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(H3Video, "get_components", lambda self: pytest.fail("made floats"))
    video = H3Video(Frames(pixels=frames()), Audio(samples=torch.zeros(2, RATE), sample_rate=RATE))
    clip = clip_from_host(video)
    assert isinstance(clip, MemoryClip)
    assert (clip.info.width, clip.info.height, clip.info.duration_s, clip.info.has_sound) == (96, 64, 1.0, True)
    assert torch.equal(torch.from_numpy(next(clip.frames()).pixels), video.frames.pixels[0])


@pytest.mark.parametrize("in_memory", [False, True])
def test_file_is_decoded_in_a_stream(file, in_memory, monkeypatch):
    monkeypatch.setattr(InputImpl.VideoFromFile, "get_components", lambda self: pytest.fail("decoded to floats"))
    source = io.BytesIO(file.read_bytes()) if in_memory else str(file)
    clip = clip_from_host(InputImpl.VideoFromFile(source))
    assert isinstance(clip, FileClip)
    assert (clip.info.width, clip.info.height, clip.info.has_sound) == (96, 64, True)
    assert sum(1 for _ in clip.frames()) == 24
    assert sum(1 for _ in clip_from_host(InputImpl.VideoFromFile(source)).frames()) == 24  # the stream is kept


@pytest.mark.skipif(not HAS_TRIM, reason="this host does not trim videos")
@pytest.mark.parametrize(("start", "duration", "kept"), [(0.5, 0.0, 12), (0.25, 0.5, 12), (-0.25, 0.0, 6)])
def test_trimmed_file_stays_trimmed(file, start, duration, kept):
    video = InputImpl.VideoFromFile(str(file)).as_trimmed(start, duration)
    clip = clip_from_host(video)
    assert sum(1 for _ in clip.frames()) == kept
    assert clip.info.duration_s == pytest.approx(kept / 24, abs=0.01)


def made_by_a_node(fps=Fraction(12), audio=None):
    images = frames(12).float() / 255
    components = Types.VideoComponents(images=images, audio=audio, frame_rate=fps)
    return InputImpl.VideoFromComponents(components), images


def test_frames_of_a_node_are_neither_encoded_nor_copied(monkeypatch):
    video, images = made_by_a_node(audio=sound(1))
    monkeypatch.setattr(type(video), "save_to", lambda *_, **__: pytest.fail("encoded a file"))
    clip = clip_from_host(video)
    assert clip._pixels.data_ptr() == images.data_ptr()
    assert (clip.info.fps, clip.info.duration_s, clip.info.has_sound) == (Fraction(12), 1.0, True)


@pytest.mark.parametrize("value", ["abc", None, 3])
def test_what_is_no_video_is_refused(value):
    with pytest.raises(RequestError, match="VIDEO"):
        H3ReferenceVideo.execute(value, True, 0.0, 768)


def test_file_that_is_no_video_is_refused_by_its_node(tmp_path):
    (tmp_path / "notes.mp4").write_text("no video")
    with pytest.raises(RequestError, match=r"notes\.mp4"):
        H3ReferenceVideo.execute(InputImpl.VideoFromFile(str(tmp_path / "notes.mp4")), True, 0.0, 768)


def test_start_past_the_end_is_refused_by_its_node(file):
    with pytest.raises(RequestError, match=r"3 s is past the last frame"):
        H3ReferenceVideo.execute(InputImpl.VideoFromFile(str(file)), True, 3.0, 768)


@pytest.mark.parametrize(
    ("own", "other", "soundtrack", "line"),
    [(True, False, "own", "with sound"), (False, False, None, "no sound"), (False, True, "given", "with sound")],
)
def test_sound_of_a_video_is_its_own_none_or_another(file, own, other, soundtrack, line, shown):
    audio = sound() if other else None
    video = InputImpl.VideoFromFile(str(file))
    (reference,) = H3ReferenceVideo.execute(video, own, 0.0, 768, audio)[0]
    given = "given" if isinstance(reference.soundtrack, Audio) else reference.soundtrack
    assert given == soundtrack
    assert shown == [f"video, 96x64, 1.00 s, {line}"]


# Chains


def test_chain_keeps_the_order_and_the_earlier_links(file, shown):
    first = H3ReferenceImage.execute(image(), "max")[0]
    second = H3ReferenceVideo.execute(InputImpl.VideoFromFile(str(file)), True, 0.0, 96, None, first)[0]
    third = H3ReferenceAudio.execute(sound(), second)[0]
    assert [type(reference).__name__ for reference in third] == ["ReferenceImage", "ReferenceVideo", "ReferenceAudio"]
    assert len(first) == 1
    assert (third[0].size, third[1].short_edge) == ("max", 96)


@pytest.mark.parametrize(
    ("add", "most", "name"),
    [
        (lambda chain: H3ReferenceImage.execute(image(), "match", chain), 9, "pictures"),
        (lambda chain: H3ReferenceVideo.execute(made_by_a_node()[0], True, 0.0, 96, None, chain), 3, "videos"),
        (lambda chain: H3ReferenceAudio.execute(sound(), chain), 3, "sounds"),
    ],
)
def test_one_too_many_is_refused_where_it_is_added(add, most, name):
    chain = ()
    for _ in range(most):
        chain = add(chain)[0]
    with pytest.raises(RequestError, match=f"{most + 1} reference {name} are given, H3 takes {most}"):
        add(chain)


def test_thirteenth_medium_is_refused():
    chain = ()
    for _ in range(9):
        chain = H3ReferenceImage.execute(image(), "match", chain)[0]
    for _ in range(3):
        chain = H3ReferenceAudio.execute(sound(), chain)[0]
    with pytest.raises(RequestError, match="13 references are given, H3 takes 12"):
        H3ReferenceVideo.execute(made_by_a_node()[0], True, 0.0, 96, None, chain)


@pytest.mark.parametrize("value", ["abc", 3, [1]])
def test_chain_that_is_no_link_is_refused(value):
    with pytest.raises(RequestError, match="H3 Reference node"):
        H3ReferenceAudio.execute(sound(), value)
    with pytest.raises(RequestError, match="H3 Keyframe"):
        H3Keyframe.execute(image(), 0, value)


# Encoding


def test_no_picture_at_all_is_refused_with_the_remedy():
    with pytest.raises(RequestError, match="connect first_frame, last_frame or keyframes; for video from text alone"):
        H3EncodeFLMedia.execute(None, 64, 64, 5, "release")


def test_keyframes_are_encoded_in_the_order_of_time(tiny_engine, shown):
    between = H3Keyframe.execute(image(value=0.2), 5)[0]
    media = H3EncodeFLMedia.execute(tiny_engine, 96, 64, 22, "cover", image(), image(), between)[0]
    assert [medium.condition.frame for medium in media.media] == [0, 5, 21]
    assert labels(media) == ["<Picture 1> at frame 0", "<Picture 2> at frame 5", "<Picture 3> at frame 21"]
    assert shown[-1].startswith("<Picture 1> at frame 0, <Picture 2> at frame 5, <Picture 3> at frame 21\nnotice: ")
    assert "between the first and the last frame" in shown[-1]


def test_progress_names_the_medium(tiny_engine, shown):
    H3EncodeFLMedia.execute(tiny_engine, 96, 64, 5, "cover", image(value=0.123))
    assert any(line.startswith("Encoding keyframe 1") for line in shown)
    assert not any("waiting for the weights" in line for line in shown)


def test_two_pictures_at_one_place_are_refused(tiny_engine):
    with pytest.raises(RequestError, match="two keyframes are given for frame 0; keep one"):
        H3EncodeFLMedia.execute(tiny_engine, 64, 64, 5, "release", image(), None, H3Keyframe.execute(image(), 0)[0])


def test_strict_refuses_a_batch(tiny_engine):
    with pytest.raises(RequestError, match="strict is set: first_frame is a batch of 2"):
        H3EncodeFLMedia.execute(tiny_engine, 64, 64, 107, "release", image(batch=2), strict=True)


@pytest.fixture(scope="module")
def references(file):
    chain = H3ReferenceImage.execute(image(), "match")[0]
    chain = H3ReferenceVideo.execute(InputImpl.VideoFromFile(str(file)), True, 0.0, 64, None, chain)[0]
    return H3ReferenceAudio.execute(sound(1), chain)[0]


@pytest.fixture(scope="module")
def media(tiny_engine, references):
    return H3EncodeRefMedia.execute(tiny_engine, references, 96, 64, 22, "release")[0]


def test_node_says_how_the_prompt_calls_each_reference(media):
    assert labels(media) == ["<Picture 1>", "<Video 1> with <Audio 1>", "<Audio 2>"]
    assert (media.num_pictures, media.num_videos, media.num_audios) == (1, 1, 2)


def test_prompt_and_media_condition_the_same_video(tiny_engine, media, shown):
    prompt = "<Picture 1> walks through <Video 1> with <Audio 1> and speaks like <Audio 2>"
    conditioning = H3EncodePrompt.execute(tiny_engine, prompt, 96, 64, 22, media)[0]
    assert [condition.kind for condition in conditioning.conditions] == ["image", "video", "audio"]
    assert conditioning.request.task == "ref2va"
    latents = H3SampleDiT.execute(tiny_engine, conditioning, 1, 2)[0]
    assert latents.video.shape == (24, 7, 4, 6)


def test_each_stage_asks_for_room_for_what_it_gets(tiny_engine, media, monkeypatch):
    asked = []
    monkeypatch.setattr(Engine, "missing_bytes", lambda self, stage, given=None: asked.append((stage, given)) or 0)
    conditioning = H3EncodePrompt.execute(tiny_engine, "<Picture 1>, <Video 1>, <Audio 2>", 96, 64, 22, media)[0]
    latents = H3SampleDiT.execute(tiny_engine, conditioning, 1, 2)[0]
    H3DecodeAudio.execute(tiny_engine, latents)
    H3DecodeVideo.execute(tiny_engine, latents)
    assert asked == [("encode", media), ("sample", conditioning), ("decode_audio", latents), ("decode_video", latents)]


def test_medium_that_the_prompt_does_not_name_is_noticed(tiny_engine, media, shown):
    H3EncodePrompt.execute(tiny_engine, "<Picture 1>, <Video 1> and <Audio 1>", 96, 64, 22, media)
    assert "<Audio 2> is connected, but the prompt does not name it" in shown[-1]


def test_label_without_its_medium_is_refused(tiny_engine, media):
    with pytest.raises(RequestError, match="names <Picture 2>, and what is connected is <Picture 1>, "):
        H3EncodePrompt.execute(tiny_engine, "<Picture 2>", 96, 64, 22, media)


def test_media_of_another_size_are_refused(tiny_engine, media):
    with pytest.raises(RequestError, match="encoded for 96x64, 22 frames, the prompt asks for 64x64, 22 frames"):
        H3EncodePrompt.execute(tiny_engine, "<Picture 1>", 64, 64, 22, media)


@pytest.mark.parametrize("value", ["abc", 3, {}])
def test_media_that_are_no_link_are_refused(tiny_engine, value):
    with pytest.raises(RequestError, match="H3 Encode FL Media or H3 Encode Ref Media"):
        H3EncodePrompt.execute(tiny_engine, "rain", 64, 64, 22, value)


def test_sound_alone_is_refused_when_the_chain_is_complete(tiny_engine):
    with pytest.raises(RequestError, match="add a reference picture or video"):
        H3EncodeRefMedia.execute(tiny_engine, H3ReferenceAudio.execute(sound())[0], 64, 64, 22, "release")


def test_keyframes_beside_references_have_no_label(tiny_engine, references):
    keyframes = H3Keyframe.execute(image(), 0)[0]
    media = H3EncodeRefMedia.execute(tiny_engine, references[:1], 96, 64, 22, "release", keyframes)[0]
    assert [medium.condition.kind for medium in media.media] == ["keyframe", "image"]
    assert labels(media) == ["<Picture 1>"]
