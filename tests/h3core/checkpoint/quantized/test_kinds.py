"""What is read of each kind is what its formula says, to the last bit of float32."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_h3.h3core.checkpoint.index import read_header
from comfyui_h3.h3core.checkpoint.quantized import e2m1
from comfyui_h3.h3core.checkpoint.quantized.detect import find_quantized
from comfyui_h3.h3core.checkpoint.quantized.int8 import GROUPS, _hadamard
from comfyui_h3.h3core.checkpoint.quantized.svdquant import quantize_rows
from comfyui_h3.tests.h3core.checkpoint.quantized import writers

SVDQUANT = {"quant_method": "svdquant", "rank": 8, "precision": "nvfp4", "act_unsigned": False}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def random_weight(generator, num_rows, num_inputs):
    """Channels of sizes from 0.01 to 1, as they differ in a trained model."""
    size = torch.logspace(-2, 0, num_rows)[:, None]
    return size * torch.randn(num_rows, num_inputs, generator=generator)


def read_back(tmp_path, tensors, options=None, config=None):
    """The linear "layer" of a file with ``tensors``, and the weight that it is."""
    stored = {f"layer.{role}": tensor for role, tensor in tensors.items()}
    if options:
        stored["layer.comfy_quant"] = writers.marker(**options)
    file = tmp_path / "model.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, file)
    on_disk = load_file(file)
    found = find_quantized(read_header(file), file, on_disk.__getitem__, config=config)
    linear = found.linears["layer.weight"]
    assert not found.plain
    return linear, linear.dequantize({role: on_disk[key] for role, key in linear.keys.items()})


def check(weight, expected, original, error):
    """Bit by bit; and near the weight that was quantised, or the formula would be no more than our own."""
    assert weight.dtype == torch.float32
    assert torch.equal(weight, expected.float())
    assert (weight - original).norm() / original.norm() < error


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float8_e4m3fn, 0.03), (torch.float8_e5m2, 0.06)])
def test_fp8_scaled(per_row, dtype, error, generator, tmp_path):
    original = random_weight(generator, 48, 80)
    tensors, expected = writers.fp8_scaled(original, per_row=per_row, dtype=dtype)
    tensors["input_scale"] = torch.tensor(0.5)  # of the rows, not of the weight
    linear, weight = read_back(tmp_path, tensors, {"format": str(dtype).removeprefix("torch.")})
    check(weight, expected, original, error)
    rows = linear.fp8_rows(tensors)
    assert (rows is None) == (dtype == torch.float8_e5m2)
    assert rows is None or torch.equal(rows.dequantize(), weight)


@pytest.mark.parametrize("per_row", [False, True])
def test_int8(per_row, generator, tmp_path):
    original = random_weight(generator, 48, 80)
    tensors, expected = writers.int8(original, per_row=per_row)
    linear, weight = read_back(tmp_path, tensors, {"format": "int8_tensorwise"})
    check(weight, expected, original, 0.012 if per_row else 0.05)
    assert linear.fp8_rows(tensors) is None


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("group", "options"), [(256, {}), (256, {"convrot_groupsize": 256}), (64, {"convrot_groupsize": 64})]
)
def test_int8_convrot(group, options, nested, generator, tmp_path):
    original = random_weight(generator, 24, 512)
    tensors, expected = writers.int8(original, group=group)
    options = {"convrot": True, **options}
    options = {"params": options} if nested else options
    _, weight = read_back(tmp_path, tensors, {"format": "int8_tensorwise", **options})
    check(weight, expected, original, 0.012)


@pytest.mark.parametrize("size", GROUPS)
def test_rotation_is_symmetric_and_its_own_inverse(size):
    ours = _hadamard(size, torch.device("cpu")).double() / size**0.5
    assert torch.equal(ours, writers.rotation(size))
    assert torch.equal(ours, ours.T)
    assert torch.equal(ours @ ours, torch.eye(size, dtype=torch.float64))


# Whole tiles of scales, a part of one, and more than one in both directions.
TILED = pytest.mark.parametrize(("num_rows", "num_blocks"), [(128, 4), (48, 3), (160, 9)])


@TILED
@pytest.mark.parametrize("as_bytes", [False, True])
def test_nvfp4(num_rows, num_blocks, as_bytes, generator, tmp_path):
    original = random_weight(generator, num_rows, 16 * num_blocks)
    tensors, expected = writers.nvfp4(original)
    if as_bytes:
        tensors["weight_scale"] = tensors["weight_scale"].view(torch.uint8)
    _, weight = read_back(tmp_path, tensors, {"format": "nvfp4"})
    check(weight, expected, original, 0.12)


def test_nvfp4_of_awq_reads_rows_that_were_not_scaled(generator, tmp_path):
    """The file's product has rows times pre_quant_scale; ours has rows as they are, and the same result."""
    original = random_weight(generator, 48, 64)
    scale = 2.0 ** torch.randint(-1, 2, (64,), generator=generator).bfloat16()
    tensors, expected = writers.nvfp4(original / scale.float(), pre_quant_scale=scale)
    _, weight = read_back(tmp_path, tensors, {"format": "nvfp4"})
    check(weight, expected, original, 0.2)


@TILED
@pytest.mark.parametrize("as_bytes", [False, True])
def test_mxfp8(num_rows, num_blocks, as_bytes, generator, tmp_path):
    original = random_weight(generator, num_rows, 32 * num_blocks)
    tensors, expected = writers.mxfp8(original)
    if as_bytes:
        tensors["weight_scale"] = tensors["weight_scale"].view(torch.uint8)
    _, weight = read_back(tmp_path, tensors, {"format": "mxfp8"})
    check(weight, expected, original, 0.04)


