"""The shipped workflows, as files: both forms of each agree, and every page and manager finds what it looks for."""

import json
import re
from pathlib import Path

import pytest

from comfyui_h3.h3core.media.canvas import check_canvas, check_num_frames
from comfyui_h3.scripts.make_workflows import files

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
AFTER_SEED = ("fixed", "increment", "decrement", "randomize")


def api(name):
    return json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text("utf-8"))


def editor(name):
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text("utf-8"))


def widget_values(node):
    """Values of a drawn node's widgets, without what the page adds behind a seed."""
    values = node["widgets_values"]
    return [v for i, v in enumerate(values) if not (v in AFTER_SEED and i and isinstance(values[i - 1], int))]


def test_files_are_what_the_script_writes():
    stale = [path.name for path, text in files().items() if path.read_text("utf-8") != text]
    assert not stale, "run: python _bootstrap.py scripts.make_workflows"


def test_every_workflow_has_both_forms():
    assert NAMES
    assert sorted(path.stem for path in (ROOT / "workflows" / "api").glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_hold_the_same_nodes_values_and_links(name):
    drawn = {str(node["id"]): node for node in editor(name)["nodes"] if node["type"] != "MarkdownNote"}
    queued = api(name)
    assert drawn.keys() == queued.keys()
    sources = {link[0]: [str(link[1]), link[2]] for link in editor(name)["links"]}
    for key, node in drawn.items():
        assert (node["type"], node["title"]) == (queued[key]["class_type"], queued[key]["_meta"]["title"])
        inputs = queued[key]["inputs"]
        assert widget_values(node) == [value for value in inputs.values() if not isinstance(value, list)]
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
        assert node["type"] == "MarkdownNote" or node["type"].startswith("H3")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_it_belongs_to_one_machine(name):
    for folder in ("workflows", "workflows/api"):
        text = (ROOT / folder / f"{name}.json").read_text("utf-8")
        assert not re.search(r"/(home|root|tmp|work|Users|mnt)/|[A-Z]:\\\\", text)


@pytest.mark.parametrize("name", NAMES)
def test_request_can_run(name):
    (inputs,) = (node["inputs"] for node in api(name).values() if node["class_type"] == "H3EncodePrompt")
    check_canvas(inputs["width"], inputs["height"])
    check_num_frames(inputs["frames"])


@pytest.mark.parametrize("name", NAMES)
def test_prompt_has_the_form_h3_was_trained_on(name):
    (inputs,) = (node["inputs"] for node in api(name).values() if node["class_type"] == "H3EncodePrompt")
    sections = re.split(r"(?:^|\n\n)(?=[a-z_]+: )", inputs["prompt"])
    names = [section.split(":")[0] for section in sections if section]
    assert names == ["integrated_multimodal_description", "overall_soundscape", "non_diegetic_music"]
    cuts = re.findall(r"\[Shot (\d+)\](?: At (\d\d):(\d\d\.\d{3}), the camera cuts to)?", inputs["prompt"])
    assert [int(number) for number, _, _ in cuts] == list(range(1, len(cuts) + 1))
    times = [60 * int(minutes) + float(seconds) for _, minutes, seconds in cuts[1:]]
    assert times == sorted(times)
    assert all(0 < time < inputs["frames"] / 24 for time in times)
    assert inputs["prompt"].count("<d>[English] ") == inputs["prompt"].count("</d>") >= 1
