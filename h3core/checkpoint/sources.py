"""What a folder says of one partition before any weight file is opened: sizes, shifts, and where the weights are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyui_h3.h3core.checkpoint.index import read_json
from comfyui_h3.h3core.config import Partition
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.audio_vae.config import AudioVAEConfig
from comfyui_h3.h3core.models.dit.config import DiTConfig
from comfyui_h3.h3core.models.fields import is_positive
from comfyui_h3.h3core.models.text_encoder.config import TextEncoderConfig
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig

RELEASE_SHIFTS = {"video": 12.0, "audio": 3.0}  # where model_index.json has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Configs of a partition, and the folder or file of each component's weights.

    folder: it holds tokenizer/ and processor/ as well.
    """

    folder: Path
    video_shift: float
    audio_shift: float
    dit_config: DiTConfig
    text_encoder_config: TextEncoderConfig
    video_vae_config: VideoVAEConfig
    audio_vae_config: AudioVAEConfig
    transformer: Path
    text_encoder: Path
    video_vae: Path
    audio_vae: Path


def official_sources(folder: Path, partition: Partition) -> Sources:
    """Of ``FL2VA`` or ``Ref2VA``. Raises CheckpointError naming the file and the key that do not fit."""
    release = read_json(folder / "model_index.json").get("_minimax_h3")
    if not isinstance(release, dict):
        raise CheckpointError(f"{folder / 'model_index.json'} has no _minimax_h3 section; not an official H3 folder")
    if release.get("partition") != partition:
        raise CheckpointError(
            f"{folder} holds the {release.get('partition')!r} weights, but {partition!r} was asked for; "
            "choose the other weights, or the other folder"
        )
    shifts = release.get("sigma_shift_scales", RELEASE_SHIFTS)
    if not isinstance(shifts, dict) or not all(is_positive(shifts.get(stream)) for stream in RELEASE_SHIFTS):
        raise CheckpointError(
            f"{folder / 'model_index.json'}: sigma_shift_scales={shifts!r} is not like {RELEASE_SHIFTS}"
        )
    transformer, video_vae, audio_vae = folder / "transformer", folder / "video_vae", folder / "audio_vae"
    return Sources(
        folder=folder,
        video_shift=float(shifts["video"]),
        audio_shift=float(shifts["audio"]),
        dit_config=DiTConfig.from_dict(read_json(transformer / "config.json"), source=str(transformer / "config.json")),
        text_encoder_config=text_encoder_config(folder, release),
        video_vae_config=VideoVAEConfig.from_dicts(
            read_json(video_vae / "config.json"), read_json(video_vae / "source" / "config.json")
        ),
        audio_vae_config=AudioVAEConfig.from_dicts(
            read_json(audio_vae / "config.json"), read_json(audio_vae / "metadata.json")
        ),
        transformer=transformer,
        text_encoder=folder / "text_encoder",
        video_vae=video_vae / "source",
        audio_vae=audio_vae,
    )


def text_encoder_config(folder: Path, release: dict[str, Any]) -> TextEncoderConfig:
    """Of ``folder/text_encoder``; release: the section ``_minimax_h3`` of the model index, which may name the tap."""
    file = folder / "text_encoder" / "config.json"
    return TextEncoderConfig.from_dict(read_json(file), source=str(file), tap=release.get("text_encoder_tap"))
