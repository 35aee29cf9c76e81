"""The shipped workflows, as files: both forms of each agree, and every page and manager finds what it looks for."""

import itertools
import json
import re
import wave
from pathlib import Path

import av
import pytest
from PIL import Image, ImageChops, ImageStat

from comfyui_h3.h3core.media.canvas import canvas_for_ratio, check_canvas, check_num_frames, frames_for_duration
from comfyui_h3.h3core.prompt import PromptContext, check
from comfyui_h3.scripts import make_media
from comfyui_h3.scripts.make_workflows import files

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
AFTER_SEED = ("fixed", "increment", "decrement", "randomize")
CORE = {"MarkdownNote", "LoadImage", "LoadVideo", "LoadAudio"}
CONTEXTS = {
    "t2va": {"mode": "t2va"},
    "first_frame": {"mode": "first"},
    "fl2va": {"mode": "first_last"},
    "ref2va": {"mode": "ref2va", "num_pictures": 1, "num_videos": 1, "num_audios": 2},
}


def api(name):
    return json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text("utf-8"))


def editor(name):
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text("utf-8"))


def widget_values(node):
    """Values of a drawn node's widgets, without what the page adds behind a seed and a file to choose."""
    values = node["widgets_values"]
    if node["type"] in ("LoadImage", "LoadVideo"):
        assert values.pop() == "image"
    return [v for i, v in enumerate(values) if not (v in AFTER_SEED and i and isinstance(values[i - 1], int))]


def request(name):
    """Inputs of the prompt node, with the size that H3 Canvas gives in place of the links to it."""
    (inputs,) = (node["inputs"] for node in api(name).values() if node["class_type"] == "H3EncodePrompt")
    canvas = [node["inputs"] for node in api(name).values() if node["class_type"] == "H3Canvas"]
    if not canvas:
        return inputs
    aspect = canvas[0]["aspect"]
    ratio = picture_size(make_media.FIRST_FRAME) if aspect == "auto" else map(int, aspect.split(":"))
    width, height = canvas_for_ratio(*ratio, canvas[0]["short_edge"])
    return {**inputs, "width": width, "height": height, "frames": frames_for_duration(canvas[0]["duration"])}


def picture_size(name):
    with Image.open(make_media.MEDIA / name) as picture:
        return picture.size


def test_files_are_what_the_script_writes():
    stale = [path.name for path, text in files().items() if path.read_text("utf-8") != text]
    assert not stale, "run: python _bootstrap.py scripts.make_workflows"


