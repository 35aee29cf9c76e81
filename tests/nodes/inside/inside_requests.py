"""What is refused before a job is queued, and with which words."""

import folder_paths
import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.nodes import audio as host_audio
from comfyui_h3.nodes.canvas import H3Canvas
from comfyui_h3.nodes.encode_fl_media import H3EncodeFLMedia, H3Keyframe
from comfyui_h3.nodes.encode_prompt import H3EncodePrompt
from comfyui_h3.nodes.load import H3LoadModel, checkpoints
from comfyui_h3.nodes.memory import host_device, make_room
from comfyui_h3.nodes.models import NONE_FOUND, find_checkpoints
from comfyui_h3.nodes.references import H3EncodeRefMedia, H3ReferenceAudio, H3ReferenceImage, H3ReferenceVideo
from comfyui_h3.nodes.sample import H3SampleDiT
from comfyui_h3.nodes.save_mp4 import H3SaveMP4, graph_tags
from comfyui_h3.nodes.video import from_host
from comfyui_h3.tests.nodes.inside.inside_models import make_release

PROMPT = {"prompt": "rain", "width": 1344, "height": 768, "frames": 124}


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": " \n\t"}, "the prompt is empty"),
        ({"width": 33}, "width=33 is not a multiple of 32 pixels; use 32 or 64"),
        ({"width": 0}, "width=0"),
        ({"height": 720}, "use 704 or 736"),
        ({"width": 4096, "height": 512}, "longer than 4:1"),
        ({"frames": 1}, "use 5 or more"),
        ({"frames": 3593}, "frames=3593 is too many; use 3592"),
        ({"frames": float("nan")}, "not a whole number"),
        ({"prompt": "as in <Picture 1>"}, "the prompt names <Picture 1>, but no media are connected"),
    ],
)
def test_impossible_request_is_answered_with_its_remedy(wrong, remedy):
    answer = H3EncodePrompt.validate_inputs(**{**PROMPT, **wrong})
    assert remedy in answer.splitlines()[0]


def test_possible_request_passes():
    assert H3EncodePrompt.validate_inputs(**PROMPT) is True


def test_frames_off_the_grid_pass_because_they_are_rounded_up():
    assert H3EncodePrompt.validate_inputs(**{**PROMPT, "frames": 8}) is True


def test_label_passes_while_its_medium_may_be_connected():
    """The host gives None for a link; what comes through it is judged when the node runs."""
    assert H3EncodePrompt.validate_inputs(**{**PROMPT, "prompt": "as in <Picture 1>"}, media=None) is True


@pytest.mark.parametrize("node", [H3EncodeFLMedia, H3EncodeRefMedia])
def test_size_and_fit_of_media_are_judged_before_the_job(node):
    assert node.validate_inputs(width=1344, height=768, frames=124, fit="cover") is True
    assert "fit='crop' does not exist; use one of release, cover" in node.validate_inputs(fit="crop")
    assert "use 704 or 736" in node.validate_inputs(width=1344, height=720, frames=124)
    assert "use 5 or more" in node.validate_inputs(width=1344, height=768, frames=1)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"aspect": "2:1"}, "aspect='2:1' does not exist; use one of 16:9"),
        ({"aspect": "auto"}, "image, which is not connected"),
        ({"short_edge": 0}, "short_edge=0 is not possible; use 32"),
        ({"duration": 0.0}, "use 4 to 15"),
        ({"duration": float("nan")}, "not a number of seconds"),
        ({"duration": 1000.0}, "longer than 150 s"),
    ],
)
def test_impossible_canvas_is_answered_with_its_remedy(wrong, remedy):
    assert remedy in H3Canvas.validate_inputs(**{"aspect": "16:9", "short_edge": 768, "duration": 5.0, **wrong})


def test_canvas_of_an_image_passes_when_one_is_linked():
    assert H3Canvas.validate_inputs(aspect="auto", short_edge=768, duration=5.0, image=None) is True


