"""The graph editor of a ComfyUI in a headless Chromium: what a user sees and does there, for the browser tests."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfyui_h3.scripts.comfy_host import ComfyHost

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ElementHandle, Page, Response

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_ARGS = (
    "--autoplay-policy=no-user-gesture-required",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",  # containers give it 64 MB
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)
VIEW_WIDTH, VIEW_HEIGHT = 3200, 1700  # the page leaves out the text of nodes that it has to draw small
SETTLE_MS = 1000  # dialogs and notices appear this soon after their cause: test_missing_node_is_noticed

READY = "name => !!(window.app && window.app.graph && window.LiteGraph?.registered_node_types[name])"
NOTICES = """() => [...document.querySelectorAll(
    '.p-toast-message, .p-dialog, .comfy-modal, [role=alert], [data-testid=error-overlay]')]
    .filter(element => element.checkVisibility()).map(element => element.innerText)"""
BROKEN_NODES = """() => app.graph.nodes
    .filter(node => node.has_errors || !LiteGraph.registered_node_types[node.type])
    .map(node => `red node ${node.type}`)"""
BOXES = "() => app.graph.nodes.map(node => [node.title, ...node.boundingRect])"
SET_WIDGETS = """values => app.graph.nodes.flatMap(node => node.widgets ?? [])
    .filter(widget => widget.name in values).forEach(widget => { widget.value = values[widget.name] })"""
PLAYER = """type => app.graph.nodes.filter(node => node.type === type)
    .flatMap(node => node.widgets ?? []).map(widget => widget.element?.querySelector?.('video'))
    .find(video => video)"""
PLAY = """async video => {
    video.currentTime = 0;
    await video.play();
    const start = performance.now();
    const played = () => video.played.length ? video.played.end(video.played.length - 1) : 0;
    while (played() < 0.3 && performance.now() - start < 15000) await new Promise(done => setTimeout(done, 100));
    video.pause();
    return {
        duration: video.duration,
        width: video.videoWidth,
        height: video.videoHeight,
        seconds_played: played(),
        num_frames_shown: video.getVideoPlaybackQuality().totalVideoFrames,
        num_sound_bytes: video.webkitAudioDecodedByteCount ?? null,
    };
}"""
DROP = """async address => {
    const content = await (await fetch(address)).blob();
    const transfer = new DataTransfer();
    transfer.items.add(new File([content], 'H3.mp4', {type: 'video/mp4'}));
    const canvas = document.getElementById('graph-canvas');
    canvas.dispatchEvent(new DragEvent('drop', {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""


Box = tuple[str, float, float, float, float]  # title, left, top, width, height


@dataclass(frozen=True, kw_only=True)
class Playback:
    """What the player on a node showed. num_sound_bytes: of the compressed sound; None where Chromium does not tell."""

    duration: float
    width: int
    height: int
    seconds_played: float
    num_frames_shown: int
    num_sound_bytes: int | None


def find_chromium() -> str | None:
    """The program to run: H3_CHROMIUM, or the first of the usual names that is installed."""
    return os.environ.get("H3_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)


class Editor:
    """One visit of the page, which ends with the ``with`` block: nothing of an earlier visit is left on it."""

    def __init__(self, browser: Browser, host: ComfyHost, needed_node: str):
        self.host = host
        self.page: Page = browser.new_page(viewport={"width": VIEW_WIDTH, "height": VIEW_HEIGHT})
        self._errors: list[str] = []
        self.page.on("pageerror", lambda error: self._errors.append(str(error)))
        self.page.goto(host.url)
        self.page.wait_for_function(READY, arg=needed_node)

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()

    def load(self, workflow: Mapping[str, Any]) -> None:
        self.page.evaluate("async workflow => { await app.loadGraphData(workflow) }", workflow)
        self.page.wait_for_timeout(SETTLE_MS)

    def clear(self) -> None:
        self.page.evaluate("() => { app.graph.clear() }")

    def prompt(self) -> dict[str, Any]:
        """The graph in the API form, as the page would queue it."""
        return self.page.evaluate("async () => (await app.graphToPrompt()).output")

    def complaints(self) -> list[str]:
        """Errors of scripts, dialogs and notices on the screen, nodes that are unknown or marked."""
        return [*self._errors, *self.page.evaluate(NOTICES), *self.page.evaluate(BROKEN_NODES)]

    def boxes(self) -> list[Box]:
        """Where every node is drawn, its title bar included."""
        return [(title, left, top, width, height) for title, left, top, width, height in self.page.evaluate(BOXES)]

    def set_widgets(self, values: Mapping[str, object]) -> None:
        """Give the widgets of these names their values, on whatever nodes; links stay, and win."""
        self.page.evaluate(SET_WIDGETS, values)

    def run(self, timeout_s: float) -> dict[str, Any]:
        """Queue the graph and wait for its end; the host's history of it."""

        def is_queued(response: Response) -> bool:
            return response.request.method == "POST" and response.url.endswith("/prompt")

        with self.page.expect_response(is_queued) as answer:
            self.page.evaluate("async () => { await app.queuePrompt(0, 1) }")
        assert answer.value.ok, answer.value.text()
        prompt_id = answer.value.json()["prompt_id"]
        deadline = time.monotonic() + timeout_s
        while prompt_id not in (history := self.host.get(f"/history/{prompt_id}")):
            self.host.check_alive()
            if time.monotonic() > deadline:
                self.host.interrupt(prompt_id)  # the next graph is not to wait for it
                raise AssertionError(f"no end within {timeout_s:.0f} s; log: {self.host.log_path}")
            self.page.wait_for_timeout(200)
        self.page.wait_for_timeout(SETTLE_MS)
        return history[prompt_id]

    def player(self, node_type: str) -> ElementHandle:
        """The <video> element on the node of a class."""
        found = self.page.wait_for_function(PLAYER, arg=node_type).as_element()
        assert found is not None
        return found

    def can_play(self, mime_type: str) -> bool:
        return bool(self.page.evaluate("type => document.createElement('video').canPlayType(type)", mime_type))

    def play(self, player: ElementHandle) -> Playback:
        """Wait for the first frame, then play the start of the file."""
        self.page.wait_for_function("video => video.readyState >= video.HAVE_CURRENT_DATA", arg=player)
        return Playback(**player.evaluate(PLAY))

    def drop(self, address: str, timeout_s: float = 15) -> None:
        """Drop the file behind an address on an empty graph and wait for the nodes that it brings."""
        self.page.evaluate(DROP, address)
        self.page.wait_for_function("() => app.graph.nodes.length > 0", timeout=timeout_s * 1000)
        self.page.wait_for_timeout(SETTLE_MS)

    def screenshot(self, path: Path) -> None:
        """A picture of the whole graph."""
        self.page.evaluate("async () => { await app.extensionManager.command.execute('Comfy.Canvas.FitView') }")
        self.page.wait_for_timeout(SETTLE_MS)
        self.page.screenshot(path=path)
