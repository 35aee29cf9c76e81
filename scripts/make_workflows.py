"""Writes workflows/*.json (for the graph editor) and workflows/api/*.json (for the queue) from one description.

python _bootstrap.py scripts.make_workflows            writes both forms of every workflow
python _bootstrap.py scripts.make_workflows --check    only says whether the files are up to date
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PROMPT = """integrated_multimodal_description: [Shot 1] Live-action cinematic realism, warm early light, shallow \
depth of field. A medium shot of a potter (S1), a woman in her fifties with grey hair tied back and clay \
on her forearms, at a wheel beside a tall window. The camera pushes in with small amplitude at slow \
speed while she draws the wet clay up into a tall vase; water beads run down its side and drops fly off \
the rim. She looks up, smiles, and says in a low, unhurried voice: <d>[English] Every pot remembers the \
hand that made it.</d> [Shot 2] At 00:03.200, the camera cuts to a close-up of her thumbs pressing the \
rim into a gentle wave, static, the window light rolling over the turning surface.

overall_soundscape: A steady low hum of the wheel and the wet slide of hands on clay, very close. Rain ticks on the \
window glass, and a wooden floor creaks once as she shifts her weight.

non_diegetic_music: A solo nylon-string guitar at a slow tempo, sparse single notes that stay quiet under the voice."""

NOTE = """## Text to video with sound

1. Put the folder of the MiniMax H3 release (it holds `FL2VA/`) into `models/minimax_h3/`, refresh the page with `R` \
and choose it in **Load H3**.
2. Write the prompt. H3 was trained on three sections: `integrated_multimodal_description`, `overall_soundscape`, \
`non_diegetic_music`. Spoken words go between `<d>[English]` and `</d>`.
3. Queue. The MP4 appears in `output/video/` and on the last node. It carries this graph: drop it on the page to get \
it back.

