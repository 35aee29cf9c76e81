"""Our sound and the host's AUDIO, in both directions."""

from collections.abc import Mapping

import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.timing import Timings
from comfyui_h3.h3core.types import Audio


class H3Audio(dict):
    """The host's AUDIO, a dict of waveform [1, channels, N] and sample_rate, that still knows how long it took."""

    def __init__(self, audio: Audio):
        super().__init__(waveform=audio.samples.unsqueeze(0), sample_rate=audio.sample_rate)
        self.timings = audio.timings


def from_host(audio: object) -> Audio:
    """An AUDIO of any node. Raises RequestError when it holds several clips: a video has one."""
    waveform, sample_rate = _parts(audio)
    if waveform.shape[0] != 1:
        raise RequestError(f"audio of shape {tuple(waveform.shape)} is not one clip; give [1, channels, samples]")
    timings = audio.timings if isinstance(audio, H3Audio) else Timings()
    return Audio(samples=waveform[0], sample_rate=sample_rate, timings=timings)


def first_clip(audio: object, what: str) -> tuple[Audio, tuple[str, ...]]:
    """The first clip of an AUDIO of any node, and a notice when there are more. ``what`` names it in messages."""
    waveform, sample_rate = _parts(audio)
    if waveform.shape[0] == 0:
        raise RequestError(f"{what} is an empty batch, {tuple(waveform.shape)}; give one clip")
    count = len(waveform)
    notices = () if count == 1 else (f"{what} is a batch of {count}; only its first clip is used",)
    return Audio(samples=waveform[0], sample_rate=sample_rate), notices


def _parts(audio: object) -> tuple[torch.Tensor, int]:
    """Waveform [B, channels, N] and sample rate. Raises RequestError for what is not AUDIO."""
    if not isinstance(audio, Mapping) or not {"waveform", "sample_rate"} <= audio.keys():
        raise RequestError(f"a {type(audio).__name__} stands where AUDIO belongs; connect a node that gives AUDIO")
    waveform = audio["waveform"]
    if not isinstance(waveform, torch.Tensor) or waveform.ndim != 3:
        shape = tuple(getattr(waveform, "shape", ()))
        raise RequestError(f"audio of shape {shape} is not one clip; give [1, channels, samples]")
    rate = audio["sample_rate"]
    if not isinstance(rate, int | float) or rate != rate or abs(rate) == float("inf"):
        raise RequestError(f"audio with sample_rate={rate!r} has no rate; give a whole number of samples a second")
    return waveform, int(rate)
