"""The host's progress bar, status line and Cancel button as one plain callback."""

import html
import time
from collections.abc import Iterable

import comfy.model_management
import comfy.utils
from comfy_execution.utils import get_executing_context

TEXT_INTERVAL_S = 0.25  # the status line; the bar and Cancel take part in every call


class HostProgress:
    """``callback(done, total)`` for one stage of the node that runs now, or for the weights it reads first.

    Raises the host's interrupt when Cancel was pressed: on newer hosts a BaseException, which no stage may swallow.
    """

    def __init__(self, label: str, waiting_for: str | None = "the weights"):
        self._label = label
        self._describe = describe
        self._bar: comfy.utils.ProgressBar | None = None
        self._started = self._written = 0.0
        show_text(f"{label}: waiting for {waiting_for}" if waiting_for else label)

    def __call__(self, done: int, total: int) -> None:
        # The bar asks as well, but newer hosts drop most of its calls.
        comfy.model_management.throw_exception_if_processing_interrupted()
        now = time.monotonic()
        if self._bar is None or done == 0:  # a stage may read the weights of several models, one after the other
            self._bar, self._started = comfy.utils.ProgressBar(total), now
        self._bar.update_absolute(done, total)
        if done in (0, total) or now - self._written >= TEXT_INTERVAL_S:
            self._written = now
            show_text(self._describe(self._label, done, total, now - self._started))


class LoadProgress(HostProgress):
    """``callback(done, total)`` in bytes, while a stage reads its weights: a large model takes minutes."""

    def __init__(self, what: str):
        super().__init__(f"Loading {what}", waiting_for="the disk")
        self._describe = describe_load


def describe_load(label: str, done: int, total: int, seconds: float) -> str:
    """One line: how much of the weights is read, and how fast."""
    rate = f", {done / seconds / 1e9:.2f} GB/s" if done and seconds > 0 else ""
    return f"{label}: {done / 1e9:.1f} of {total / 1e9:.1f} GB{rate}"


def describe(label: str, done: int, total: int, seconds: float) -> str:
    """One line: how far a stage is, its pace, and about how long it will still take."""
    if total <= 1:
        return label
    if done == 0:
        return f"{label}: 0 of {total}"
    pace = seconds / done
    rate = f"{pace:.2f} s each" if pace >= 1 else f"{1 / pace:.1f} a second" if pace > 0 else "at once"
    left = f", about {pace * (total - done):.0f} s left" if done < total else f", {seconds:.1f} s"
    return f"{label}: {done} of {total}, {rate}{left}"


def show_notices(notices: Iterable[str]) -> None:
    """What is unusual about a request, as a line on the node that runs now; nothing when nothing is."""
    text = notice_text(notices)
    if text:
        show_text(text)


def notice_text(notices: Iterable[str]) -> str:
    """Notices as one line, each sentence once; empty without any."""
    sentences = dict.fromkeys(notice.rstrip(".") for notice in notices)
    return "notice: " + "; ".join(sentences) if sentences else ""


def show_text(text: str) -> None:
    """Text on the node that runs now, where the host has a page. The page takes it as HTML: labels such as <Video 1>
    would vanish, and what a file name says would run."""
    from server import PromptServer  # its web server: a process that only validates graphs may run without one

    context = get_executing_context()
    server = getattr(PromptServer, "instance", None)
    if context is not None and server is not None:
        server.send_progress_text(html.escape(text, quote=False), context.node_id)