@pytest.mark.parametrize(
    ("node", "good", "wrong", "remedy"),
    [
        (H3ReferenceImage, {"size": "match"}, {"size": "huge"}, "size='huge' does not exist; use one of diffusers"),
        (H3ReferenceVideo, {"short_edge": 32}, {"short_edge": 31}, "short_edge=31 is not possible; use 32 to 4096"),
        (H3ReferenceVideo, {"short_edge": 4096}, {"short_edge": 4097}, "use 32 to 4096"),
        (H3ReferenceVideo, {"start_time": 0.0}, {"start_time": -0.1}, "start_time=-0.1 is not possible; use 0 to"),
        (H3ReferenceVideo, {"start_time": 86400.0}, {"start_time": float("nan")}, "start_time=nan is not possible"),
    ],
)
def test_settings_of_a_reference_are_judged_before_the_job(node, good, wrong, remedy):
    assert node.validate_inputs(**good) is True
    assert remedy in node.validate_inputs(**wrong)


def test_linked_side_is_not_guessed():
    """1344 x 768 are the defaults, but a linked height may be anything."""
    assert H3EncodePrompt.validate_inputs(width=128) is True
    assert "width=130" in H3EncodePrompt.validate_inputs(width=130)
    assert "height=130" in H3EncodePrompt.validate_inputs(height=130)


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 2**63}, {"sigma_points": 1}, {"sigma_points": 1001}])
def test_impossible_sampling_is_refused(wrong):
    answer = H3SampleDiT.validate_inputs(**{"seed": 0, "sigma_points": 50, **wrong})
    assert next(iter(wrong)) in answer


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63 - 1])
def test_every_legal_seed_passes(seed):
    assert H3SampleDiT.validate_inputs(seed=seed, sigma_points=2) is True


def test_without_a_model_the_list_says_so_and_the_answer_names_the_folder(host_folders):
    (model,) = [i for i in H3LoadModel.define_schema().inputs if i.id == "model"]
    assert model.options == [NONE_FOUND]
    answer = H3LoadModel.validate_inputs(model=NONE_FOUND, weights="fl2va", device="auto", precision="auto")
    assert answer.startswith("no H3 model found: put the folder that holds FL2VA/ into ")
    assert str(host_folders[0] / "minimax_h3") in answer


def test_models_are_listed_and_checked(host_folders):
    make_release(host_folders[0] / "minimax_h3" / "h3", ["FL2VA"])
    (model,) = [i for i in H3LoadModel.define_schema().inputs if i.id == "model"]
    assert model.options == ["h3"]
    good = {"model": "h3", "weights": "fl2va", "device": "cpu", "precision": "float32"}
    assert H3LoadModel.validate_inputs(**good) is True
    assert "has no Ref2VA/ folder" in H3LoadModel.validate_inputs(**{**good, "weights": "ref2va"})
    assert "choose one of h3" in H3LoadModel.validate_inputs(**{**good, "model": "../minimax_h3/h3"})
    assert "choose one of h3" in H3LoadModel.validate_inputs(**{**good, "model": "h4"})
    assert "auto, cpu" in H3LoadModel.validate_inputs(**{**good, "device": f"cuda:{torch.cuda.device_count()}"})
    assert "bfloat16 or float32" in H3LoadModel.validate_inputs(**{**good, "precision": "float16"})


def test_auto_weights_take_what_the_folder_has(host_folders):
    make_release(host_folders[0] / "minimax_h3" / "h3", ["FL2VA"])
    (weights,) = [i for i in H3LoadModel.define_schema().inputs if i.id == "weights"]
    assert (weights.options, weights.default) == (["auto", "fl2va", "ref2va"], "auto")
    assert H3LoadModel.validate_inputs(model="h3", weights="auto", device="cpu", precision="auto") is True


def test_extra_model_paths_come_first(host_folders, tmp_path):
    mine = make_release(tmp_path / "disk" / "h3", ["FL2VA"])
    make_release(host_folders[0] / "minimax_h3" / "h3", ["FL2VA"])
    folder_paths.add_model_folder_path("minimax_h3", str(tmp_path / "disk"))
    assert checkpoints() == {"h3": mine}


def test_fingerprint_follows_the_files_of_the_chosen_model(host_folders):
    release = make_release(host_folders[0] / "minimax_h3" / "h3", ["FL2VA"])
    choice = {"model": "h3", "weights": "fl2va", "device": "cpu", "precision": "auto"}
    before = H3LoadModel.fingerprint_inputs(**choice)
    assert before == H3LoadModel.fingerprint_inputs(**choice)
    (release / "FL2VA" / "model_index.json").write_text('{"new": 1}')
    assert H3LoadModel.fingerprint_inputs(**choice) != before
    assert H3LoadModel.fingerprint_inputs(**{**choice, "model": "gone"}) == ""


