"""Which tensor of a file is which parameter, and how its rows are turned on the way, as tables.

Modules carry the official key names, so an official file needs a rule only for keys that are not read, and where rows
are stored in another order. Names and row orders of the other layouts are those that diffusers and ComfyUI write:
https://github.com/huggingface/diffusers (``transformer_minimax_h3.py``, ``autoencoder_kl_minimax_h3*.py``) and
https://huggingface.co/Comfy-Org/MiniMax-H3.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

RowOrder = Callable[[Tensor], Tensor]
Names = tuple[tuple[re.Pattern[str], str], ...]
"""(pattern, replacement), applied in order to a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """One parameter stored in parts: ``pattern`` matches their names, its group ``part`` is one of ``parts``, and
    ``name`` is the parameter's. join: the parts in order -> the parameter."""

    pattern: re.Pattern[str]
    name: str
    parts: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyMap:
    """How one layout of one component reads.

    names: how a key becomes the name of a parameter, or of a part of one.
    joins: parameters stored in parts.
    skip: names that are never read; all others are parameters.
    rows: pattern of a name -> how its rows are reordered, first match wins.
    derived: parameters that no file of this layout holds, by name.
    folded: whether convolutions with weight norm are stored as the weight itself.
    float16: whether files of this layout may hold float16.
    """

    names: Names = ()
    joins: tuple[Join, ...] = ()
    skip: re.Pattern[str] | None = None
    rows: tuple[tuple[re.Pattern[str], RowOrder], ...] = ()
    derived: Mapping[str, Tensor] = field(default_factory=dict)
    folded: bool = False
    float16: bool = False

    def name(self, key: str) -> str:
        """Name of the parameter a key belongs to."""
        name = self._renamed(key)
        for join in self.joins:
            if match := join.pattern.fullmatch(name):
                return match.expand(join.name)
        return name

    def part(self, key: str) -> tuple[Join, int] | None:
        """Which part of its parameter a key is; None when it is the whole."""
        name = self._renamed(key)
        for join in self.joins:
            if match := join.pattern.fullmatch(name):
                return join, join.parts.index(match["part"])
        return None

    def is_read(self, key: str) -> bool:
        return not (self.skip and self.skip.fullmatch(self.name(key)))

    def order(self, key: str) -> RowOrder | None:
        """Row order of the tensor at a key; None when the file's is the module's, or the key is a part."""
        if self.part(key) is not None:
            return None
        name = self.name(key)
        return next((order for pattern, order in self.rows if pattern.fullmatch(name)), None)

    def behind(self, prefix: str) -> KeyMap:
        """The same where every key stands behind ``prefix``."""
        return dataclasses.replace(self, names=((re.compile("^" + re.escape(prefix)), ""), *self.names))

    def _renamed(self, key: str) -> str:
        for pattern, replacement in self.names:
            key = pattern.sub(replacement, key)
        return key


def stack_qkv(num_heads: int, head_dim: int) -> RowOrder:
    """Interleaved rows (heads, 3, head_dim) -> stacked rows [all q | all k | all v]."""

    def order(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (num_heads, 3, head_dim)).transpose(0, 1).flatten(0, 2)

    return order


def swap_halves(weight: Tensor) -> Tensor:
    """Rows [value | gate] -> [gate | value]."""
    return torch.cat(weight.chunk(2)[::-1])


def stack(parts: list[Tensor]) -> Tensor:
    """q, k, v -> stacked rows [all q | all k | all v]."""
    return torch.cat(parts)


def interleave(num_heads: int) -> Callable[[list[Tensor]], Tensor]:
    """q, k, v, heads in order -> interleaved rows (heads, 3, head_dim)."""

    def join(parts: list[Tensor]) -> Tensor:
        return torch.stack([part.unflatten(0, (num_heads, -1)) for part in parts], 1).flatten(0, 2)

    return join


MODULATOR = r"time_embedder\..*|.*\.adaln_proj\..*"  # names of the transformer's ``Modulator``
QKV = re.compile(r".*\.attn\.qkv_proj\.weight")


def official_dit(num_heads: int, head_dim: int) -> KeyMap:
    """The sharded release, without its modulator: fused qkv rows are interleaved per head, in blocks and refiner."""
    return KeyMap(skip=re.compile(MODULATOR), rows=((QKV, stack_qkv(num_heads, head_dim)),))


def comfyui_dit() -> KeyMap:
    """A single file, without its modulator: official names, fused qkv rows stacked."""
    return KeyMap(skip=re.compile(MODULATOR))


def diffusers_dit(rope_inv_freq_len: int) -> KeyMap:
    """``MiniMaxH3Transformer3DModel``, without its modulator: q, k and v apart, fc1 is [up | gate], no frequencies."""
    exponent = torch.arange(0, 2 * rope_inv_freq_len, 2, dtype=torch.float32) / (2 * rope_inv_freq_len)
    return KeyMap(
        names=DIFFUSERS_DIT_NAMES,
        joins=(
            Join(
                pattern=re.compile(r"(?P<module>.*\.attn)\.to_(?P<part>[qkv])\.weight"),
                name=r"\g<module>.qkv_proj.weight",
                parts=tuple("qkv"),
                join=stack,
            ),
        ),
        skip=re.compile(MODULATOR),
        rows=((re.compile(r".*\.mlp\.fc1\.weight"), swap_halves),),
        derived={"rope.inv_freq": 1.0 / 10000.0**exponent},
    )


