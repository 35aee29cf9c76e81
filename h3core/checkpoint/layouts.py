"""Which layout the files of a component have, and how that was found: from keys, from where they are, from numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from comfyui_h3.h3core.checkpoint import keymap
from comfyui_h3.h3core.checkpoint.index import TensorEntry, read_entries, read_json, read_keys
from comfyui_h3.h3core.checkpoint.keymap import KeyMap
from comfyui_h3.h3core.checkpoint.qkv_order import block_rms, judge
from comfyui_h3.h3core.checkpoint.unsupported import check_file_name, refuse_unsupported
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.dit.config import CLASS_NAME, DiTConfig
from comfyui_h3.h3core.models.text_encoder.config import TextEncoderConfig
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "base_model.model.")

# One key that only this naming has. A key of the last block would not do: how many there are is not known yet.
_TRANSFORMER = {
    "diffusers": "transformer_blocks.0.attn.to_q.weight",
    "official names": "blocks.0.attn.qkv_proj.weight",
}
_VIDEO_VAE = {
    "diffusers": "decoder.transformer_blocks.0.attn.to_q.weight",
    "official names": "decoder.transformer_blocks.0.attn.to_qkv.weight",
}
_AUDIO_VAE = {
    "official": "decoder.conv_pre.parametrizations.weight.original0",
    "diffusers": "decoder.conv_pre.weight_g",
    "comfyui": "decoder.conv_pre.weight",
}
_TEXT_ENCODER = {
    "official": "model.language_model.embed_tokens.weight",
    "comfyui": "model.embed_tokens.weight",
    "bare": "language_model.embed_tokens.weight",
}
_QKV = re.compile(r"blocks\.\d+\.attn\.qkv_proj\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """name: "official", "diffusers" or "comfyui". prefix: in front of every key. evidence: how this was found."""

    name: str
    prefix: str
    evidence: str

    def describe(self) -> str:
        return f"{self.name} layout ({self.evidence})"


def transformer_layout(path: Path, asked: str, config: DiTConfig) -> Layout:
    """Of a DiT's folder or file. ``asked``: a layout that was asked for, or "auto".

    Raises CheckpointError for names that are not an H3 DiT's, and where neither the place nor the numbers say how qkv
    rows are ordered.
    """
    keys = _readable_keys(path)
    naming, prefix = _naming(keys, _TRANSFORMER, PREFIXES, path, "the transformer of H3")
    if naming == "diffusers":
        return _agreed(Layout(name=naming, prefix=prefix, evidence="q, k and v are tensors of their own"), asked, path)
    if asked != "auto":
        layout = Layout(name=asked, prefix=prefix, evidence="qkv rows as asked for")
        return _one_of(("official", "comfyui"), layout, path)
    if _is_official_folder(path):
        return Layout(name="official", prefix=prefix, evidence=f"shards of {CLASS_NAME}: qkv rows interleaved")
    found = judge(torch.stack([block_rms(*each, *_heads(config)) for each in _some_qkv(path, prefix)]))
    if found.order is None:
        raise CheckpointError(
            f"{path} does not say how its fused qkv rows are ordered: {found.evidence}. Say which it is: layout "
            "comfyui (stacked, as single files are), or official (interleaved, as the shards of MiniMax are)"
        )
    name = "comfyui" if found.order == "stacked" else "official"
    return Layout(name=name, prefix=prefix, evidence=f"qkv rows {found.order}: {found.evidence}")


def transformer_keymap(layout: Layout, config: DiTConfig) -> KeyMap:
    """How a DiT in a layout reads, its modulator aside."""
    tables: Mapping[str, KeyMap] = {
        "official": keymap.official_dit(*_heads(config)),
        "comfyui": keymap.comfyui_dit(),
        "diffusers": keymap.diffusers_dit(config.rope_inv_freq_len),
    }
    return tables[layout.name].behind(layout.prefix)


def video_vae_layout(path: Path, asked: str) -> Layout:
    """Of a video VAE's folder or file."""
    naming, prefix = _naming(_readable_keys(path), _VIDEO_VAE, ("",), path, "the video VAE of H3")
    if naming == "diffusers":
        return _agreed(Layout(name=naming, prefix=prefix, evidence="q, k and v are tensors of their own"), asked, path)
    name = asked if asked != "auto" else "official" if path.is_dir() else "comfyui"
    layout = Layout(name=name, prefix=prefix, evidence="official names in a " + ("folder" if path.is_dir() else "file"))
    return _one_of(("official", "comfyui"), layout, path)


