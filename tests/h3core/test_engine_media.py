"""Keyframes and references through the engine: tasks, partitions, what is kept, what is refused, cancelling."""

import dataclasses
import gc
import shutil
from fractions import Fraction

import pytest
import torch

from comfyui_h3.h3core.config import EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import CheckpointError, OutputError, RequestError
from comfyui_h3.h3core.media.clips import MemoryClip
from comfyui_h3.h3core.media.references import (
    Keyframe,
    MediaRequest,
    ReferenceAudio,
    ReferenceImage,
    ReferenceVideo,
)
from comfyui_h3.h3core.media_request import largest_clip_bytes, resolve_media
from comfyui_h3.h3core.sampling.noise import Noise
from comfyui_h3.h3core.types import Audio, Request

SIZE = {"width": 64, "height": 64, "num_frames": 22}


def noise_picture(seed=0, height=40, width=56):
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def noise_clip(seed=0, num_frames=24):
    shape = (num_frames, 64, 64, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return MemoryClip(pixels, Fraction(24), Audio(samples=0.1 * torch.randn(2, 32000)))


KEYFRAMES = MediaRequest(
    **SIZE, keyframes=(Keyframe(pixels=noise_picture(1)), Keyframe(pixels=noise_picture(2), frame=-1))
)
IMAGE = ReferenceImage(pixels=noise_picture(3), size="match")
VIDEO = ReferenceVideo(clip=noise_clip(4), short_edge=64)
SOUND = ReferenceAudio(audio=Audio(samples=0.1 * torch.randn(1, 20000, generator=torch.Generator().manual_seed(5))))
REFERENCES = MediaRequest(**SIZE, references=(IMAGE, VIDEO, SOUND))


@pytest.fixture(scope="module")
def references(tiny_engine):
    return tiny_engine.encode_media(REFERENCES)


@pytest.fixture(scope="module")
def keyframes(tiny_engine):
    return tiny_engine.encode_media(KEYFRAMES)


def test_media_say_their_task_and_what_the_prompt_may_name(keyframes, references):
    assert (keyframes.task, references.task) == ("fl2va", "ref2va")
    assert (keyframes.num_pictures, keyframes.num_videos, keyframes.num_audios) == (2, 0, 0)
    assert (references.num_pictures, references.num_videos, references.num_audios) == (1, 1, 2)


def test_latents_have_the_sizes_of_the_media(keyframes, references):
    assert [tuple(medium.condition.video.shape) for medium in keyframes.media] == [(24, 1, 4, 4)] * 2
    assert [medium.condition.frame for medium in keyframes.media] == [0, 21]
    image, video, sound = (medium.condition for medium in references.media)
    assert image.video.shape[:2] == (24, 1)
    assert video.video.shape == (24, 7, 4, 4)
    assert video.audio.shape == (2, 32, 37)  # 22 frames at 24 per second, at 40 latents a second
    assert sound.audio.shape == (2, 32, 25)
    assert sound.video is None


def test_text_encoder_sees_two_frames_of_each_second(references):
    assert [None if medium.view is None else len(medium.view) for medium in references.media] == [1, 2, None]
    assert references.media[1].view.untyped_storage().nbytes() == 2 * 64 * 64 * 3  # not the whole clip


def test_media_change_the_result_and_rows(tiny_engine, keyframes, references):
    request = Request(prompt="a cat", **SIZE)
    plain = tiny_engine.encode(request)
    results = []
    for media in (None, keyframes, references):
        conditioning = tiny_engine.encode(request, media)
        results.append(tiny_engine.sample(conditioning, seed=1, sigma_points=3).video)
        if media is not None:
            assert len(conditioning.text) > len(plain.text)
            assert len(conditioning.conditions) == len(media.media)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (results[one] - results[other]).norm() / results[one].norm() > 1e-3


def test_equal_media_are_encoded_once(tiny_h3):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))
    calls = []

    def on_medium(name):
        calls.append(name)
        return lambda done, total: None

    first = engine.encode_media(REFERENCES, on_medium=on_medium)
    assert calls == ["Encoding reference picture 1", "Reading reference video 1", "Encoding reference video 1"]
    calls.clear()
    again = engine.encode_media(dataclasses.replace(REFERENCES, references=(VIDEO, IMAGE)), on_medium=on_medium)
    assert calls == ["Reading reference video 1"]
    assert torch.equal(first.media[1].condition.video, again.media[0].condition.video)
    engine.unload()
    engine.encode_media(REFERENCES, on_medium=on_medium)
    assert "Encoding reference picture 1" in calls


def test_other_pixels_are_encoded_anew(tiny_engine, references):
    other = dataclasses.replace(
        REFERENCES, references=(dataclasses.replace(IMAGE, pixels=noise_picture(9)), VIDEO, SOUND)
    )
    changed = tiny_engine.encode_media(other)
    assert not torch.equal(changed.media[0].condition.video, references.media[0].condition.video)
    assert torch.equal(changed.media[1].condition.video, references.media[1].condition.video)
    request = Request(prompt="a cat", **SIZE)
    assert not torch.equal(tiny_engine.encode(request, changed).text, tiny_engine.encode(request, references).text)


