"""What is quantised is told from the file, or refused with the linear and the kind in the message."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from comfyui_h3.h3core.checkpoint.index import read_header
from comfyui_h3.h3core.checkpoint.quantized.detect import find_quantized
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.tests.h3core.checkpoint.quantized import writers

FP8 = {"format": "float8_e4m3fn"}


@pytest.fixture
def weight():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def find(tmp_path):
    """What is found in a file of these tensors; only markers are read."""

    def find(tensors, metadata=None, config=None):
        file = tmp_path / "model.safetensors"
        save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, file)
        on_disk = load_file(file)

        def read(key):
            assert key.endswith(".comfy_quant")
            return on_disk[key]

        return find_quantized(read_header(file), file, read, metadata=[metadata] if metadata else [], config=config)

    return find


def fp8(weight, name="blocks.0.mlp.fc1", old=False):
    tensors, _ = writers.fp8_scaled(weight)
    scale = "scale_weight" if old else "weight_scale"
    return {f"{name}.weight": tensors["weight"], f"{name}.{scale}": tensors["weight_scale"]}


def test_a_file_of_plain_weights_has_nothing_quantised(weight, find):
    found = find({"blocks.0.mlp.fc1.weight": weight, "blocks.0.norm1.weight": weight[0]})
    assert not found.linears
    assert found.summary() == "not quantised"
    assert found.entries == found.plain == found.stored


def test_markers_beside_the_weight(weight, find):
    plain = {"blocks.0.norm1.weight": weight[0].bfloat16(), "blocks.0.mlp.fc1.bias": weight[:, 0].bfloat16()}
    found = find(
        {
            **fp8(weight),
            "blocks.0.mlp.fc1.comfy_quant": writers.marker(**FP8, full_precision_matrix_mult=True),
            "blocks.0.mlp.fc1.input_scale": torch.tensor(0.5),
            **plain,
        }
    )
    (linear,) = found.linears.values()
    assert (linear.name, linear.KIND, linear.full_precision) == ("blocks.0.mlp.fc1", "fp8_scaled", True)
    assert found.plain.keys() == plain.keys()
    assert found.entries.keys() == {*plain, "blocks.0.mlp.fc1.weight"}
    assert found.entries["blocks.0.mlp.fc1.weight"].shape == (32, 64)
    assert found.read_entries().keys() == {*plain, "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.weight_scale"}
    assert found.summary() == "1 x fp8_scaled"


@pytest.mark.parametrize("in_keys", ["", "model.diffusion_model."])
@pytest.mark.parametrize("in_metadata", ["", "model.diffusion_model."])
def test_markers_in_the_metadata(in_keys, in_metadata, weight, find):
    layers = {f"{in_metadata}blocks.0.mlp.fc1": FP8}
    found = find(fp8(weight, f"{in_keys}blocks.0.mlp.fc1"), {"_quantization_metadata": json.dumps({"layers": layers})})
    assert list(found.linears) == [f"{in_keys}blocks.0.mlp.fc1.weight"]
    assert found.linears[f"{in_keys}blocks.0.mlp.fc1.weight"].full_precision is False


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("full_precision", [False, True])
def test_old_marker_of_the_whole_file(dtype, prefix, full_precision, weight, find):
    found = find(
        {
            **fp8(weight, f"{prefix}blocks.0.mlp.fc1", old=True),
            f"{prefix}blocks.0.mlp.fc1.scale_input": torch.tensor(1.0),
            f"{prefix}scaled_fp8": torch.zeros(2 if full_precision else 0).to(dtype),
        }
    )
    (linear,) = found.linears.values()
    assert linear.KIND == "fp8_scaled"
    assert linear.keys["weight_scale"] == f"{prefix}blocks.0.mlp.fc1.scale_weight"
    assert linear.full_precision == full_precision
    assert not found.plain


def test_old_files_have_scales_of_weights_that_stayed_in_float(weight, find):
    """As converters leave them: the scale counts, and the weight cannot stay in 8 bits."""
    tensors = {"fc.weight": weight.bfloat16(), "fc.scale_weight": torch.tensor(1.0), "scaled_fp8": torch.zeros(0)}
    (linear,) = find(tensors).linears.values()
    tensors = {"weight": tensors["fc.weight"], "weight_scale": torch.tensor(2.0)}
    assert torch.equal(linear.dequantize(tensors), 2 * weight.bfloat16().float())
    assert linear.fp8_rows(tensors) is None


def test_float8_beside_its_scale_needs_no_marker(weight, find):
    assert find(fp8(weight)).summary() == "1 x fp8_scaled"


def test_kinds_may_be_mixed(weight, find):
    int8, _ = writers.int8(weight)
    nvfp4, _ = writers.nvfp4(weight)
    found = find(
        {
            **fp8(weight, "a"),
            **{f"b.{role}": tensor for role, tensor in int8.items()},
            "b.comfy_quant": writers.marker(format="int8_tensorwise"),
            **{f"c.{role}": tensor for role, tensor in nvfp4.items()},
            "c.comfy_quant": writers.marker(format="nvfp4"),
        }
    )
    assert found.summary() == "1 x fp8_scaled, 1 x int8_tensorwise, 1 x nvfp4"


def marked(weight, **options):
    """An FP8 linear "fc" that is marked as ``options`` say."""
    return {**fp8(weight, "fc"), "fc.comfy_quant": writers.marker(**options)}


@pytest.mark.parametrize("kind", ["convrot_w4a4", "asym_w4a8_int8", "int3_of_tomorrow"])
def test_unknown_formats_are_refused_by_name(kind, weight, find):
    with pytest.raises(CheckpointError, match=rf"fc is stored as '{kind}'.*it reads float8_e4m3fn, .*mxfp8"):
        find(marked(weight, format=kind))


@pytest.mark.parametrize("options", [{"convrot": True}, {"params": {"convrot": True}}])
def test_rotations_of_other_kinds_are_refused(options, weight, find):
    """Some converters rotate nvfp4, too, which ComfyUI itself reads as if it were not rotated."""
    nvfp4, _ = writers.nvfp4(weight)
    tensors = {f"fc.{role}": tensor for role, tensor in nvfp4.items()}
    with pytest.raises(CheckpointError, match="fc is stored as 'nvfp4' with convrot"):
        find({**tensors, "fc.comfy_quant": writers.marker(format="nvfp4", **options)})


@pytest.mark.parametrize(
    ("leaf", "dtype", "kind"),
    [
        ("weight_scale_inv", torch.float32, "FP8 in blocks"),
        ("qzeros", torch.int32, "GPTQ or AWQ"),
        ("absmax", torch.float32, "bitsandbytes"),
        ("weight_packed", torch.int32, "compressed-tensors"),
    ],
)
def test_kinds_of_others_are_refused_by_name(leaf, dtype, kind, weight, find):
    with pytest.raises(CheckpointError, match=f"fc is stored as {kind}.*this version does not read"):
        find({"fc.weight": weight.to(torch.float8_e4m3fn), f"fc.{leaf}": torch.zeros(2, 2, dtype=dtype)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_packed_weights_that_nothing_explains_are_refused(dtype, weight, find):
    with pytest.raises(CheckpointError, match=r"fc.weight of .*nothing in the file says how to read it"):
        find({"fc.weight": weight.to(dtype)})


def test_svdquant_of_unknown_order_is_refused(weight, find):
    tensors, _ = writers.svdquant(weight)
    tensors = {f"fc.{role}": tensor for role, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"fc is stored as SVDQuant.*Nunchaku are not read"):
        find(tensors)
    with pytest.raises(CheckpointError, match="svdquant with precision='int4'"):
        find(tensors, config={"quant_method": "svdquant", "precision": "int4"})
    assert find(tensors, config={"quant_method": "svdquant"}).summary() == "1 x svdquant nvfp4"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight_scale": None}, "fc is stored as float8_e4m3fn, but has no weight_scale"),
        ({"fc.weight_scale": torch.ones(3)}, r"fc.weight_scale is float32 \[3\].*\[32, 1\]"),
        ({"fc.weight_scale": torch.ones(32, 2)}, r"fc.weight_scale is float32 \[32, 2\]"),
        ({"fc.weight_scale": torch.ones((), dtype=torch.int32)}, "fc.weight_scale is int32"),
        ({"fc.weight": torch.ones(32, 64, dtype=torch.int8)}, "fc.weight is int8"),
        ({"fc.weight": torch.ones(32, 64)}, "fc.weight is float32"),
        ({"fc.weight": torch.ones(32, 64).to(torch.float8_e5m2)}, "fc.weight is float8_e5m2"),
        ({"fc.weight": torch.ones(32).to(torch.float8_e4m3fn)}, r"fc.weight is float8_e4m3fn \[32\]"),
        ({"fc.weight_zero_point": torch.ones(32)}, "fc has weight_zero_point"),
        ({"fc.comfy_quant": writers.marker()}, "fc is stored as None"),
        ({"fc.comfy_quant": torch.tensor(list(b"{"), dtype=torch.uint8)}, "fc.comfy_quant is not valid JSON"),
        ({"fc.comfy_quant": torch.tensor(list(b"[]"), dtype=torch.uint8)}, "fc.comfy_quant holds list"),
        ({"fc.comfy_quant": torch.zeros(100_000, dtype=torch.uint8)}, "fc.comfy_quant is not JSON in bytes"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message, weight, find):
    tensors = {**marked(weight, **FP8), **change}
    with pytest.raises(CheckpointError, match=message):
        find({key: tensor for key, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize("group", [128, 32, 0, 1024, "256", None])
def test_groups_of_no_rotation_are_refused(group, weight, find):
    int8, _ = writers.int8(weight)
    tensors = {f"fc.{role}": tensor for role, tensor in int8.items()}
    options = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    with pytest.raises(CheckpointError, match="convrot_groupsize"):
        find({**tensors, "fc.comfy_quant": writers.marker(**options)})


def test_rows_of_broken_groups_are_refused(weight, find):
    int8, _ = writers.int8(weight)
    tensors = {f"fc.{role}": tensor for role, tensor in int8.items()}
    with pytest.raises(CheckpointError, match="fc has 64 inputs; int8_tensorwise holds a multiple of 256"):
        find({**tensors, "fc.comfy_quant": writers.marker(format="int8_tensorwise", convrot=True)})


def test_scales_in_another_order_are_refused(weight, find):
    """Block scales that are not in tiles have another shape, unless both sizes are those of whole tiles."""
    nvfp4, _ = writers.nvfp4(weight)
    tensors = {f"fc.{role}": tensor for role, tensor in nvfp4.items()}
    tensors["fc.weight_scale"] = torch.ones(32, 4).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"weight_scale is float8_e4m3fn \[32, 4\].*\[128, 4\]"):
        find({**tensors, "fc.comfy_quant": writers.marker(format="nvfp4")})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "_quantization_metadata is not valid JSON"),
        ("{}", "_quantization_metadata has no layers"),
        ('{"layers": {"gone": {"format": "nvfp4"}}}', "names gone, of which the file has no weight"),
        ('{"layers": {"fc": "nvfp4"}}', "names fc, and says 'nvfp4', not an object"),
        ('{"layers": {"fc": {"format": "nvfp4"}}}', "says .*nvfp4.* of fc, its comfy_quant says .*float8_e4m3fn"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(metadata, message, weight, find):
    with pytest.raises(CheckpointError, match=message):
        find(marked(weight, **FP8), {"_quantization_metadata": metadata})


@pytest.mark.parametrize("marker", [{}, {"model.diffusion_model.scaled_fp8": torch.zeros(0)}])
def test_old_scales_without_their_marker_are_refused(marker, weight, find):
    with pytest.raises(CheckpointError, match="fc has a scale_weight, but no scaled_fp8"):
        find({**fp8(weight, "fc", old=True), **marker})