def video_vae_keymap(layout: Layout, config: VideoVAEConfig) -> KeyMap:
    """How a whole video VAE in a layout reads."""
    tables = {
        "official": KeyMap(),
        "comfyui": KeyMap(float16=True),
        "diffusers": keymap.diffusers_video_vae(config.num_heads, config.head_dim),
    }
    return tables[layout.name]


def audio_vae_layout(path: Path, asked: str) -> Layout:
    """Of an audio VAE's folder or file."""
    naming, prefix = _naming(_readable_keys(path), _AUDIO_VAE, ("",), path, "the audio VAE of H3")
    evidence = {
        "official": "weight norm not folded",
        "diffusers": "weight norm not folded, weight_g and weight_v",
        "comfyui": "weight norm folded",
    }[naming]
    return _agreed(Layout(name=naming, prefix=prefix, evidence=evidence), asked, path)


def audio_vae_keymap(layout: Layout) -> KeyMap:
    """How a whole audio VAE in a layout reads."""
    tables = {
        "official": KeyMap(),
        "comfyui": KeyMap(folded=True),
        "diffusers": keymap.diffusers_audio_vae(),
    }
    return tables[layout.name]


def text_encoder_layout(path: Path, asked: str) -> Layout:
    """Of a text encoder's folder or file. That of diffusers is the official one."""
    naming, prefix = _naming(_readable_keys(path), _TEXT_ENCODER, ("",), path, "the text encoder of H3")
    name, evidence = {
        "official": ("official", "below model.language_model and model.visual"),
        "comfyui": ("comfyui", "below model and visual"),
        "bare": ("comfyui", "below language_model and visual"),
    }[naming]
    asked = "official" if (asked, name) == ("diffusers", "official") else asked
    return _agreed(Layout(name=name, prefix=prefix, evidence=evidence), asked, path)


def text_encoder_keymap(layout: Layout, config: TextEncoderConfig) -> KeyMap:
    """How a text encoder in a layout reads."""
    table = keymap.comfyui_text_encoder if layout.name == "comfyui" else keymap.official_text_encoder
    return table(config.tap, config.num_file_layers)


def _readable_keys(path: Path) -> frozenset[str]:
    if not path.exists():
        raise CheckpointError(f"{path} is not there; choose a file or folder that is")
    check_file_name(path)
    keys = read_keys(path)
    refuse_unsupported(keys, path)
    return keys


def _naming(
    keys: frozenset[str], markers: Mapping[str, str], prefixes: tuple[str, ...], path: Path, what: str
) -> tuple[str, str]:
    """Which naming, behind which prefix. Raises CheckpointError for none or two."""
    found = [
        (naming, prefix) for naming, marker in markers.items() for prefix in prefixes if f"{prefix}{marker}" in keys
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{path} has the names of {' and of '.join(name for name, _ in found)}; take one of them")
    raise CheckpointError(
        f"{path} is not {what}: it has none of {', '.join(markers.values())}, also not behind "
        f"{', '.join(prefix for prefix in prefixes if prefix) or 'a prefix'}; choose another file"
    )


def _agreed(layout: Layout, asked: str, path: Path) -> Layout:
    if asked not in ("auto", layout.name):
        raise CheckpointError(
            f"layout={asked} was asked for, and the names in {path} are those of {layout.describe()}; use layout=auto"
        )
    return layout


def _one_of(names: tuple[str, ...], layout: Layout, path: Path) -> Layout:
    if layout.name not in names:
        raise CheckpointError(
            f"layout={layout.name} was asked for, and {path} has official names; use {' or '.join(names)}, or auto"
        )
    return layout


def _is_official_folder(path: Path) -> bool:
    """Shards beside the release's config; one file there may be a converted one."""
    config = path / "config.json"
    sharded = any(path.glob("*.safetensors.index.json"))
    return sharded and config.is_file() and read_json(config).get("_class_name") == CLASS_NAME


def _heads(config: DiTConfig) -> tuple[int, int]:
    return config.num_attention_heads, config.attention_head_dim


def _some_qkv(path: Path, prefix: str) -> list[tuple[str, TensorEntry]]:
    """Keys and entries of the first, the middle and the last block."""
    entries = read_entries(path, lambda key: _QKV.fullmatch(key.removeprefix(prefix)) is not None)
    blocks = sorted(entries, key=lambda key: int(key.removeprefix(prefix).split(".")[1]))
    chosen = sorted({0, len(blocks) // 2, len(blocks) - 1})
    return [(blocks[i], entries[blocks[i]]) for i in chosen]
