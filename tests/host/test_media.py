"""Jobs with media through the API queue of a host: the shipped workflows, partitions, labels, refusals."""

import copy
import json

import numpy as np
import pytest
from PIL import Image, ImageOps

from comfyui_h3.scripts.checkpoints import TINY_NAME, tiny_checkpoint
from comfyui_h3.scripts.comfy_host import PromptRefused
from comfyui_h3.scripts.demo import Settings, model_choice, offer_workflows, set_inputs
from comfyui_h3.tests.host.conftest import ROOT

SIZE = {"width": 96, "height": 64, "frames": 22}
MEDIA_NODE = {"first_frame": "H3EncodeFLMedia", "fl2va": "H3EncodeFLMedia", "ref2va": "H3EncodeRefMedia"}


@pytest.fixture(scope="module")
def media_prompt(host):
    """``media_prompt(name, weights=..., prompt=...)``: a shipped workflow, small enough for seconds on a CPU."""

    def build(name, model=None, weights="auto", prompt=None, **size):
        built = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text("utf-8"))
        set_inputs(built, "H3LoadModel", {"model": model or model_choice(host, TINY_NAME), "weights": weights})
        for node in (MEDIA_NODE[name], "H3EncodePrompt"):
            set_inputs(built, node, {**SIZE, **size})
        set_inputs(built, "H3EncodePrompt", {"prompt": prompt})
        set_inputs(built, "H3SampleDiT", {"sigma_points": 3})
        if name == "ref2va":
            set_inputs(built, "H3ReferenceImage", {"size": "match"})
            set_inputs(built, "H3ReferenceVideo", {"short_edge": 64})
        return built

    return build


def run(host, prompt):
    """The job; it must end well."""
    job = host.submit(prompt)
    end = job.wait(180)[-1]
    assert end.type == "execution_success", end.data.get("exception_message")
    return job


def failed(host, prompt):
    """(node, first line) of the error that ends a job."""
    end = host.submit(prompt).wait(60)[-1]
    assert end.type == "execution_error"
    return end.data["node_type"], end.data["exception_message"].splitlines()[0]


def read(container):
    """(F, H, W, 3) frames and (channels, N) samples of a file."""
    frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    container.seek(0)
    return frames, np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


@pytest.mark.parametrize("name", MEDIA_NODE)
def test_shipped_workflow_makes_a_video_with_sound(host, media_prompt, open_video, name):
    with open_video(run(host, media_prompt(name))) as file:
        frames, samples = read(file)
    assert frames.shape == (22, 64, 96, 3)
    assert frames.std() > 1
    assert samples.shape[0] == 2
    assert np.sqrt((samples**2).mean()) > 1e-4


def test_canvas_of_the_first_frame_sizes_media_and_prompt(host, media_prompt, open_video):
    shipped = json.loads((ROOT / "workflows" / "api" / "first_frame.json").read_text("utf-8"))
    prompt = media_prompt("first_frame")
    for class_type in ("H3EncodeFLMedia", "H3EncodePrompt"):
        (links,) = (node["inputs"] for node in shipped.values() if node["class_type"] == class_type)
        set_inputs(prompt, class_type, {name: links[name] for name in SIZE})
    set_inputs(prompt, "H3Canvas", {"short_edge": 64, "duration": 0.9})
    with open_video(run(host, prompt)) as file:
        frames, _ = read(file)
    assert frames.shape == (22, 64, 128, 3)


def test_other_media_make_another_video(host, media_prompt, open_video):
    prompt = media_prompt("first_frame")
    other = copy.deepcopy(prompt)
    set_inputs(other, "LoadImage", {"image": "h3_last_frame.png"})
    videos = []
    for queued in (prompt, other):
        with open_video(run(host, queued)) as file:
            videos.append(read(file)[0].astype(int))
    assert np.abs(videos[0] - videos[1]).mean() > 0.5


@pytest.fixture
def picture_files(host):
    """Frame -> (file of an unusual form, PNG that shows the same), in the host's input folder."""
    folder = host.base_dir / "input"
    photo = np.zeros((64, 96, 3), np.uint8)
    photo[:32, :48, 0] = photo[:, 80:, 1] = 200
    turned = Image.Exif()
    turned[0x0112] = 8  # to be shown a quarter turn to the left
    palette = Image.fromarray(photo).quantize(8)
    deep = np.arange(64 * 96, dtype=np.uint16).reshape(64, 96) * 10
    forms = {
        0: ("one.png", Image.new("RGB", (1, 1), (10, 200, 90)), {}),
        1: ("turned.jpg", Image.fromarray(photo), {"exif": turned}),
        5: ("palette.png", palette, {"transparency": 0}),
        9: ("gray.jpg", Image.fromarray(photo).convert("L"), {}),
        13: ("deep.png", Image.fromarray(deep), {}),
    }
    files = {}
    for frame, (name, image, options) in forms.items():
        image.save(folder / name, **options)
        with Image.open(folder / name) as file:
            shown = ImageOps.exif_transpose(file).convert("RGB")
        shown.save(folder / f"same_as_{name}.png")
        files[frame] = (name, f"same_as_{name}.png")
    assert Image.open(folder / "deep.png").mode == "I;16"
    return files


