"""Files of quantised linears, read into the DiT through the loader."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_h3.h3core.checkpoint.index import read_header
from comfyui_h3.h3core.checkpoint.keymap import KeyMap, stack_qkv
from comfyui_h3.h3core.checkpoint.loader import Reader, build
from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.checkpoint.quantized.reading import load_quantized, open_quantized
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.h3core.models.dit.inputs import PLAIN, ops_before
from comfyui_h3.h3core.models.dit.model import DiT
from comfyui_h3.h3core.models.fp8_linear import Fp8Linear, multiplies_fp8
from comfyui_h3.kernels.quantize_fp8 import quantize_fp8_ref
from comfyui_h3.tests.h3core.checkpoint.quantized import writers

CPU = torch.device("cpu")
LINEARS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


@pytest.fixture(scope="module")
def checkpoint(tiny_h3):
    return Checkpoint.open(tiny_h3, "fl2va")


@pytest.fixture(scope="module")
def state(checkpoint):
    """Weights of the tiny DiT as a ComfyUI file has them: qkv stacked."""
    return {name: tensor.clone() for name, tensor in checkpoint.load_dit(CPU, torch.bfloat16).state_dict().items()}


@pytest.fixture
def written(state, tmp_path):
    """Writes the tiny DiT, each linear of its blocks by ``write(name, weight)`` -> tensors by role, weight, options;
    gives the file and the weights that it stands for."""

    def written(write):
        stored, expected = dict(state), dict(state)
        for name in [name for name in state if name.startswith("blocks.") and name[9:-7] in LINEARS]:
            linear = name.removesuffix(".weight")
            tensors, expected[name], options = write(linear, state[name].float())
            del stored[name]
            stored |= {f"{linear}.{role}": tensor.clone().contiguous() for role, tensor in tensors.items()}
            stored[f"{linear}.comfy_quant"] = writers.marker(**options)
        file = tmp_path / "dit.safetensors"
        save_file(stored, file)
        return file, expected

    return written


def read(checkpoint, file, dtype, order=lambda name: None, on_load=None, device=CPU):
    """The DiT in ``dtype``, from ``file``."""
    found = open_quantized(read_header(file), file)
    reader = Reader(entries=found.read_entries(), keymap=KeyMap(), device=device, on_load=on_load)
    dit = build(lambda: DiT(checkpoint.dit_config), dtype)
    for name, tensor in dit.state_dict(keep_vars=True).items():  # what is not read, shows
        assert tensor.is_meta, name
    return load_quantized(dit, found, file, reader, order), found


def fp8(name, weight):
    tensors, expected = writers.fp8_scaled(weight)
    return tensors, expected, {"format": "float8_e4m3fn", "full_precision_matrix_mult": name.endswith("fc2")}


def fp8_by_rows(name, weight):
    tensors, expected = writers.fp8_scaled(weight, per_row=True)
    return tensors, expected, {"format": "float8_e4m3fn"}


def int8(name, weight):
    group = 64 if weight.shape[1] % 64 == 0 else 16
    tensors, expected = writers.int8(weight, group=group)
    return tensors, expected, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}


def nvfp4(name, weight):
    return *writers.nvfp4(weight), {"format": "nvfp4"}


def mxfp8(name, weight):
    return *writers.mxfp8(weight), {"format": "mxfp8"}


@pytest.mark.parametrize("write", [fp8, fp8_by_rows, int8, nvfp4, mxfp8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_formula(write, dtype, written, checkpoint):
    file, expected = written(write)
    seen = []
    dit, found = read(checkpoint, file, dtype, on_load=lambda done, total: seen.append((done, total)))
    assert len(found.linears) == 4 * checkpoint.dit_config.num_layers
    weights = dit.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name].float().to(weight.dtype)), name
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == sum(entry.num_bytes for entry in found.read_entries().values())


@pytest.mark.parametrize("write", [fp8, fp8_by_rows])
def test_e4m3_stays_as_it_is_where_the_linear_is_in_8_bits(write, written, checkpoint):
    file, expected = written(write)
    stored = load_file(file)
    dit, found = read(checkpoint, file, torch.float8_e4m3fn)
    for name in found.linears:
        linear = dit.get_submodule(name.removesuffix(".weight"))
        assert isinstance(linear, Fp8Linear)
        assert torch.equal(linear.weight.view(torch.uint8), stored[name].view(torch.uint8))
        assert linear.weight_scale.shape == (linear.out_features,)
        assert torch.equal(linear.dequantized(), expected[name].float())
    plain = dit.token_refiner.blocks[0].mlp.fc1  # in bfloat16 in the file: quantised as from any other file
    assert torch.equal(plain.weight_scale, quantize_fp8_ref(expected["token_refiner.blocks.0.mlp.fc1.weight"]).scales)


def test_products_in_full_precision_keep_their_rows_in_16_bits(written, checkpoint):
    dit, _ = read(checkpoint, written(fp8)[0], torch.float8_e4m3fn)
    for block in dit.blocks:
        assert block.mlp.fc2.weight_only
        assert ops_before(block.mlp.fc2) is PLAIN
        assert not block.mlp.fc1.weight_only


@pytest.mark.gpu
@pytest.mark.parametrize("write", [fp8, fp8_by_rows, int8, nvfp4, mxfp8])
def test_weights_on_a_gpu_are_those_on_the_cpu(write, written, checkpoint, device):
    file, expected = written(write)
    dit, _ = read(checkpoint, file, torch.float32, device=device)
    for name, weight in dit.state_dict().items():
        assert weight.device.type == device.type
        assert torch.equal(weight.cpu(), expected[name].float()), name


@pytest.mark.gpu
def test_products_of_the_files_e4m3_run_in_8_bits(written, checkpoint, device):
    if not multiplies_fp8(device):
        pytest.skip("this GPU has no e4m3")
    file, expected = written(fp8)
    linear = read(checkpoint, file, torch.float8_e4m3fn, device=device)[0].blocks[0].mlp.fc1
    assert linear.multiplies_fp8
    rows = quantize_fp8_ref(torch.randn(64, linear.in_features, device=device).bfloat16())
    exact = rows.dequantize().double() @ expected["blocks.0.mlp.fc1.weight"].to(device).T
    assert (linear(rows).double() - exact).norm() / exact.norm() < 2**-8  # of the sum, and of bfloat16


def test_other_kinds_are_quantised_again_where_the_linear_is_in_8_bits(written, checkpoint):
    file, expected = written(int8)
    dit, found = read(checkpoint, file, torch.float8_e4m3fn)
    for name in found.linears:
        linear, again = dit.get_submodule(name.removesuffix(".weight")), quantize_fp8_ref(expected[name].bfloat16())
        assert torch.equal(linear.weight.view(torch.uint8), again.values.view(torch.uint8))
        assert torch.equal(linear.weight_scale, again.scales)


@pytest.mark.parametrize("write", [fp8_by_rows, int8, nvfp4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_scales_follow_rows_that_are_put_in_order(write, dtype, written, checkpoint):
    """A file whose rows of q, k and v take turns, as in the release."""
    config = checkpoint.dit_config
    order = stack_qkv(config.num_attention_heads, config.attention_head_dim)
    file, expected = written(write)
    dit, _ = read(checkpoint, file, dtype, order=lambda name: order if "qkv_proj" in name else None)
    linear = dit.blocks[1].attn.qkv_proj
    weight = order(expected["blocks.1.attn.qkv_proj.weight"])
    assert not torch.equal(weight, expected["blocks.1.attn.qkv_proj.weight"])
    if dtype == torch.bfloat16:
        assert torch.equal(linear.weight, weight.float().bfloat16())
    elif write is fp8_by_rows:
        assert torch.equal(linear.dequantized(), weight.float())
    else:
        assert torch.equal(linear.weight_scale, quantize_fp8_ref(weight.float().bfloat16()).scales)


def test_weights_of_another_size_are_refused_before_they_are_read(written, checkpoint):
    def wide(name, weight):
        tensors, expected = writers.nvfp4(torch.cat([weight, weight], dim=1))
        return tensors, expected, {"format": "nvfp4"}

    file, _ = written(wide)
    progress = []
    with pytest.raises(CheckpointError, match=r"has the shape .* the config wants"):
        read(checkpoint, file, torch.bfloat16, on_load=lambda done, total: progress.append(done))
    assert progress == [0]


def test_markers_are_found_in_the_metadata_of_every_file(tmp_path):
    entries = {}
    for i in range(2):
        tensors, _ = writers.fp8_scaled(torch.ones(16, 16))
        layers = {f"blocks.{i}.fc": {"format": "float8_e4m3fn", "full_precision_matrix_mult": i == 1}}
        file = tmp_path / f"{i}.safetensors"
        metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
        save_file({f"blocks.{i}.fc.{role}": tensor for role, tensor in tensors.items()}, file, metadata)
        entries |= read_header(file)
    found = open_quantized(entries, tmp_path)
    assert [linear.full_precision for linear in found.linears.values()] == [False, True]
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_quantized(entries, tmp_path)