DIFFUSERS_DIT_NAMES: Names = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^proj_in\.", "video_patch_proj."),
        (r"^audio_proj_in\.", "audio_patch_proj."),
        (r"^context_embedder\.", "condition_proj."),
        (r"^time_embedder\.linear_1\.", "time_embedder.proj_in."),
        (r"^time_embedder\.linear_2\.", "time_embedder.proj_out."),
        (r"^token_refiner\.refiner_blocks\.", "token_refiner.blocks."),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.attn\.norm_([qk])\.", r".attn.\1_norm."),
        (r"\.attn\.to_out\.0\.", ".attn.out_proj."),
        (r"\.ff\.net\.0\.proj\.", ".mlp.fc1."),
        (r"\.ff\.net\.2\.", ".mlp.fc2."),
        (r"^norm_out\.norm\.", "final_layer.norm."),
        (r"^norm_out\.linear\.", "final_layer.adaln_proj.linear."),
        (r"^proj_out\.", "final_layer.video_out."),
        (r"^audio_proj_out\.", "final_layer.audio_out."),
    )
)


def modulator(dit: KeyMap) -> KeyMap:
    """What of a transformer's files sees timesteps only; ``dit``: how the rest of them reads."""
    return KeyMap(names=dit.names, joins=dit.joins, skip=re.compile(rf"(?!{MODULATOR}).*"))


def official_text_encoder(tap: int, num_file_layers: int) -> KeyMap:
    """The release's Qwen3-VL: layers from the tap on, the final norm and the language head are never read."""
    dropped = "|".join(str(layer) for layer in range(tap, num_file_layers)) or "none"
    return KeyMap(
        skip=re.compile(rf"lm_head\.weight|model\.language_model\.(norm\.weight|layers\.({dropped})\..*)"),
    )


def comfyui_text_encoder(tap: int, num_file_layers: int) -> KeyMap:
    """A single file: the decoder directly below ``model`` or below ``language_model``, the vision tower beside it."""
    return dataclasses.replace(
        official_text_encoder(tap, num_file_layers),
        names=(
            (re.compile(r"^(language_model|visual)\."), r"model.\1."),
            (re.compile(r"^model\.(embed_tokens|layers|norm)\."), r"model.language_model.\1."),
        ),
        float16=True,
    )


def diffusers_video_vae(num_heads: int, head_dim: int) -> KeyMap:
    """``AutoencoderKLMiniMaxH3``: q, k and v apart, w1 is [value | gate], the token of training is not stored."""
    return KeyMap(
        names=DIFFUSERS_VIDEO_VAE_NAMES,
        joins=(
            Join(
                pattern=re.compile(r"(?P<module>.*\.attn)\.to_(?P<part>[qkv])\.(?P<leaf>weight|bias)"),
                name=r"\g<module>.to_qkv.\g<leaf>",
                parts=tuple("qkv"),
                join=interleave(num_heads),
            ),
        ),
        rows=((re.compile(r".*\.ff\.w1\.(weight|bias)"), swap_halves),),
        derived={"decoder.mask_token": torch.zeros(1, 1, num_heads * head_dim)},
    )


DIFFUSERS_VIDEO_VAE_NAMES: Names = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.", r"encoder.down.\1.block.\2."),
        (r"\.conv_shortcut\.", ".nin_shortcut."),
        (r"^encoder\.down_blocks\.(\d+)\.downsamplers\.0\.", r"encoder.down.\1.downsample."),
        (r"^decoder\.proj_in\.", "decoder.x_embedder."),
        (r"\.attn\.to_out\.0\.", ".attn.to_out."),
        (r"\.ff\.net\.0\.proj\.", ".ff.w1."),
        (r"\.ff\.net\.2\.", ".ff.w2."),
    )
)


def diffusers_audio_vae() -> KeyMap:
    """``AutoencoderKLMiniMaxH3Audio``: official names, length and direction of a weight in PyTorch's older spelling."""
    return KeyMap(
        names=(
            (re.compile(r"\.weight_g$"), ".parametrizations.weight.original0"),
            (re.compile(r"\.weight_v$"), ".parametrizations.weight.original1"),
        )
    )


def half(prefixes: tuple[str, ...], vae: KeyMap | None = None) -> KeyMap:
    """One half (encoder or decoder) of a VAE's files: names outside ``prefixes`` are the other half's.

    vae: how the whole of them reads; None: as the release's.
    """
    vae = vae or KeyMap()
    kept = "|".join(re.escape(prefix) for prefix in prefixes)
    derived = {name: value for name, value in vae.derived.items() if name.startswith(prefixes)}
    return dataclasses.replace(vae, skip=re.compile(rf"(?!{kept}).*"), derived=derived)
