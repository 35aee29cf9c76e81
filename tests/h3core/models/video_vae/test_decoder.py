"""The decoding half of the video VAE: names, dtypes, streaming, cancelling, memory."""

import copy
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comfyui_h3.h3core.errors import H3Error
from comfyui_h3.h3core.models.video_vae.config import VideoVAEConfig
from comfyui_h3.h3core.models.video_vae.decoder import VideoDecoder, decode, denormalize_latents, to_unit_range
from comfyui_h3.h3core.models.video_vae.tiling import num_frames
from comfyui_h3.h3core.models.video_vae.vit import Attention, FeedForward, rotary_table
from comfyui_h3.h3core.tiny import configs
from comfyui_h3.kernels.normed_attention import normed_attention_ref
from comfyui_h3.tests.oracle.vae_oracle import randomize, tiny_video_config


@pytest.fixture(scope="module")
def decoder():
    """2 x 2 latents a tile, so that a few latents are several tiles."""
    model = VideoDecoder(tiny_video_config(tile_size=32, tile_overlap=16))
    randomize(model, 0)
    return model


def latents(num_tokens, height=3, width=4, seed=0):
    return torch.randn(24, num_tokens, height, width, generator=torch.Generator().manual_seed(seed))


def whole(decoder, z, **kwargs):
    return torch.cat(list(decode(decoder, z, **kwargs)), dim=1)


def full_size_config():
    vit = {**configs.VIDEO_VAE_SOURCE["vit_decoder_kwargs"], "heads": 32, "dim_head": 64, "num_layers": 36}
    sizes = {"ch": 128, "ch_mult": [1, 2, 2, 4, 4, 8], "num_res_blocks": 2, "vit_decoder_kwargs": vit}
    return VideoVAEConfig.from_dicts(configs.VIDEO_VAE, configs.VIDEO_VAE_SOURCE | sizes)


def released_decoder_shapes():
    shapes = {
        "post_quant_conv.weight": (24, 24, 1, 1, 1),
        "post_quant_conv.bias": (24,),
        "decoder.register_tokens": (1, 4, 2048),
        "decoder.mask_token": (1, 1, 2048),
        "decoder.x_embedder.weight": (2048, 24),
        "decoder.x_embedder.bias": (2048,),
        "decoder.norm_out.weight": (2048,),
        "decoder.norm_out.bias": (2048,),
        "decoder.proj_out.weight": (3072, 2048),
        "decoder.proj_out.bias": (3072,),
    }
    for i in range(36):
        prefix = f"decoder.transformer_blocks.{i}."
        shapes |= {prefix + name: (2048,) for name in ("norm1.weight", "norm2.weight", "scale1", "scale2")}
        for name, rows, columns in (
            ("attn.to_qkv", 6144, 2048),
            ("attn.to_out", 2048, 2048),
            ("ff.w1", 16384, 2048),
            ("ff.w2", 2048, 8192),
        ):
            shapes |= {f"{prefix}{name}.weight": (rows, columns), f"{prefix}{name}.bias": (rows,)}
    return shapes


def test_full_size_tensors_are_those_of_the_release():
    with torch.device("meta"):
        state = VideoDecoder(full_size_config()).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == released_decoder_shapes()
    assert all(tensor.dtype == torch.float32 and tensor.is_meta for tensor in state.values())
    assert sum(tensor.numel() for tensor in state.values()) == 2_423_533_144


def test_a_model_built_on_meta_runs_after_its_weights_are_there(decoder):
    with torch.device("meta"):
        built = VideoDecoder(decoder.config)
    built.load_state_dict(decoder.state_dict(), assign=True)
    assert torch.equal(whole(built, latents(7)), whole(decoder, latents(7)))


@pytest.mark.parametrize(
    ("num_tokens", "lengths"), [(1, [1]), (2, [5]), (7, [17, 5]), (9, [17, 13]), (12, [17, 17, 5])]
)
def test_parts_come_when_they_are_final(decoder, num_tokens, lengths):
    parts = list(decode(decoder, latents(num_tokens)))
    assert [tuple(part.shape) for part in parts] == [(3, n, 48, 64) for n in lengths]
    assert sum(lengths) == num_frames(decoder.config, num_tokens)
    assert all(part.dtype == torch.float32 and 0 <= part.min() <= part.max() <= 1 for part in parts)