OUTSIDE = ["../x", "a/../../x", "/etc/x", "C:\\x", "C:x", "\\\\server\\share\\x", "..\\x", "a\0/../x"]


@pytest.mark.parametrize("prefix", OUTSIDE)
def test_names_outside_the_output_folder_are_refused(prefix):
    assert "use a name like video/H3" in H3SaveMP4.validate_inputs(filename_prefix=prefix)


@pytest.mark.parametrize("prefix", ["", "  ", "\n", "video/", "."])
def test_empty_names_are_refused(prefix):
    assert "has no file name" in H3SaveMP4.validate_inputs(filename_prefix=prefix)


@pytest.mark.parametrize("prefix", ["H3", "video/H3", "a/b/c d", "雨の夜", "%year%/%width%x%height%", "v1.2", "..x"])
def test_usual_names_pass(prefix):
    assert H3SaveMP4.validate_inputs(filename_prefix=prefix) is True


def test_auto_is_the_device_of_the_host():
    """With --cpu a host stays off a GPU that is there, and so does the pack."""
    assert host_device("auto") == "cpu"
    assert host_device("cuda:1") == "cuda:1"


def test_host_makes_room_for_what_a_stage_is_missing(monkeypatch):
    freed, asked = [], []
    monkeypatch.setattr(
        "comfy.model_management.free_memory", lambda num_bytes, device: freed.append((num_bytes, device))
    )

    class Missing:
        device = torch.device("cuda:0")

        def missing_bytes(self, stage, given):
            asked.append((stage, given))
            return {"sample": 5, "encode": 0}[stage]

    media, conditioning = object(), object()
    make_room(Missing(), "encode", media)
    make_room(Missing(), "sample", conditioning)
    assert asked == [("encode", media), ("sample", conditioning)]
    assert freed == [(5, torch.device("cuda:0"))]


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"preset": "placebo"}, "preset='placebo' does not exist; use one of"),
        ({"crf": 99}, "crf=99 is not possible"),
        ({"filename_prefix": "x" * 300}, "is too long"),
        ({"filename_prefix": "../x"}, "leaves the output folder"),
    ],
)
def test_save_settings_are_judged_before_the_job(wrong, remedy):
    answer = H3SaveMP4.validate_inputs(**{"filename_prefix": "video/H3", "crf": 18, "preset": "fast", **wrong})
    assert remedy in answer


@pytest.mark.parametrize("value", ["abc", None, 3, {}])
def test_value_in_place_of_a_link_is_refused_with_the_node_to_connect(value):
    with pytest.raises(RequestError, match="Load H3"):
        H3SampleDiT.execute(engine=value, conditioning=None, seed=1, sigma_points=2)
    with pytest.raises(RequestError, match="AUDIO"):
        host_audio.from_host(value)
    with pytest.raises(RequestError, match="VIDEO"):
        from_host(value)


@pytest.mark.parametrize("extra", [[1], "x", {"\ud800": 1}, None])
def test_extra_info_of_a_client_cannot_spoil_a_finished_job(extra):
    assert set(graph_tags({"1": {}}, extra)) == {"prompt"}


def test_link_that_leads_back_lists_a_model_once(tmp_path):
    release = make_release(tmp_path / "h3")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert find_checkpoints([tmp_path]) == {"h3": release}


def test_link_of_another_chain_is_refused():
    """A node of another pack may pass on anything."""
    keyframe, image = (torch.zeros(1, 32, 32, 3),) * 2
    keyframes = H3Keyframe.execute(keyframe, 0).result[0]
    references = H3ReferenceImage.execute(image, "match").result[0]
    with pytest.raises(RequestError, match="Keyframe is in a chain of H3 Reference nodes"):
        H3ReferenceImage.execute(image, "match", references=keyframes)
    with pytest.raises(RequestError, match="ReferenceImage is in a chain of H3 Keyframe nodes"):
        H3Keyframe.execute(keyframe, 1, keyframes=references)
    with pytest.raises(RequestError, match="a str is in a chain"):
        H3Keyframe.execute(keyframe, 1, keyframes=("x",))


@pytest.mark.parametrize("rate", ["abc", None, float("nan"), float("inf")])
def test_sound_without_a_rate_is_refused(rate):
    with pytest.raises(RequestError, match="sample_rate"):
        H3ReferenceAudio.execute({"waveform": torch.zeros(1, 2, 32000), "sample_rate": rate})