def test_references_may_stand_beside_keyframes(tiny_engine, references):
    both = tiny_engine.encode_media(dataclasses.replace(REFERENCES, keyframes=KEYFRAMES.keyframes))
    assert [medium.condition.kind for medium in both.media] == ["keyframe", "keyframe", "image", "video", "audio"]
    request = Request(prompt="a cat", **SIZE)
    conditioning = tiny_engine.encode(request, both)
    assert torch.equal(conditioning.text, tiny_engine.encode(request, references).text)  # keyframes are not presented
    assert len(conditioning.conditions) == 5
    latents = tiny_engine.sample(conditioning, sigma_points=3)
    alone = tiny_engine.sample(tiny_engine.encode(request, references), sigma_points=3)
    assert not torch.equal(latents.video, alone.video)


def test_request_chooses_the_weights(tiny_h3, keyframes, references):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))
    request = Request(prompt="a cat", **SIZE)
    engine.sample(engine.encode(request, references), sigma_points=2)
    assert set(engine._weights._loaded) == {"text_encoder", "dit of ref2va"}
    engine.sample(engine.encode(request, keyframes), sigma_points=2)
    assert set(engine._weights._loaded) == {"text_encoder", "dit of ref2va", "dit"}


def test_partitions_share_what_is_the_same(tiny_engine):
    names = tiny_engine._parts.names
    assert names["ref2va", "dit"] == "dit of ref2va"
    for part in ("text_encoder", "video_encoder", "video_decoder", "audio_encoder", "audio_decoder"):
        assert names["ref2va", part] == names["fl2va", part] == part


def test_weights_that_differ_are_not_shared(tiny_h3, tmp_path):
    from safetensors.torch import load_file, save_file

    root = shutil.copytree(tiny_h3, tmp_path / "copy")
    file = root / "Ref2VA/audio_vae/model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 1 if "decoder" in name else tensor for name, tensor in tensors.items()}, file)
    names = Engine(EngineConfig(checkpoint=root, device="cpu"))._parts.names
    assert names["ref2va", "audio_decoder"] == "audio_decoder of ref2va"
    assert names["ref2va", "audio_encoder"] == "audio_encoder"


@pytest.mark.parametrize(
    ("partition", "request_", "words"),
    [
        ("fl2va", REFERENCES, ("fl2va weights", "references are given", "ref2va")),
        ("ref2va", KEYFRAMES, ("ref2va weights", "keyframes", "fl2va")),
    ],
)
def test_media_of_the_other_weights_are_refused_before_loading(tiny_h3, partition, request_, words):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, partition=partition, device="cpu"))
    with pytest.raises(RequestError) as info:
        engine.encode_media(request_)
    for word in words:
        assert word in str(info.value)
    assert "\n" not in str(info.value)
    assert not engine._weights._loaded


def test_conditioning_of_the_other_weights_is_refused(tiny_h3, tiny_engine, references):
    conditioning = tiny_engine.encode(Request(prompt="a cat", **SIZE), references)
    engine = Engine(EngineConfig(checkpoint=tiny_h3, partition="fl2va", device="cpu", precision="float32"))
    with pytest.raises(RequestError, match="ref2va"):
        engine.sample(conditioning)


def test_tensor_that_differs_in_one_row_is_noticed(tiny_h3, tmp_path):
    """A merged adapter, or a part that was trained on: the second encoder is then one of its own."""
    from safetensors.torch import load_file, save_file

    root = shutil.copytree(tiny_h3, tmp_path / "copy")
    file = sorted((root / "Ref2VA/text_encoder").glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name][1:] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    names = Engine(EngineConfig(checkpoint=root, device="cpu"))._parts.names
    assert names["ref2va", "text_encoder"] == "text_encoder of ref2va"


def test_one_clip_is_in_memory_at_a_time(tiny_engine):
    alive = []

    def on_medium(name):
        def progress(done, total):
            if name.startswith("Reading"):
                gc.collect()
                shapes = [tuple(thing.shape) for thing in gc.get_objects() if type(thing) is torch.Tensor]
                alive.append(shapes.count((22, 64, 64, 3)))

        return progress

    clips = tuple(ReferenceVideo(clip=noise_clip(seed), soundtrack=None, short_edge=64) for seed in (21, 22))
    tiny_engine.encode_media(MediaRequest(**SIZE, references=clips), on_medium=on_medium)
    assert max(alive) == 1


def test_clip_that_memory_cannot_hold_is_refused_before_it_is_read(tiny_engine):
    frame = torch.zeros(1, 64, 64, 3, dtype=torch.uint8).expand(3600, -1, -1, -1)
    clip = MemoryClip(frame, Fraction(24))
    request = MediaRequest(width=64, height=64, num_frames=3592, references=(ReferenceVideo(clip=clip),))
    wanted = 3592 * 768 * 768 * 3
    assert largest_clip_bytes(*resolve_media(request)[:2]) == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"short_edge": 0}, "short_edge=0"),
        ({"short_edge": -64}, "short_edge=-64"),
        ({"start_s": 100.0}, "100"),
        ({"clip": noise_clip(num_frames=15)}, "at least 22 frames"),
    ],
)
def test_clip_that_cannot_be_used_is_refused_before_any_weight_is_read(tiny_h3, change, words):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu"))
    references = (IMAGE, dataclasses.replace(VIDEO, **change))
    with pytest.raises(RequestError, match=words):
        engine.encode_media(dataclasses.replace(REFERENCES, references=references))
    assert not engine._weights._loaded


