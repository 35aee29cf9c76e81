"""From a prompt and its media to token ids: the strings the model was trained on, byte for byte.

There is no chat template, no system prompt, no start or end token and no truncation: media labels with their vision
blocks, then the prompt, each segment tokenized by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfyui_h3.h3core.errors import CheckpointError, RequestError
from comfyui_h3.h3core.models.text_encoder.tokens import CONTROL_TOKENS, MAX_TOKENS
from comfyui_h3.h3core.models.text_encoder.vision import PixelLimits, VisualPatches, image_patches, video_patches
from comfyui_h3.h3core.types import TEXT, VIDEO, EncodedMedium

RELEASE_VOCAB_ROWS = 151_936
RELEASE_IDS = {
    # Only a tokenizer that reads additional_special_tokens has the seven, and only one with all merges has the label.
    "<d></d><|cutoff|><|lyrics_start|><|lyrics_end|><|caption_start|><|caption_end|>": list(range(151_669, 151_676)),
    "<Picture 1>: ": [21604, 3826, 220, 16, 26818, 220],
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageItem:
    """A keyframe or reference image: label ``<Picture i>: `` and one vision block."""

    patches: VisualPatches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoItem:
    """A reference video: ``<Audio j>: `` when it has sound, the label ``<Video k>: ``, then timed vision blocks."""

    patches: VisualPatches
    timestamps_s: tuple[float, ...]  # of each temporal block
    has_soundtrack: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioItem:
    """A reference sound: the label ``<Audio j>: `` alone."""


MediaItem = ImageItem | VideoItem | AudioItem

SAMPLED_FPS = 2  # frames of a clip the encoder sees each second


def media_items(media: Sequence[EncodedMedium], limits: PixelLimits) -> list[MediaItem]:
    """Media as they are presented. Raises RequestError for a clip of a single sampled frame."""
    items: list[MediaItem] = []
    for medium in media:
        if medium.view is None:
            items.append(AudioItem())
        elif medium.condition.kind == "video":
            items.append(
                VideoItem(
                    patches=video_patches(medium.view, limits),
                    timestamps_s=block_timestamps(len(medium.view)),
                    has_soundtrack=medium.condition.audio is not None,
                )
            )
        else:
            items.append(ImageItem(patches=image_patches(medium.view[0], limits)))
    return items


def block_timestamps(num_frames: int) -> tuple[float, ...]:
    """Seconds of each temporal block: the mean of its two frames; an odd last frame fills its block alone."""
    times = [frame / SAMPLED_FPS for frame in range(num_frames)]
    times += times[-1:] * (num_frames % 2)
    return tuple((first + second) / 2 for first, second in zip(times[::2], times[1::2], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Presentation:
    """What the encoder reads. ids: (L,) int64; modality: (L,) int32, 0 for rows of a vision block, 1 for text."""

    ids: Tensor
    modality: Tensor
    images: tuple[VisualPatches, ...] = ()
    videos: tuple[VisualPatches, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()  # (grid_h, grid_w) of each vision block in order


class Presenter:
    """Builds presentations with the tokenizer of one checkpoint."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._control = {self._id(token): token for token in CONTROL_TOKENS}

    @classmethod
    def from_folder(cls, folder: Path, vocab_rows: int) -> Presenter:
        """From a checkpoint's ``tokenizer/`` folder. Raises CheckpointError when it is not the release's kind."""
        from transformers import AutoTokenizer

        if not (folder / "tokenizer_config.json").is_file():
            raise CheckpointError(f"{folder} has no tokenizer_config.json; is the checkpoint complete?")
        try:
            # A checkpoint may name Python files of its own; none of them is ever run.
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises Exception itself
            raise CheckpointError(f"{folder} is not a readable tokenizer ({error!r}); download it again") from error
        presenter = cls(tokenizer)
        if vocab_rows == RELEASE_VOCAB_ROWS:
            for text, ids in RELEASE_IDS.items():
                if presenter.tokenize(text) != ids:
                    raise CheckpointError(
                        f"{folder} reads {text!r} as {presenter.tokenize(text)}, the release as {ids}; "
                        "use the tokenizer that came with the checkpoint"
                    )
        if len(tokenizer) > vocab_rows:
            raise CheckpointError(f"{folder} has {len(tokenizer)} tokens, the encoder only {vocab_rows} embedding rows")
        return presenter

    def _id(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        if found is None or self._tokenizer.convert_ids_to_tokens(found) != token:
            raise CheckpointError(f"the tokenizer has no token {token!r}; use the one that came with the checkpoint")
        return found

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, prompt: str) -> list[int]:
        """Ids of a prompt. Raises RequestError for a control token in it, or more tokens than there are positions."""
        ids = self.tokenize(prompt)
        if len(ids) > MAX_TOKENS:
            raise RequestError(f"the prompt has {len(ids)} tokens, the encoder reads {MAX_TOKENS}; shorten it")
        typed = [self._control[i] for i in ids if i in self._control]
        if typed:
            raise RequestError(
                f"the prompt contains the control token {typed[0]}; remove it (markers such as <d> are allowed)"
            )
        return ids

    def present(self, prompt: str, items: Sequence[MediaItem] = ()) -> Presentation:
        """The prompt behind its media, in request order. Each kind counts from 1; soundtracks count as audio."""
        ids: list[int] = []
        modality: list[int] = []
        images: list[VisualPatches] = []
        videos: list[VisualPatches] = []
        blocks: list[tuple[int, int]] = []

        def add_text(text: str) -> None:
            tokens = self.tokenize(text)
            ids.extend(tokens)
            modality.extend([TEXT] * len(tokens))

        def add_block(pad: str, patches: VisualPatches) -> None:
            count = patches.num_tokens_per_block()
            ids.extend([self._id("<|vision_start|>"), *[self._id(pad)] * count, self._id("<|vision_end|>")])
            modality.extend([VIDEO] * (count + 2))
            blocks.append(patches.grid[1:])

        num_audio = 0
        for item in items:
            if isinstance(item, ImageItem):
                images.append(item.patches)
                add_text(f"<Picture {len(images)}>: ")
                add_block("<|image_pad|>", item.patches)
                continue
            if isinstance(item, AudioItem) or item.has_soundtrack:
                num_audio += 1
                add_text(f"<Audio {num_audio}>: ")
            if isinstance(item, VideoItem):
                videos.append(item.patches)
                add_text(f"<Video {len(videos)}>: ")
                for timestamp in item.timestamps_s:
                    add_text(f"<{timestamp:.1f} seconds>")
                    add_block("<|video_pad|>", item.patches)
        prompt_ids = self.prompt_ids(prompt)
        ids.extend(prompt_ids)
        modality.extend([TEXT] * len(prompt_ids))
        if len(ids) > MAX_TOKENS:
            raise RequestError(
                f"prompt and media have {len(ids)} tokens, the encoder reads {MAX_TOKENS}; use fewer or smaller media"
            )
        return Presentation(
            ids=torch.tensor(ids, dtype=torch.int64),
            modality=torch.tensor(modality, dtype=torch.int32),
            images=tuple(images),
            videos=tuple(videos),
            blocks=tuple(blocks),
        )