def test_parts_that_were_given_out_do_not_change_later(decoder):
    parts, copies = [], []
    for part in decode(decoder, latents(12)):
        parts.append(part)
        copies.append(part.clone())
    assert all(map(torch.equal, parts, copies))


def test_a_single_latent_frame_is_the_last_frame_of_its_window(decoder):
    z = latents(1, height=2, width=2)
    with torch.no_grad():
        clip = decoder(denormalize_latents(decoder.config, z)[None])[0]
    assert clip.shape == (3, 4, 32, 32)
    assert torch.equal(whole(decoder, z), to_unit_range(clip[:, -1:]))


def test_two_latent_frames_are_the_start_of_seven(decoder):
    z = latents(2)
    repeated = torch.cat([z, z[:, -1:].expand(-1, 5, -1, -1)], dim=1)
    assert torch.equal(whole(decoder, z), whole(decoder, repeated)[:, :5])


@pytest.mark.parametrize("tile_batch", [2, 5, 100])
def test_tiles_in_batches_give_the_same_picture(decoder, tile_batch):
    z = latents(12, height=4, width=5)
    torch.testing.assert_close(whole(decoder, z, tile_batch=tile_batch), whole(decoder, z), rtol=0, atol=2e-6)


def test_progress_counts_the_tiles_of_all_chunks_from_zero(decoder):
    calls = []
    whole(decoder, latents(12), tile_batch=4, on_tile=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 12) for done in (0, 4, 8, 12)]  # 2 x 3 tiles, 2 chunks: a batch may hold tiles of both


class Cancelled(BaseException):
    """As a host's interrupt: not an Exception."""


def test_cancelling_between_tiles_reaches_the_caller_and_leaves_nothing_behind(decoder):
    z = latents(12)
    wanted = whole(decoder, z)

    def cancel(done, total):
        if done == 8:
            raise Cancelled

    parts = decode(decoder, z, on_tile=cancel)
    assert next(parts).shape[1] == 17
    with pytest.raises(Cancelled):
        next(parts)
    assert list(parts) == []
    assert torch.equal(whole(decoder, z), wanted)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_name_the_chunk(decoder, value):
    z = latents(12)
    z[3, 9, 1, 2] = value
    parts = decode(decoder, z)
    assert next(parts).isfinite().all()
    with pytest.raises(H3Error, match="chunk 2 of 2"):
        next(parts)


def test_impossible_latents_are_refused_before_the_first_part(decoder):
    for shape in ((24, 7, 3), (16, 7, 3, 4), (24, 0, 3, 4)):
        with pytest.raises(ValueError, match="latents must be"):
            decode(decoder, torch.zeros(shape))


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors alive at the same time, at most."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def test_memory_does_not_grow_with_the_number_of_frames(decoder):
    peaks = []
    for num_tokens in (12, 62):  # 39 and 209 frames; the first has a neighbour in time already
        z = latents(num_tokens, height=4, width=4)
        with PeakMemory() as memory:
            for part in decode(decoder, z):
                del part
        peaks.append(memory.peak - 2 * z.nbytes)  # the latents and their denormalised copy
    frame = 3 * 64 * 64 * 4
    assert peaks[0] > 28 * frame, "the canvas was not seen"
    assert peaks[1] < 1.02 * peaks[0]


def test_a_constant_latent_decodes_every_window_alike(decoder):
    z = latents(1).expand(-1, 17, -1, -1)
    first, second, third, last = (part for part in decode(decoder, z))
    assert torch.equal(first[:, 5:], second[:, 5:])
    assert torch.equal(second, third)
    # A window's first 5 frames fade from the 5 frames in which the window before ends.
    assert torch.equal(second[:, 0], last[:, 0])
    lower = torch.minimum(first[:, :5], last) - 1e-6
    upper = torch.maximum(first[:, :5], last) + 1e-6
    assert ((lower <= second[:, :5]) & (second[:, :5] <= upper)).all()


