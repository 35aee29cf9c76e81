"""A workflow as one description, and its two written forms: the editor's and the queue's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OURS = "H3"  # how the types of our own nodes begin
EDITOR_ONLY = ("MarkdownNote",)


@dataclass(frozen=True, kw_only=True)
class Link:
    """An input that comes from another node: its key, and which of its outputs.

    widget: the value that a widget keeps while a link feeds it; None for a plain socket.
    """

    node: str
    output: int = 0
    widget: Any = None


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
    return {
        "version": 0.4,
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": [
            _drawn_node(node, numbers[key], order, links, version) for order, (key, node) in enumerate(nodes.items())
        ],
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
    }


def _drawn_node(node: Node, number: int, order: int, links: list[list[Any]], version: str) -> dict[str, Any]:
    into = [link for link in links if link[3] == number]
    properties = {"Node name for S&R": node.type}
    if node.type.startswith(OURS):
        properties |= {"cnr_id": "h3core", "ver": version}  # so that a manager can offer the missing pack
    return {
        "id": number,
        "type": node.type,
        "title": node.title,
        "pos": list(node.place),
        "size": list(node.size),
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": [
            _drawn_input(name, node.inputs[name], link) for link, name in zip(into, _sockets(node), strict=True)
        ],
        "outputs": [
            {
                "name": name,
                "type": kind,
                "slot_index": slot,
                "links": [link[0] for link in links if link[1:3] == [number, slot]] or None,
            }
            for slot, (name, kind) in enumerate(node.outputs)
        ],
        "properties": properties,
        "widgets_values": _widget_values(node),
    }


def _drawn_input(name: str, source: Link, link: list[Any]) -> dict[str, Any]:
    drawn = {"name": name, "type": link[5], "link": link[0]}
    return drawn if source.widget is None else {**drawn, "widget": {"name": name}}


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
        elif value.widget is not None:
            values.append(value.widget)
        if name in node.after_widget:
            values.append(node.after_widget[name])
    return values
