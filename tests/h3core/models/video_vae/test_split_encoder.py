"""The encoder on float16 halves: as exact as float32, where it runs, and what it does to the module it is made of."""

import dataclasses
import weakref

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.models.precision import exact_fp32
from comfyui_h3.h3core.models.video_vae.encoder import VideoEncoder, encode_moments
from comfyui_h3.h3core.models.video_vae.split_encoder import choose_planes
from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.tests.oracle.vae_oracle import randomize, tiny_video_config
from comfyui_h3.tests.tolerances import relative_error

# The bar for "lossless". Two halves lose 2**-22 of a product, which is what a float32 sum of thousands rounds, too.
SPLIT = 1e-5
# Float16 operands: 2**-11 of each factor, through some 25 convolutions.
HALF = 1e-2


def new_encoder(device):
    model = VideoEncoder(tiny_video_config(tile_size=32, tile_overlap=16)).requires_grad_(False)
    randomize(model, 0)
    return model.to(device)


@pytest.fixture(scope="module")
def encoder(device):
    return new_encoder(device)


def pixels(num_frames, height=32, width=32):
    return torch.rand(3, num_frames, height, width, generator=torch.Generator().manual_seed(0))


def in_float64(encoder, x):
    with torch.no_grad():
        return new_encoder("cpu").double()(x.cpu().double())


@pytest.mark.parametrize(("planes", "tolerance"), [(2, SPLIT), (1, HALF)])
@pytest.mark.parametrize(("batch", "clip", "height", "width"), [(1, 1, 32, 32), (3, 5, 48, 32), (1, 17, 32, 64)])
def test_reference_is_within_tolerance_of_float64(encoder, planes, tolerance, batch, clip, height, width, device):
    x = torch.randn(batch, 3, clip, height, width, device=device)
    with backend("torch"), exact_fp32():
        moments = encoder.split(planes)(x)
    assert relative_error(moments.cpu(), in_float64(encoder, x)) <= tolerance


@pytest.mark.triton
@pytest.mark.parametrize(("batch", "clip"), [(2, 1), (1, 2)])
def test_kernels_are_within_tolerance_of_float64(encoder, batch, clip, device):
    x = torch.randn(batch, 3, clip, 32, 32, device=device)
    with backend("triton"), exact_fp32():
        moments = encoder.split(2)(x)
    assert relative_error(moments.cpu(), in_float64(encoder, x)) <= SPLIT


def test_two_halves_are_as_exact_as_float32(encoder, device):
    x = torch.randn(2, 3, 5, 32, 32, device=device)
    wanted = in_float64(encoder, x)
    with backend("torch"), exact_fp32():
        split, plain = encoder.split(2)(x).cpu(), encoder(x).cpu()
    assert relative_error(split, wanted) <= 2 * relative_error(plain, wanted)


@pytest.mark.parametrize("num_frames", [1, 22])
def test_moments_of_a_medium_equal_those_in_float32(encoder, num_frames):
    video = pixels(num_frames, 48, 80)
    with backend("torch"):
        split = encode_moments(encoder, video, precision="split")
    assert relative_error(split, encode_moments(encoder, video)) <= SPLIT


# The scale of a batch's halves, and with it their last bits, is that of its largest value.
BATCHED = 2e-6


def test_a_tile_hardly_depends_on_its_batch(encoder):
    video = pixels(5, 48, 80)
    with backend("torch"):
        together = encode_moments(encoder, video, precision="split")
        alone = encode_moments(encoder, video, precision="split", tile_batch=1)
    assert relative_error(together, alone) <= BATCHED


@pytest.mark.gpu
@pytest.mark.triton
def test_equal_inputs_give_equal_bits_on_a_gpu(encoder, device):
    x = torch.randn(20, 3, 5, 32, 32, device=device)
    with backend("triton"):
        first, second = encoder.split(2)(x), encoder.split(2)(x)
        alone = torch.cat([encoder.split(2)(x[i : i + 1]) for i in range(20)])
    assert torch.equal(first, second)
    assert relative_error(alone, first) <= BATCHED


def test_auto_is_float32_where_the_kernels_do_not_run_and_for_exact(encoder, device):
    config = encoder.config
    with backend("torch"):
        assert choose_planes("auto", False, config, device) is None
    with backend("triton"):
        assert choose_planes("auto", True, config, device) is None
    assert choose_planes("float32", False, config, device) is None


@pytest.mark.triton
def test_auto_is_split_where_the_kernels_run(encoder, device):
    with backend("triton"):
        assert choose_planes("auto", False, encoder.config, device) == 2
        assert choose_planes("half", False, encoder.config, device) == 1


@pytest.mark.triton
def test_widths_that_the_kernels_lack_are_named(device):
    config = dataclasses.replace(tiny_video_config(), ch=96)
    with pytest.raises(RequestError, match=r"encode_precision=split.*96.*powers of two"):
        choose_planes("split", False, config, device)
    with backend("auto"):
        assert choose_planes("auto", False, config, device) is None


def test_halves_are_made_once_and_are_no_part_of_the_checkpoint(device):
    model = new_encoder(device)
    names = list(model.state_dict())
    assert model.split(2) is model.split(2)
    assert list(model.state_dict()) == names


def test_halves_leave_with_the_module(device):
    """Whoever drops the encoder wants its memory, and no collector of cycles runs before the next allocation."""
    model = new_encoder(device)
    halves = weakref.ref(model.split(2))
    del model
    assert halves() is None
