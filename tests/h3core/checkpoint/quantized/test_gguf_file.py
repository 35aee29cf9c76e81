"""GGUF files hold what their blocks say, are refused by name, and fill a module through the loader."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from comfyui_h3.h3core.checkpoint import loader
from comfyui_h3.h3core.checkpoint.quantized.gguf_file import READ, GgufFile, GgufReader
from comfyui_h3.h3core.errors import CheckpointError
from comfyui_h3.tests.h3core.checkpoint.quantized import gguf_writer

# Of the spread of a weight: what so many bits leave.
ERROR = {"Q2_K": 0.5, "Q3_K": 0.3, "Q4_K": 0.12, "Q5_K": 0.06, "Q6_K": 0.04, "Q4_0": 0.15, "Q4_1": 0.12}


@pytest.fixture
def needs_gguf():
    pytest.importorskip("gguf")


@pytest.fixture
def weight():
    return np.random.default_rng(0).standard_normal((3, 512))


def written(path, weight, kind="Q4_K", name="blocks.0.mlp.fc1.weight", **options):
    content, values = gguf_writer.quantize(kind, weight)
    gguf_writer.write(path, {name: (kind, weight.shape, content)}, **options)
    return torch.from_numpy(values)


@pytest.mark.usefixtures("needs_gguf")
@pytest.mark.parametrize("kind", READ)
def test_values_are_those_of_the_formula(kind, weight, tmp_path):
    expected = written(tmp_path / "a.gguf", weight, kind)
    file = GgufFile.open(tmp_path / "a.gguf")
    tensor = file.tensors["blocks.0.mlp.fc1.weight"]
    assert (tensor.kind, tensor.shape) == (kind, weight.shape)
    values = tensor.dequantize()
    assert values.dtype == torch.float32
    # Scales, codes and their products have 23 bits at most: only the difference of two is rounded.
    assert torch.equal(values, expected.float())
    assert np.abs(values.numpy() - weight).std() < ERROR.get(kind, 0.08)


@pytest.mark.usefixtures("needs_gguf")
@pytest.mark.parametrize("architecture", ["minimax_h3", "wan", ""])
def test_architecture_is_what_the_file_says(architecture, weight, tmp_path):
    written(tmp_path / "a.gguf", weight, architecture=architecture)
    assert GgufFile.open(tmp_path / "a.gguf").architecture == architecture


@pytest.mark.usefixtures("needs_gguf")
def test_folded_tensors_have_their_own_shape(weight, tmp_path):
    name = "visual.patch_embed.proj.weight"
    expected = written(tmp_path / "a.gguf", weight, name=name, shapes={name: (8, 3, 4, 4, 4)})
    file = GgufFile.open(tmp_path / "a.gguf")
    assert file.entries[name].shape == (8, 3, 4, 4, 4)
    assert torch.equal(file.tensors[name].dequantize(), expected.float().reshape(8, 3, 4, 4, 4))


@pytest.mark.usefixtures("needs_gguf")
def test_a_shape_of_another_size_is_refused(weight, tmp_path):
    name = "fc.weight"
    written(tmp_path / "a.gguf", weight, name=name, shapes={name: (8, 3, 4, 4, 5)})
    with pytest.raises(CheckpointError, match=r"fc.weight has the shape \[3, 512\], which is not its orig_shape"):
        GgufFile.open(tmp_path / "a.gguf")


@pytest.mark.usefixtures("needs_gguf")
def test_types_that_are_not_read_are_refused_by_name(tmp_path):
    gguf_writer.write(tmp_path / "a.gguf", {"fc.weight": ("IQ4_NL", (2, 32), bytes(2 * 18))})
    with pytest.raises(CheckpointError, match=r"fc.weight is stored as IQ4_NL; this version reads .*Q4_K"):
        GgufFile.open(tmp_path / "a.gguf")


@pytest.mark.usefixtures("needs_gguf")
def test_files_that_are_cut_short_are_refused_wherever_they_are_cut(weight, tmp_path):
    file = tmp_path / "a.gguf"
    written(file, weight)
    content = file.read_bytes()
    for length in [*range(200), len(content) // 2, len(content) - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut short|is not a GGUF file"):
            GgufFile.open(file)


@pytest.mark.usefixtures("needs_gguf")
def test_tensors_that_share_bytes_are_refused(weight, tmp_path):
    content, _ = gguf_writer.quantize("Q8_0", weight)
    file = tmp_path / "a.gguf"
    gguf_writer.write(file, dict.fromkeys(("first", "second"), ("Q8_0", weight.shape, content)))
    offset = (8).to_bytes(4, "little") + (-(-len(content) // 32) * 32).to_bytes(8, "little")
    assert file.read_bytes().count(offset) == 1
    file.write_bytes(file.read_bytes().replace(offset, offset[:4] + bytes(8)))
    with pytest.raises(CheckpointError, match="second and first share their bytes"):
        GgufFile.open(file)


def test_without_the_package_the_file_is_refused_by_name(weight, tmp_path, monkeypatch):
    written(tmp_path / "a.gguf", weight)
    monkeypatch.setitem(sys.modules, "gguf", None)  # an import of it fails, as where it is not installed
    with pytest.raises(CheckpointError, match=r"a.gguf is a GGUF file.*pip install gguf"):
        GgufFile.open(tmp_path / "a.gguf")


@pytest.mark.usefixtures("needs_gguf")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_is_filled_by_the_loader(dtype, weight, tmp_path):
    content, expected = gguf_writer.quantize("Q4_K", weight)
    bias = np.array([1.0, -2.0, 0.5], dtype="<f4")
    file = tmp_path / "a.gguf"
    gguf_writer.write(file, {"weight": ("Q4_K", weight.shape, content), "bias": ("F32", (3,), bias.tobytes())})
    opened, seen = GgufFile.open(file), []
    module = loader.build(lambda: nn.Linear(512, 3), dtype)
    reader = GgufReader(
        file=opened, names=opened.tensors, device=torch.device("cpu"), on_load=lambda *args: seen.append(args)
    )
    loader.load(module, opened.entries, file, reader)
    assert torch.equal(module.weight, torch.from_numpy(expected).float().to(dtype))
    assert torch.equal(module.bias, torch.from_numpy(bias).to(dtype))
    assert seen[-1] == (len(content) + 12, len(content) + 12)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match="was changed after it was opened"):
        list(reader(["bias"], {"bias": dtype}))
