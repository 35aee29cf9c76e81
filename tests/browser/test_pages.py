"""Every shipped workflow in the host's page: it loads, converts, runs, plays, and comes back from its own file."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from comfyui_h3.h3core.media.canvas import canvas_for_ratio
from comfyui_h3.scripts.checkpoints import TINY_NAME
from comfyui_h3.scripts.demo import model_choice
from comfyui_h3.scripts.make_media import MEDIA
from comfyui_h3.tests.browser.editor import Box, Editor, Playback
from comfyui_h3.tests.host.conftest import ROOT

WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
WIDTH, HEIGHT, FRAMES = 128, 96, 22
# By widget, on whatever node: a CPU needs seconds for this. The shots of a shipped prompt are longer than the video.
SMALL = {
    "width": WIDTH,
    "height": HEIGHT,
    "frames": FRAMES,
    "short_edge": 64,
    "duration": 0.9,
    "size": "match",
    "sigma_points": 3,
    "stop_on_errors": False,
}
MP4 = 'video/mp4; codecs="avc1.64001F, mp4a.40.2"'


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A workflow in the page, and what was there before anything was changed."""

    name: str
    editor: Editor
    prompt: dict[str, Any]
    complaints: list[str]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One run of a workflow, made small, and what was on the page after it. playback: None without the codecs."""

    editor: Editor
    prompt: dict[str, Any]
    complaints: list[str]
    boxes: list[Box]
    address: str
    playback: Playback | None


@pytest.fixture(scope="module", params=WORKFLOWS)
def opened(visit, request):
    with visit() as editor:
        editor.load(json.loads((ROOT / "workflows" / f"{request.param}.json").read_text()))
        yield Opened(name=request.param, editor=editor, prompt=editor.prompt(), complaints=editor.complaints())


@pytest.fixture(scope="module")
def finished(opened, host, screenshots):
    editor = opened.editor
    editor.set_widgets({**SMALL, "model": model_choice(host, TINY_NAME)})
    prompt = editor.prompt()
    status = editor.run(timeout_s=180)["status"]
    editor.screenshot(screenshots / f"{opened.name}-{host.get('/system_stats')['system']['comfyui_version']}.png")
    complaints = editor.complaints()
    assert status["status_str"] == "success", status
    player = editor.player("H3SaveMP4")
    return Finished(
        editor=editor,
        prompt=prompt,
        complaints=complaints,
        boxes=editor.boxes(),
        address=player.evaluate("video => video.currentSrc || video.src"),
        playback=editor.play(player) if editor.can_play(MP4) else None,
    )


def video_size(prompt):
    """(width, height) that a workflow made small asks for: its own numbers, or what H3 Canvas makes of its ratio."""
    canvases = [node["inputs"] for node in prompt.values() if node["class_type"] == "H3Canvas"]
    if not canvases:
        return WIDTH, HEIGHT
    (canvas,) = canvases
    if canvas["aspect"] != "auto":
        return canvas_for_ratio(*map(int, canvas["aspect"].split(":")), SMALL["short_edge"])
    with Image.open(MEDIA / prompt[canvas["image"][0]]["inputs"]["image"]) as picture:
        return canvas_for_ratio(*picture.size, SMALL["short_edge"])


@pytest.fixture
def playback(finished):
    if finished.playback is None:
        pytest.skip("this Chromium has no H.264 or no AAC decoder: name another one in H3_CHROMIUM")
    return finished.playback


def test_missing_node_is_noticed(visit):
    """What the tests below rely on: the page's own complaint is seen."""
    workflow = json.loads((ROOT / "workflows" / "t2va.json").read_text())
    workflow["nodes"][-1]["type"] = "H3NoSuchNode"
    with visit() as editor:
        editor.load(workflow)
        red, *others = reversed(editor.complaints())
    assert red == "red node H3NoSuchNode"
    assert any("H3NoSuchNode" in text for text in others)


def test_loads_without_a_complaint(opened):
    assert opened.complaints == []


def test_converts_to_its_api_form(opened):
    twin = json.loads((ROOT / "workflows" / "api" / f"{opened.name}.json").read_text())
    assert {key: node["class_type"] for key, node in opened.prompt.items()} == {
        key: node["class_type"] for key, node in twin.items()
    }
    for key, node in twin.items():
        inputs = opened.prompt[key]["inputs"]
        if not node["class_type"].startswith("H3"):  # hosts add inputs of their own to core nodes
            inputs = {name: value for name, value in inputs.items() if name in node["inputs"]}
        assert inputs == node["inputs"], node["class_type"]


def test_runs_without_a_complaint(finished):
    assert finished.complaints == []


def test_nodes_do_not_cover_each_other(finished):
    """After the run, when texts and the player have made them grow."""
    for (one, left1, top1, width1, height1), (other, left2, top2, width2, height2) in itertools.combinations(
        finished.boxes, 2
    ):
        beside = left1 + width1 <= left2 or left2 + width2 <= left1
        assert beside or top1 + height1 <= top2 or top2 + height2 <= top1, f"{one} and {other} overlap"


def test_video_plays_on_the_last_node(finished, playback):
    assert (playback.width, playback.height) == video_size(finished.prompt)
    assert playback.duration == pytest.approx(FRAMES / 24, abs=0.05)  # the sound may end an AAC frame later
    assert playback.seconds_played >= 0.3
    assert playback.num_frames_shown > 1


def test_video_has_sound_in_the_page(playback):
    if playback.num_sound_bytes is None:
        pytest.skip("this browser does not count the sound that it decodes")
    assert playback.num_sound_bytes > 0


def test_saved_file_dropped_on_the_page_brings_its_graph_back(finished):
    finished.editor.clear()
    assert finished.editor.prompt() == {}
    finished.editor.drop(finished.address)
    assert finished.editor.prompt() == finished.prompt
    assert finished.editor.complaints() == []