**Size**: multiples of 32, up to the area of 1344 x 768. **Length**: frames at 24 per second, in steps of 17: 124 \
(5.2 s), 243 (10.1 s), 362 (15.1 s). **Sigma points**: 50 is the release's setting, one more than forwards."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """An input that comes from another node: its key, and which of its outputs."""

    node: str
    output: int = 0


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node. ``inputs`` in the order of its schema: Links are sockets, all else is the value of a widget.

    outputs: (shown name, type) of each. place and size: in pixels of the canvas; the title is drawn above the place.
    after_widget: what the page adds behind a widget of its own, by the widget's name.
    """

    type: str
    title: str
    inputs: dict[str, Any]
    place: tuple[int, int]
    size: tuple[int, int]
    outputs: tuple[tuple[str, str], ...] = ()
    after_widget: dict[str, Any] = field(default_factory=dict)


def t2va() -> dict[str, Node]:
    engine = Link(node="load")
    latents = Link(node="sample")
    return {
        "note": Node(
            type="MarkdownNote", title="Text to video", inputs={"text": NOTE}, place=(0, 240), size=(400, 330)
        ),
        "load": Node(
            type="H3LoadModel",
            title="Load H3",
            inputs={"model": "tiny-h3", "weights": "fl2va", "device": "auto", "precision": "auto"},
            outputs=(("engine", "H3_ENGINE"),),
            place=(0, 0),
            size=(400, 190),
        ),
        "encode": Node(
            type="H3EncodePrompt",
            title="H3 Encode Prompt",
            inputs={"engine": engine, "prompt": PROMPT, "width": 1344, "height": 768, "frames": 124},
            outputs=(("conditioning", "H3_CONDITIONING"),),
            place=(460, 0),
            size=(480, 570),
        ),
        "sample": Node(
            type="H3SampleDiT",
            title="H3 Sample DiT",
            inputs={"engine": engine, "conditioning": Link(node="encode"), "seed": 42, "sigma_points": 50},
            outputs=(("latents", "H3_LATENTS"),),
            after_widget={"seed": "fixed"},
            place=(1000, 0),
            size=(340, 190),
        ),
        "decode_audio": Node(
            type="H3DecodeAudio",
            title="H3 Decode Audio",
            inputs={"engine": engine, "latents": latents},
            outputs=(("audio", "AUDIO"),),
            place=(1400, 0),
            size=(340, 110),
        ),
        "decode_video": Node(
            type="H3DecodeVideo",
            title="H3 Decode Video",
            inputs={"engine": engine, "latents": latents, "audio": Link(node="decode_audio")},
            outputs=(("video", "VIDEO"),),
            place=(1400, 170),
            size=(340, 130),
        ),
        "save": Node(
            type="H3SaveMP4",
            title="H3 Save MP4",
            inputs={
                "video": Link(node="decode_video"),
                "filename_prefix": "video/H3",
                "crf": 18,
                "preset": "fast",
                "save_metadata": True,
            },
            place=(1800, 0),
            size=(440, 570),
        ),
    }


WORKFLOWS = {"t2va": t2va}
EDITOR_ONLY = ("MarkdownNote",)


def api_form(nodes: dict[str, Node]) -> dict[str, Any]:
    """What POST /prompt takes."""
    numbers = {key: number for number, key in enumerate(nodes, start=1)}
    return {
        str(numbers[key]): {
            "class_type": node.type,
            "inputs": {
                name: [str(numbers[value.node]), value.output] if isinstance(value, Link) else value
                for name, value in node.inputs.items()
            },
            "_meta": {"title": node.title},
        }
        for key, node in nodes.items()
        if node.type not in EDITOR_ONLY
    }


def editor_form(nodes: dict[str, Node], version: str) -> dict[str, Any]:
    """What the graph editor loads. Every field is there that the page of ComfyUI 0.3.75 asks for."""
    numbers = {key: number for number, key in enumerate(nodes, start=1)}
    links = _links(nodes, numbers)
    drawn = []
    for order, (key, node) in enumerate(nodes.items()):
        mine = [link for link in links if link[3] == numbers[key]]
        properties = {"Node name for S&R": node.type}
        if node.type not in EDITOR_ONLY:
            properties |= {"cnr_id": "h3core", "ver": version}  # so that a manager can offer the missing pack
        drawn.append(
            {
                "id": numbers[key],
                "type": node.type,
                "title": node.title,
                "pos": list(node.place),
                "size": list(node.size),
                "flags": {},
                "order": order,
                "mode": 0,
                "inputs": [
                    {"name": name, "type": link[5], "link": link[0]}
                    for link, name in zip(mine, _sockets(node), strict=True)
                ],
                "outputs": [
                    {
                        "name": name,
                        "type": kind,
                        "slot_index": slot,
                        "links": [link[0] for link in links if link[1:3] == [numbers[key], slot]] or None,
                    }
                    for slot, (name, kind) in enumerate(node.outputs)
                ],
                "properties": properties,
                "widgets_values": _widget_values(node),
            }
        )
    return {
        "version": 0.4,
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": drawn,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
    }


def _sockets(node: Node) -> list[str]:
    return [name for name, value in node.inputs.items() if isinstance(value, Link)]


def _links(nodes: dict[str, Node], numbers: dict[str, int]) -> list[list[Any]]:
    """[id, from node, its output, to node, its socket, type] of every link; sockets count within what a node lists."""
    links: list[list[Any]] = []
    for key, node in nodes.items():
        for socket, name in enumerate(_sockets(node)):
            link = node.inputs[name]
            kind = nodes[link.node].outputs[link.output][1]
            links.append([len(links) + 1, numbers[link.node], link.output, numbers[key], socket, kind])
    return links


def _widget_values(node: Node) -> list[Any]:
    values: list[Any] = []
    for name, value in node.inputs.items():
        if not isinstance(value, Link):
            values.append(value)
        if name in node.after_widget:
            values.append(node.after_widget[name])
    return values


def project_version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no version")
    return found[1]


def files() -> dict[Path, str]:
    """Every file and what belongs in it."""
    wanted = {}
    for name, make in WORKFLOWS.items():
        forms = {ROOT / "workflows" / f"{name}.json": editor_form(make(), project_version())}
        forms[ROOT / "workflows" / "api" / f"{name}.json"] = api_form(make())
        wanted.update({path: json.dumps(form, indent=2, ensure_ascii=False) + "\n" for path, form in forms.items()})
    return wanted


def main() -> int:
    wanted = files()
    if sys.argv[1:] == ["--check"]:
        stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what scripts/make_workflows.py writes")
        return 1 if stale else 0
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
