"""Our sound and the host's AUDIO, in both directions."""

from collections.abc import Mapping
from typing import Any

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.timing import Timings
from comfyui_h3.h3core.types import Audio


class H3Audio(dict):
    """The host's AUDIO, a dict of waveform [1, channels, N] and sample_rate, that still knows how long it took."""

    def __init__(self, audio: Audio):
        super().__init__(waveform=audio.samples.unsqueeze(0), sample_rate=audio.sample_rate)
        self.timings = audio.timings


def from_host(audio: dict[str, Any]) -> Audio:
    """An AUDIO of any node. Raises RequestError when it holds several clips: a video has one."""
    if not isinstance(audio, Mapping) or not {"waveform", "sample_rate"} <= audio.keys():
        raise RequestError(f"a {type(audio).__name__} stands where AUDIO belongs; connect a node that gives AUDIO")
    waveform = audio["waveform"]
    if waveform.ndim != 3 or waveform.shape[0] != 1:
        raise RequestError(f"audio of shape {tuple(waveform.shape)} is not one clip; give [1, channels, samples]")
    timings = audio.timings if isinstance(audio, H3Audio) else Timings()
    return Audio(samples=waveform[0], sample_rate=int(audio["sample_rate"]), timings=timings)