def test_mxfp8_has_every_power_of_e8m0(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8).reshape(128, 2)
    tensors = {"weight": torch.ones(128, 64).to(torch.float8_e4m3fn), "weight_scale": writers.in_tiles(codes)}
    _, weight = read_back(tmp_path, tensors, {"format": "mxfp8"})
    powers = weight[:, ::32].flatten()
    assert powers[255].isnan()
    assert torch.equal(powers[:255].double(), 2.0 ** (torch.arange(255, dtype=torch.float64) - 127))


@pytest.mark.parametrize("per_channel", [False, True])
def test_svdquant(per_channel, generator, tmp_path):
    original = random_weight(generator, 48, 96) + torch.randn(48, 2, generator=generator) @ torch.ones(2, 96)
    smooth = (torch.rand(96, generator=generator) + 0.5).bfloat16()
    tensors, expected = writers.svdquant(original, smooth=smooth, per_channel=per_channel)
    _, weight = read_back(tmp_path, tensors, config=SVDQUANT)
    # Nine terms added in float32, where the formula has float64.
    torch.testing.assert_close(weight, expected.float(), rtol=0, atol=float(expected.abs().max()) * 9 * 2**-24)
    assert (weight - original).norm() / original.norm() < 0.1


def test_svdquant_without_low_rank_is_exact(generator, tmp_path):
    tensors, _ = writers.svdquant(random_weight(generator, 48, 96), per_channel=True)
    tensors["proj_up"] = torch.zeros_like(tensors["proj_up"])
    linear, weight = read_back(tmp_path, tensors, config=SVDQUANT)
    low, high = tensors["qweight"].view(torch.uint8) & 15, tensors["qweight"].view(torch.uint8) >> 4
    values = torch.tensor([*writers.E2M1, *-writers.E2M1])
    codes = torch.stack([low, high], dim=-1).flatten(1).long()
    scales = tensors["wscales"].double().T.repeat_interleave(16, dim=1)
    channel = tensors["wtscale"].double() * tensors["wcscales"].double()[:, None]
    assert torch.equal(weight, (values[codes] * scales * channel).float())
    assert torch.equal(linear.base(tensors), weight)


def test_svdquant_product_in_four_bits(generator, tmp_path):
    """The reference of W4A4 against its formula, row by row and block by block."""
    smooth = (torch.rand(32, generator=generator) + 0.5).bfloat16()
    tensors, _ = writers.svdquant(random_weight(generator, 16, 32), rank=4, smooth=smooth)
    linear, _ = read_back(tmp_path, tensors, config=SVDQUANT)
    x = torch.randn(5, 32, generator=generator).bfloat16()
    rows = torch.empty(5, 32, dtype=torch.float64)
    for row in range(5):
        for begin in range(0, 32, 16):
            block = (x[row, begin : begin + 16].float() / smooth[begin : begin + 16].float()).double()
            scale = (block.abs().max() / 6).to(torch.float8_e4m3fn).double()
            rows[row, begin : begin + 16] = writers.nearest_e2m1((block / scale)[None])[1][0] * scale
    down, up = tensors["proj_down"].double(), tensors["proj_up"].double()
    expected = rows @ linear.base(tensors).double().T + x.double() @ down @ up.T
    torch.testing.assert_close(linear.multiply(x, tensors).double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_of_zeros_stay_zeros():
    assert torch.equal(quantize_rows(torch.zeros(2, 32)), torch.zeros(2, 32))


def test_e2m1_rounds_to_the_nearest_and_halves_to_even():
    x = torch.linspace(-8, 8, 16 * 64 + 1)  # every half, and all between
    assert torch.equal(e2m1.nearest(x).double(), writers.nearest_e2m1(x.double())[1])


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "int8", "fp8_scaled"])
def test_comfy_kitchen_reads_the_same_weight(kind, generator, tmp_path):
    """comfy-kitchen, which reads these files in ComfyUI, multiplies in another order: two roundings of float32."""
    kitchen = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    original = random_weight(generator, 160, 512)
    if kind == "nvfp4":
        weight, scale, all_scale = *kitchen.quantize_nvfp4(original, torch.tensor(2e-3)), torch.tensor(2e-3)
        theirs = kitchen.dequantize_nvfp4(weight, all_scale, scale, torch.float32)
        tensors = {"weight": weight, "weight_scale": scale, "weight_scale_2": all_scale}
    elif kind == "mxfp8":
        weight, scale = kitchen.quantize_mxfp8(original)
        theirs, tensors = (
            kitchen.dequantize_mxfp8(weight, scale, torch.float32),
            {"weight": weight, "weight_scale": scale},
        )
    elif kind == "int8":
        weight, scale = kitchen.quantize_int8_convrot_weight(original, 256)
        theirs = kitchen.dequantize_int8_convrot_weight(weight, scale, 256)
        tensors = {"weight": weight, "weight_scale": scale}
    else:
        scale = original.abs().max() / 448
        weight = kitchen.quantize_per_tensor_fp8(original, scale, torch.float8_e4m3fn)
        theirs = kitchen.dequantize_per_tensor_fp8(weight, scale, torch.float32)
        tensors = {"weight": weight, "weight_scale": scale}
    options = {"int8": {"format": "int8_tensorwise", "convrot": True}, "fp8_scaled": {"format": "float8_e4m3fn"}}
    _, ours = read_back(tmp_path, tensors, options.get(kind, {"format": kind}))
    torch.testing.assert_close(ours, theirs, rtol=2**-22, atol=2**-22 * float(original.abs().max()))