@pytest.mark.parametrize(
    ("change", "words"),
    [({"fit": "banana"}, "fit='banana'"), ({"references": (dataclasses.replace(IMAGE, size="huge"),)}, "size='huge'")],
)
def test_choice_that_does_not_exist_is_refused(tiny_engine, change, words):
    with pytest.raises(RequestError, match=words):
        tiny_engine.encode_media(dataclasses.replace(REFERENCES, **change))


def test_noise_must_fit_the_conditions(tiny_engine, references):
    conditioning = tiny_engine.encode(Request(prompt="a cat", **SIZE), references)
    noise = Noise.draw(conditioning.request, 1, video_channels=24, audio_channels=32)
    with pytest.raises(RequestError, match="noise of conditions"):
        tiny_engine.sample(conditioning, noise=noise)


def test_second_partition_that_is_incomplete_does_not_keep_the_first_from_working(tiny_h3, tmp_path, caplog):
    root = shutil.copytree(tiny_h3, tmp_path / "copy")
    next((root / "Ref2VA/transformer").glob("*.safetensors")).unlink()
    engine = Engine(EngineConfig(checkpoint=root, device="cpu"))
    assert "ref2va weights cannot be used" in caplog.text
    assert list(engine.checkpoints.opened) == ["fl2va"]
    for _ in range(2):
        with pytest.raises(CheckpointError, match="shards") as info:
            engine.encode_media(REFERENCES)
    assert len(info.traceback) < 6  # one error a refusal, not one that grows


@pytest.mark.parametrize("name", ["FL2VA", "Ref2VA"])
def test_folder_of_one_partition_is_that_partition(tiny_h3, name):
    engine = Engine(EngineConfig(checkpoint=tiny_h3 / name, device="cpu"))
    assert list(engine.checkpoints.opened) == [name.lower()]
    assert name.lower() in engine.describe()


def test_media_of_another_size_are_refused(tiny_engine, keyframes):
    with pytest.raises(RequestError, match=r"64x64, 22 frames.*96x64, 22 frames"):
        tiny_engine.encode(Request(prompt="a cat", width=96, height=64, num_frames=22), keyframes)


def test_encoding_of_media_is_cancelled_at_a_tile(tiny_h3):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))

    class Cancelled(Exception):
        pass

    def on_medium(name):
        def progress(done, total):
            if name.startswith("Encoding reference video") and done == 1:
                raise Cancelled

        return progress

    with pytest.raises(Cancelled):
        engine.encode_media(REFERENCES, on_medium=on_medium)
    assert engine.encode_media(REFERENCES).num_videos == 1


def test_damaged_vae_is_named(tiny_h3):
    engine = Engine(EngineConfig(checkpoint=tiny_h3, device="cpu", precision="float32"))
    engine.encode_media(KEYFRAMES)
    engine._weights._loaded["video_encoder"].quant_conv.weight.fill_(torch.nan)
    for _ in range(2):  # what is not finite is not kept
        with pytest.raises(OutputError, match=r"keyframe 1.*not finite"):
            engine.encode_media(dataclasses.replace(KEYFRAMES, keyframes=(Keyframe(pixels=noise_picture(77)),)))


def test_unusual_media_are_noticed_or_refused_when_strict(tiny_engine):
    inside = dataclasses.replace(KEYFRAMES, keyframes=(Keyframe(pixels=noise_picture(1), frame=5),))
    media = tiny_engine.encode_media(inside)
    assert any("between the first and the last" in notice for notice in media.notices)
    conditioning = tiny_engine.encode(Request(prompt="a cat", **SIZE), media)
    assert set(media.notices) <= set(conditioning.notices)
    assert any("<Picture 1> is connected" in notice for notice in conditioning.notices)
    with pytest.raises(RequestError, match="strict"):
        tiny_engine.encode_media(dataclasses.replace(inside, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "num_frames", "noticed"), [(4, 107, False), (15, 362, False), (3, 73, True), (20, 481, True)]
)
def test_short_and_long_videos_run_from_keyframes_to_frames(tiny_engine, seconds, num_frames, noticed):
    media = tiny_engine.encode_media(
        MediaRequest(width=32, height=32, duration_s=seconds, keyframes=KEYFRAMES.keyframes)
    )
    conditioning = tiny_engine.encode(Request(prompt="a cat", width=32, height=32, duration_s=seconds), media)
    assert any("outside the trained range" in notice for notice in conditioning.notices) == noticed
    latents = tiny_engine.sample(conditioning, sigma_points=2)
    assert tiny_engine.decode_video(latents).pixels.shape == (num_frames, 32, 32, 3)
    samples = tiny_engine.decode_audio(latents).samples
    assert samples.shape == (2, 800 * round(num_frames / 24 * 40))
