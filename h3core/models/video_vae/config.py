"""What the two config files of ``video_vae`` say, as numbers; everything this code cannot do is refused here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.fields import check_fields

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)

# The largest window the released decoder was made for: its positions are relative to the window, so a larger one
# is not a faster way to the same picture but another picture.
MAX_TILE_SIZE = 256

_WRAPPER_FILE = "video_vae/config.json"
_SOURCE_FILE = "video_vae/source/config.json"

# Keys with one supported value. A key in none of these tables may change the network, so it is refused by name.
_WRAPPER_FIXED: dict[str, Any] = {
    "vae_clip_length": 17,
    "vae_token_drop": 3,
    "vae_encoder_tiling": 1,
    "vae_decoder_tiling": 1,
}
_WRAPPER_LIKE: dict[str, Any] = {
    "vae_tile_size": 256,
    "vae_tile_overlap_min": 64,
    "latent_channels": 24,
    "latents_mean": [0.0],
    "latents_std": [1.0],
}
_WRAPPER_IGNORED = {
    "mode",
    "auto_map",
    "source_path",
    "source_class_name",
    "source_safetensors_path",
    "vae_parallel_tiling",
    "vae_encoder_parallel",
    "vae_decoder_parallel",
    "vae_chunk_dim",
}
_SOURCE_FIXED: dict[str, Any] = {
    "causal_decoder": False,
    "causal_encoder": True,
    "in_channels": 3,
    "num_res_blocks_decoder": None,
    "out_ch": 3,
    "padding_mode": "reflect",
    "padding_mode_t": None,
    "pixel_norm_type": "imagenet",
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
    "use_3d_conv": True,
    "use_t_isolated_gn": True,
    "use_vit_decoder": True,
    "vae_ratio": 16,
    "vae_ratio_t": 4,
    "zq_ch_decoder": None,
    "zq_ch_encoder": None,
}
_SOURCE_LIKE: dict[str, Any] = {
    "ch": 128,
    "ch_mult": [1, 2, 2, 4, 4, 8],
    "num_res_blocks": 2,
    "space_down": [2, 2, 2, 2, 1, 1],
    "time_down": [1, 2, 2, 1, 1, 1],
    "embed_dim": 24,
    "z_channels": 24,
    "vit_decoder_kwargs": {},
}
_SOURCE_IGNORED = {"space_up", "time_up"}  # they describe a convolutional decoder, which the released model has not
_VIT_FIXED: dict[str, Any] = {
    "ffn_activation_fn": "silu",
    "ffn_use_gated": True,
    "norm_affine": True,
    "norm_type": "rms_norm",
    "qk_norm_affine": False,
    "qk_norm_type": "rms_norm",
}
_VIT_LIKE: dict[str, Any] = {
    "dim_head": 64,
    "heads": 32,
    "num_layers": 36,
    "rope_dim_ratio": 0.75,
    "rope_theta": 100.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoVAEConfig:
    """Sizes of the video VAE. Tile sizes are in pixels; the latents' statistics have a value per channel."""

    ch: int
    ch_mult: tuple[int, ...]
    num_res_blocks: int
    space_down: tuple[int, ...]
    time_down: tuple[int, ...]
    latent_channels: int
    num_heads: int
    head_dim: int
    num_layers: int
    rope_dim_ratio: float
    rope_theta: float
    tile_size: int
    tile_overlap: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    clip_length: int = 17
    token_drop: int = 3
    space_ratio: int = 16
    time_ratio: int = 4
    pixel_channels: int = 3
    norm_groups: int = 32
    num_register_tokens: int = 4
    ffn_mult: int = 4

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated: a third of them for each of t, y and x."""
        return int(self.head_dim * self.rope_dim_ratio)

    @property
    def tokens_per_clip(self) -> int:
        """Latent frames of one encoded clip (5)."""
        return -(-self.clip_length // self.time_ratio)

    @property
    def last_clip_length(self) -> int:
        """Frames behind the latent frames that are kept of a video's last clip (5 frames, 2 latent frames)."""
        return (self.tokens_per_clip - self.token_drop - 1) * self.time_ratio + 1

    @property
    def frame_pre_padding(self) -> int:
        """Decoder frames in front of a clip that stand for no frame (3): its first token covers one frame only."""
        return -self.clip_length % self.time_ratio

    @property
    def token_overlap(self) -> int:
        """Latent frames a decoded window shares with the next one (2)."""
        return -self.token_drop % self.tokens_per_clip

    @property
    def frame_overlap(self) -> int:
        """Frames that two neighbouring decoded windows blend over (5)."""
        return self.token_overlap * self.time_ratio - self.frame_pre_padding

    @classmethod
    def from_dicts(cls, config: Mapping[str, Any], source_config: Mapping[str, Any]) -> "VideoVAEConfig":
        """Read ``video_vae/config.json`` and ``video_vae/source/config.json``; raise CheckpointError naming the key."""
        check_fields(config, _WRAPPER_FILE, like=_WRAPPER_LIKE, fixed=_WRAPPER_FIXED, ignored=_WRAPPER_IGNORED)
        check_fields(source_config, _SOURCE_FILE, like=_SOURCE_LIKE, fixed=_SOURCE_FIXED, ignored=_SOURCE_IGNORED)
        vit = source_config["vit_decoder_kwargs"]
        check_fields(vit, f"{_SOURCE_FILE}, vit_decoder_kwargs", like=_VIT_LIKE, fixed=_VIT_FIXED)
        channels = config["latent_channels"]
        for key in ("embed_dim", "z_channels"):
            if source_config[key] != channels:
                raise CheckpointError(
                    f"{_SOURCE_FILE}: {key}={source_config[key]} differs from latent_channels={channels} "
                    f"of {_WRAPPER_FILE}"
                )
        result = cls(
            ch=source_config["ch"],
            ch_mult=tuple(source_config["ch_mult"]),
            num_res_blocks=source_config["num_res_blocks"],
            space_down=tuple(source_config["space_down"]),
            time_down=tuple(source_config["time_down"]),
            latent_channels=channels,
            num_heads=vit["heads"],
            head_dim=vit["dim_head"],
            num_layers=vit["num_layers"],
            rope_dim_ratio=vit["rope_dim_ratio"],
            rope_theta=vit["rope_theta"],
            tile_size=config["vae_tile_size"],
            tile_overlap=config["vae_tile_overlap_min"],
            latents_mean=tuple(config["latents_mean"]),
            latents_std=tuple(config["latents_std"]),
        )
        _check_encoder(result)
        _check_decoder(result)
        return result