def keyframe_prompt(prompt, files):
    """The shipped first-frame workflow with a chain of keyframes: frame -> file."""
    chain = {}
    for frame, name in files.items():
        prompt[f"file{frame}"] = {"class_type": "LoadImage", "inputs": {"image": name}}
        links = {"image": [f"file{frame}", 0], "frame": frame, **chain}
        prompt[f"keyframe{frame}"] = {"class_type": "H3Keyframe", "inputs": links}
        chain = {"keyframes": [f"keyframe{frame}", 0]}
    (media,) = (node["inputs"] for node in prompt.values() if node["class_type"] == "H3EncodeFLMedia")
    del media["first_frame"]
    media.update(chain)
    return prompt


def test_picture_files_of_every_form_are_keyframes(host, media_prompt, open_video, picture_files):
    forms = {frame: name for frame, (name, _) in picture_files.items()}
    plain = {frame: name for frame, (_, name) in picture_files.items()}
    plain[13] = forms[13]  # what a host makes of 16 bits is its own: this one clips them to 8
    Image.open(host.base_dir / "input" / plain[1]).rotate(180).save(host.base_dir / "input" / "other_way.png")
    videos = []
    for files in (forms, plain, plain | {1: "other_way.png"}):
        with open_video(run(host, keyframe_prompt(media_prompt("first_frame"), files))) as file:
            videos.append(read(file)[0].astype(int))
    assert "the keyframe at frame 0 is 1x1 and is stretched to 96x64" in host.log()
    assert np.array_equal(videos[0], videos[1])
    assert np.abs(videos[1] - videos[2]).mean() > 0.1


def test_medium_that_the_prompt_does_not_name_is_noticed(host, media_prompt):
    run(host, media_prompt("first_frame", prompt="a balloon rises"))
    assert "<Picture 1> is connected, but the prompt does not name it" in host.log()


def test_label_without_its_medium_ends_with_the_remedy(host, media_prompt):
    node, line = failed(host, media_prompt("first_frame", prompt="<Picture 1> becomes <Picture 2>"))
    assert node == "H3EncodePrompt"
    assert "<Picture 2>, and what is connected is <Picture 1>;" in line


def test_label_without_any_media_is_refused_before_the_job(host, media_prompt, node_id):
    prompt = media_prompt("first_frame")
    del prompt[node_id(prompt, "H3EncodePrompt")]["inputs"]["media"]
    with pytest.raises(PromptRefused, match="no media are connected"):
        host.submit(prompt)


def test_frames_off_the_grid_are_rounded_up(host, media_prompt, open_video):
    with open_video(run(host, media_prompt("first_frame", frames=20))) as file:
        assert len(read(file)[0]) == 22
    assert "frames=20 is not 17k + 5: rounded up to 22" in host.log()


@pytest.fixture(scope="module")
def half_model(host):
    """Name of a checkpoint that has the fl2va weights alone."""
    folder = host.base_dir / "models" / "minimax_h3" / "half"
    folder.mkdir()
    (folder / "FL2VA").symlink_to(tiny_checkpoint() / "FL2VA", target_is_directory=True)
    return "half"


def test_partition_that_is_not_there_is_refused_before_the_job(host, media_prompt, half_model):
    with pytest.raises(PromptRefused, match="has no Ref2VA/ folder"):
        host.submit(media_prompt("ref2va", model=half_model, weights="ref2va"))


@pytest.mark.parametrize("model", ["half", None])
def test_references_on_fl2va_weights_end_in_one_sentence(host, media_prompt, half_model, model):
    prompt = media_prompt("ref2va", model=model, weights="auto" if model else "fl2va")
    node, line = failed(host, prompt)
    assert node == "H3EncodeRefMedia"
    assert "the fl2va weights make video from text and keyframes, and references are given; choose ref2va" in line


def test_keyframes_on_ref2va_weights_end_in_one_sentence(host, media_prompt):
    node, line = failed(host, media_prompt("first_frame", weights="ref2va"))
    assert node == "H3EncodeFLMedia"
    assert "the ref2va weights need at least one reference" in line


def test_sound_alone_ends_with_the_remedy(host, media_prompt, node_id):
    prompt = media_prompt("ref2va")
    del prompt[node_id(prompt, "H3ReferenceAudio")]["inputs"]["references"]
    node, line = failed(host, prompt)
    assert node == "H3EncodeRefMedia"
    assert "add a reference picture or video" in line


def test_served_workflows_are_small_enough_for_the_tiny_model(host, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offer_workflows(host, Settings.from_env({}))
    served = json.loads((host.base_dir / "user" / "default" / "workflows" / "ref2va.json").read_text("utf-8"))
    values = {node["type"]: node["widgets_values"] for node in served["nodes"]}
    assert values["H3Canvas"] == ["16:9", 96, 0.9]
    assert values["H3ReferenceImage"] == ["match"]
    assert values["H3ReferenceVideo"] == [True, 0.0, 96]
    assert values["LoadVideo"] == ["h3_hills.mp4", "image"]
    assert (host.base_dir / "input" / "h3_hills.mp4").is_file()
