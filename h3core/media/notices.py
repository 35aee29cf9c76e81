"""What is odd about a clip, for a node to show and for the log."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class Notices:
    """Sentences without a full stop, each once; a new one is logged. A clip and the parts trimmed from it share them.

    part: "file", or the stream that shows it, "video" or "audio". What was said of a stream goes when it is read anew:
    another window of it may be free of that.
    """

    def __init__(self) -> None:
        self._sentences: dict[str, dict[str, None]] = {"file": {}, "video": {}, "audio": {}}

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(sentence for part in self._sentences.values() for sentence in part))

    def has(self, part: str) -> bool:
        return bool(self._sentences[part])

    def add(self, part: str, sentence: str) -> None:
        if sentence not in self._sentences[part]:
            self._sentences[part][sentence] = None
            log.warning("%s", sentence)

    def restart(self, part: str) -> None:
        self._sentences[part].clear()