def test_tiles_leave_no_trace_where_the_decoder_does_not_look_around():
    model = VideoDecoder(tiny_video_config(tile_size=64, tile_overlap=16))
    randomize(model, 0)
    with torch.no_grad():  # without its blocks every token is decoded alone, wherever it is
        for block in model.decoder.transformer_blocks:
            block.scale1.zero_()
            block.scale2.zero_()
        z = latents(7, height=6, width=11)
        untiled = to_unit_range(model(denormalize_latents(model.config, z)[None])[0])
    pixels = whole(model, z)
    torch.testing.assert_close(pixels[:, :17], untiled[:, 3:20], rtol=0, atol=1e-6)
    torch.testing.assert_close(pixels[:, 17:], untiled[:, 23:28], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(256, 64), (64, 16)])
def test_no_seam_stands_out_at_the_tiles(size):
    tile, overlap = size
    model = VideoDecoder(tiny_video_config(tile_size=tile, tile_overlap=overlap))
    randomize(model, 0)
    unit = tile // 16
    coarse = torch.randn(1, 24, 2, 4, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=(unit, 11 * unit // 4), mode="bilinear", align_corners=True)
    pixels = whole(model, smooth[0][:, None].expand(-1, 3, -1, -1))  # 4 tiles in a row
    step = pixels.diff(dim=-1).abs().mean(dim=(0, 1, 2))  # step[x - 1]: into column x
    plan_starts = {256: (144, 288, 448), 64: (32, 64, 112)}[tile]
    columns = range(16, pixels.shape[-1], 16)
    at_starts = torch.stack([step[x - 1] for x in columns if x in plan_starts]).mean()
    elsewhere = torch.stack([step[x - 1] for x in columns if x not in plan_starts]).mean()
    assert at_starts < 1.05 * elsewhere


def test_half_precision_is_near_fp32():
    model = VideoDecoder(tiny_video_config())
    randomize(model, 0)
    z = torch.randn(1, 24, 7, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(z)
        half = model.to_compute_dtype(torch.float16)(z)
        assert half.dtype == torch.float32
        error = (half - exact).abs() / exact.std()
        assert 0 < error.max() < 1e-2 / 1.3
        assert error.mean() < 1e-3 / 1.3
        randomize(model.to_compute_dtype(torch.float32), 0)
        coarse = (model.to_compute_dtype(torch.bfloat16)(z) - exact).abs() / exact.std()
        assert error.mean() < coarse.mean() < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fp32_on_a_gpu_is_fp32(decoder):
    # Convolutions are TF32 on a GPU unless told otherwise: 1e-3 instead.
    z = latents(12)
    pixels = whole(copy.deepcopy(decoder).cuda(), z).cpu()
    torch.testing.assert_close(pixels, whole(decoder, z), rtol=0, atol=1e-5)


def test_only_the_block_products_and_the_first_convolution_become_half():
    with torch.device("meta"):
        model = VideoDecoder(full_size_config()).to_compute_dtype(torch.float16)
    state = model.state_dict()
    half = {name for name, tensor in state.items() if tensor.dtype == torch.float16}
    products = (".attn.to_qkv.", ".attn.to_out.", ".ff.w1.", ".ff.w2.")
    assert half == {n for n in state if n.startswith("post_quant_conv.") or any(p in n for p in products)}
    with pytest.raises(ValueError, match="float16"):
        model.to_compute_dtype(torch.float64)


def test_rounding_points_of_half_precision():
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def attend(q, k, v):
        seen["attention"] = q.dtype, k.dtype, v.dtype
        return normed_attention_ref(q, k, v)

    model = VideoDecoder(tiny_video_config(), attend)
    randomize(model, 0)
    model.to_compute_dtype(torch.float16)

    def watch(name):
        def hook(module, args, output):
            seen[name] = args[0].dtype, output.dtype

        return hook

    block = model.decoder.transformer_blocks[0]
    for name in ("attn", "ff"):
        getattr(block, name).register_forward_hook(watch(name))
    for name in ("x_embedder", "norm_out"):
        getattr(model.decoder, name).register_forward_hook(watch(name))
    model.post_quant_conv.register_forward_hook(watch("post_quant_conv"))
    block.register_forward_hook(watch("block"))
    with torch.no_grad():
        assert model(torch.randn(1, 24, 7, 2, 2)).dtype == torch.float32
    single, half = torch.float32, torch.float16
    assert seen == {
        "post_quant_conv": (half, half),
        "x_embedder": (single, single),
        "attn": (half, half),
        "attention": (half, half, half),
        "ff": (half, half),
        "block": (single, half),  # the residual, and what is still to be added to it
        "norm_out": (single, single),
    }


def test_positions_run_over_the_tile_and_the_suffix_is_not_rotated():
    cos, sin = rotary_table((7, 2, 3), 5, 48, 100.0, torch.float32, torch.device("cpu"))
    assert cos.shape == sin.shape == (7 * 2 * 3 + 5, 24)
    assert (cos[-5:] == 1).all()
    assert (sin[-5:] == 0).all()
    t, y, x, freq = 6, 1, 0, 3
    row = (t * 2 + y) * 3 + x
    for axis, (index, length) in enumerate(((t, 7), (y, 2), (x, 3))):
        angle = 2 * math.pi * (2 * (index + 0.5) / length - 1) * 100 ** (-freq / 8)
        assert sin[row, 8 * axis + freq].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_positions_are_rounded_to_fp16_in_the_fp16_flow():
    cos, _ = rotary_table((7, 16, 16), 5, 48, 100.0, torch.float16, torch.device("cpu"))
    position = torch.tensor(0.5).half()
    for step in (lambda p: p / 7, lambda p: p * 2, lambda p: p - 1, lambda p: p * (2 * math.pi)):
        position = step(position.double()).half()
    assert cos.dtype == torch.float16
    assert cos[0, 0] == position.float().cos().half()
    exact, _ = rotary_table((7, 16, 16), 5, 48, 100.0, torch.bfloat16, torch.device("cpu"))
    assert exact[0, 0] == torch.tensor(2 * math.pi * (1 / 7 - 1)).cos().bfloat16()


def test_fp16_positions_do_not_depend_on_how_a_device_divides():
    for length in range(1, 17):
        index = torch.arange(0.5, length, dtype=torch.float16)
        reciprocal = (index.float() * (1 / torch.tensor(float(length)))).half()  # as a GPU divides by a number
        assert torch.equal(index / length, reciprocal)


def test_rows_of_qkv_are_interleaved_per_head():
    config = tiny_video_config()
    seen = []

    def attend(q, k, v):
        seen.append(v)
        return v

    attention = Attention(config, attend)
    randomize(attention, 0)
    x = torch.randn(1, 4, 32)
    cos, sin = torch.ones(4, 6), torch.zeros(4, 6)
    with torch.no_grad():
        attention(x, cos, sin)
        product = attention.to_qkv(x)
    assert torch.equal(seen[0][:, :, 1], product[..., 48 + 32 : 96])  # v of head 1


def test_the_first_half_of_w1_is_the_gate():
    config = tiny_video_config()
    ff = FeedForward(config)
    with torch.no_grad():
        ff.w1.bias.zero_()
        ff.w2.bias.zero_()
        ff.w1.weight[:128] = 0  # gate 0: silu(0) * value = 0
        assert (ff(torch.randn(1, 3, 32)) == 0).all()


def test_pixels_undo_the_imagenet_normalisation_and_keep_nan():
    value = (torch.tensor([0.5, 0.25, 1.5]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    pixels = to_unit_range(value.view(3, 1, 1, 1)).flatten()
    torch.testing.assert_close(pixels, torch.tensor([0.5, 0.25, 1.0]), rtol=0, atol=1e-6)
    assert to_unit_range(torch.full((3, 1, 1, 1), math.nan)).isnan().all()