def test_every_workflow_has_both_forms():
    assert NAMES
    assert sorted(path.stem for path in (ROOT / "workflows" / "api").glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_hold_the_same_nodes_values_and_links(name):
    workflow = editor(name)
    drawn = {str(node["id"]): node for node in workflow["nodes"] if node["type"] != "MarkdownNote"}
    queued, size = api(name), request(name)
    assert drawn.keys() == queued.keys()
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    for key, node in drawn.items():
        assert (node["type"], node["title"]) == (queued[key]["class_type"], queued[key]["_meta"]["title"])
        inputs = queued[key]["inputs"]
        fed = [socket["widget"]["name"] for socket in node["inputs"] if "widget" in socket]
        values = widget_values(node)
        named = dict(zip((n for n, v in inputs.items() if n in fed or not isinstance(v, list)), values, strict=True))
        assert {name: value for name, value in named.items() if name not in fed} == {
            name: value for name, value in inputs.items() if not isinstance(value, list)
        }
        assert {widget: named[widget] for widget in fed} == {widget: size[widget] for widget in fed}
        linked = {socket["name"]: sources[socket["link"]] for socket in node["inputs"]}
        assert linked == {socket: value for socket, value in inputs.items() if isinstance(value, list)}


@pytest.mark.parametrize("name", NAMES)
def test_links_agree_in_all_three_places(name):
    workflow = editor(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    seen_inputs, seen_outputs = [], []
    for number, source, output, target, socket, kind in workflow["links"]:
        assert nodes[source]["outputs"][output]["type"] == nodes[target]["inputs"][socket]["type"] == kind
        seen_inputs.append((target, nodes[target]["inputs"][socket]["name"], number))
        seen_outputs.append((source, output, number))
    assert sorted(seen_inputs) == sorted(
        (node["id"], socket["name"], socket["link"]) for node in nodes.values() for socket in node["inputs"]
    )
    assert sorted(seen_outputs) == sorted(
        (node["id"], slot, number)
        for node in nodes.values()
        for slot, output in enumerate(node["outputs"])
        for number in output["links"] or []
    )
    assert workflow["last_link_id"] == max(link[0] for link in workflow["links"])
    assert workflow["last_node_id"] == max(nodes)


@pytest.mark.parametrize("name", NAMES)
def test_page_of_the_oldest_host_finds_every_field_it_asks_for(name):
    """It shows an alert otherwise."""
    for field in ("version", "last_node_id", "last_link_id", "nodes", "links", "groups", "config", "extra"):
        assert field in editor(name)
    for node in editor(name)["nodes"]:
        for field in ("id", "type", "pos", "size", "flags", "order", "mode", "inputs", "outputs", "properties"):
            assert field in node, f"{node['type']} has no {field}"


@pytest.mark.parametrize("name", NAMES)
def test_nodes_do_not_overlap_and_links_go_right_or_down(name):
    nodes = editor(name)["nodes"]
    title = 30  # drawn above the place of a node
    for index, a in enumerate(nodes):
        for b in nodes[index + 1 :]:
            apart_x = a["pos"][0] + a["size"][0] <= b["pos"][0] or b["pos"][0] + b["size"][0] <= a["pos"][0]
            apart_y = (
                a["pos"][1] + a["size"][1] <= b["pos"][1] - title or b["pos"][1] + b["size"][1] <= a["pos"][1] - title
            )
            assert apart_x or apart_y, f"{a['title']} and {b['title']}"
    places = {node["id"]: node["pos"] for node in nodes}
    for _, source, _, target, _, _ in editor(name)["links"]:
        assert places[source] < places[target]  # columns first, then rows


@pytest.mark.parametrize("name", NAMES)
def test_a_manager_can_name_the_pack(name):
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for node in editor(name)["nodes"]:
        if node["type"].startswith("H3"):
            assert f'name = "{node["properties"]["cnr_id"]}"' in project
            assert f'version = "{node["properties"]["ver"]}"' in project


@pytest.mark.parametrize("name", NAMES)
def test_only_core_and_our_own_nodes_are_used(name):
    for node in editor(name)["nodes"]:
        assert node["type"] in CORE or node["type"].startswith("H3")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_it_belongs_to_one_machine(name):
    for folder in ("workflows", "workflows/api"):
        text = (ROOT / folder / f"{name}.json").read_text("utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users|mnt)/|[A-Z]:\\\\", text)


@pytest.mark.parametrize("name", NAMES)
def test_request_can_run(name):
    inputs = request(name)
    check_canvas(inputs["width"], inputs["height"])
    check_num_frames(inputs["frames"])
    assert (inputs["width"], inputs["height"], inputs["frames"]) == (1344, 768, 124)


@pytest.mark.parametrize("name", NAMES)
def test_media_and_prompt_are_for_one_size(name):
    nodes = [node["inputs"] for node in api(name).values() if node["class_type"].startswith("H3Encode")]
    for one, other in itertools.pairwise(nodes):
        assert all(one[side] == other[side] for side in ("width", "height", "frames"))


@pytest.mark.parametrize("name", NAMES)
def test_prompt_has_the_form_h3_was_trained_on(name):
    inputs = request(name)
    report = check(inputs["prompt"], PromptContext(num_frames=inputs["frames"], **CONTEXTS[name]))
    assert not report.findings, report.text()
    assert "<d>[English] " in inputs["prompt"]


# Media


@pytest.mark.parametrize("name", NAMES)
def test_files_to_load_are_there(name):
    files_ = {"LoadImage": "image", "LoadVideo": "file", "LoadAudio": "audio"}
    wanted = [node["inputs"][files_[node["class_type"]]] for node in api(name).values() if node["class_type"] in files_]
    assert all((make_media.MEDIA / file).is_file() for file in wanted)
    assert len(wanted) == {"t2va": 0, "first_frame": 1, "fl2va": 2, "ref2va": 3}[name]


def test_media_are_small():
    sizes = {path.name: path.stat().st_size for path in make_media.MEDIA.iterdir()}
    assert sum(sizes.values()) < 1 << 20
    assert all(size < 60_000 for name, size in sizes.items() if name.endswith(".png"))


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        (make_media.FIRST_FRAME, make_media.first_frame),
        (make_media.LAST_FRAME, make_media.last_frame),
        (make_media.PICTURE, make_media.robot),
    ],
)
def test_pictures_are_what_the_script_draws(name, draw):
    with Image.open(make_media.MEDIA / name) as picture:
        difference = ImageChops.difference(picture.convert("RGB"), draw())
    assert max(ImageStat.Stat(difference).mean) < 0.5  # versions of PIL draw edges a little differently


def test_clip_and_voice_last_three_seconds():
    with av.open(str(make_media.MEDIA / make_media.CLIP)) as clip:
        video, sound = clip.streams.video[0], clip.streams.audio[0]
        assert (video.frames, video.average_rate, sound.rate, sound.channels) == (72, 24, 32000, 2)
    with wave.open(str(make_media.MEDIA / make_media.VOICE)) as voice:
        assert voice.getnframes() == 3 * voice.getframerate()