def _check_encoder(config: VideoVAEConfig) -> None:
    levels = len(config.ch_mult)
    for key in ("space_down", "time_down"):
        steps = getattr(config, key)
        if len(steps) != levels or not set(steps) <= {1, 2}:
            raise CheckpointError(
                f"{_SOURCE_FILE}: {key}={list(steps)} must hold {levels} values of 1 or 2, one per level of ch_mult"
            )
    if any(time == 2 and space == 1 for time, space in zip(config.time_down, config.space_down, strict=True)):
        raise CheckpointError(f"{_SOURCE_FILE}: time_down halves time in a level where space_down does not halve space")
    for key, ratio in (("space_down", config.space_ratio), ("time_down", config.time_ratio)):
        if 2 ** getattr(config, key).count(2) != ratio:
            raise CheckpointError(f"{_SOURCE_FILE}: {key}={list(getattr(config, key))} must multiply to {ratio}")
    for width in (config.ch, *(config.ch * mult for mult in config.ch_mult)):
        if width % config.norm_groups:
            raise CheckpointError(
                f"{_SOURCE_FILE}: ch*ch_mult={width} is not a multiple of the {config.norm_groups} norm groups"
            )


def _check_decoder(config: VideoVAEConfig) -> None:
    if config.rotary_dim % 6 or not 0 < config.rotary_dim <= config.head_dim:
        raise CheckpointError(
            f"{_SOURCE_FILE}: dim_head={config.head_dim} times rope_dim_ratio={config.rope_dim_ratio} gives "
            f"{config.rotary_dim} rotated channels; it must be a multiple of 6 of at most dim_head"
        )
    unit, size, overlap = config.space_ratio, config.tile_size, config.tile_overlap
    if size % unit or not 2 * unit <= size <= MAX_TILE_SIZE:
        raise CheckpointError(
            f"{_WRAPPER_FILE}: vae_tile_size={size} must be a multiple of {unit} from {2 * unit} to {MAX_TILE_SIZE}; "
            "another window is another picture, not another speed"
        )
    if overlap % unit or not unit <= overlap < size:
        raise CheckpointError(
            f"{_WRAPPER_FILE}: vae_tile_overlap_min={overlap} must be a multiple of {unit} below vae_tile_size={size}"
        )
    for key in ("latents_mean", "latents_std"):
        count = len(getattr(config, key))
        if count != config.latent_channels:
            raise CheckpointError(
                f"{_WRAPPER_FILE}: {key} has {count} values, latent_channels is {config.latent_channels}"
            )
