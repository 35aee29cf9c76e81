import pytest
import torch
from torch.nn import functional as F

from comfyui_h3.kernels.dispatch import backend
from comfyui_h3.kernels.split_half import join_ref
from comfyui_h3.kernels.split_rows import pixel_rows, pixel_weight, strided_rows

HALVES = 2.0**-22  # of the largest value


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(1, 2, 2, 32), (3, 6, 4, 64), (2, 10, 34, 128)])
def test_strided_rows_hold_the_pixel_behind_every_tap(shape, device, generator):
    x = torch.randn(*shape, device=device, generator=generator)
    num_frames, height, width, _ = shape
    with backend("triton"):
        rows = strided_rows(x, 2)
    assert (rows.height, rows.width, rows.taps, rows.num_frames) == (height // 2, width // 2, 27, num_frames)
    padded = F.pad(x.movedim(-1, 1), (0, 1, 0, 1), mode="reflect").movedim(1, -1)
    values = join_ref(rows.rows, rows.bound).unflatten(0, (num_frames, -1))
    pixels = torch.arange(height // 2)[:, None] * rows.row_width + torch.arange(width // 2)
    for dy in range(3):
        for dx in range(3):
            read = values[:, pixels + rows.tap_rows(dy, dx)]
            wanted = padded[:, dy::2, dx::2][:, : height // 2, : width // 2]
            assert (read - wanted).abs().max() <= HALVES * x.abs().max()


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(1, 3, 1, 2, 2), (2, 3, 4, 5, 7), (1, 1, 2, 6, 9)])
def test_pixel_rows_hold_the_window_of_every_pixel(shape, device, generator):
    x = torch.randn(*shape, device=device, generator=generator)
    with backend("triton"):
        rows = pixel_rows(x, 2)
    with backend("torch"):
        wanted = pixel_rows(x, 2)
    assert torch.equal(rows.rows, wanted.rows)
    padded = F.pad(F.pad(x, (1, 1, 1, 1, 0, 0), mode="reflect"), (0, 0, 0, 0, 2, 0))
    values = join_ref(rows.rows, rows.bound).unflatten(0, (shape[0], *shape[2:]))
    window = padded[-1, :, -3:, -3:, -3:]  # of the last pixel of the last frame
    own = values[-1, -1, -1, -1]
    assert (own[: 27 * shape[1]].unflatten(0, (3, 3, 3, -1)).movedim(-1, 0) - window).abs().max() <= HALVES * 8
    assert not own[27 * shape[1] :].any()


def test_pixel_weight_has_the_order_of_the_rows(generator):
    weight = torch.randn(4, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    split = pixel_weight(weight, 2)
    assert split.rows.shape == (2, 4, 128)
    joined = join_ref(split.rows, split.bound[:, None])
    torch.testing.assert_close(joined[2, ((1 * 3 + 2) * 3 + 0) * 3 + 1], weight[2, 1, 1, 2, 0], rtol=2**-20, atol=0)
    assert not joined[:, 81:].any()


@pytest.mark.triton
@pytest.mark.parametrize("unit", [0.0, 1e-6, 1e4])
def test_the_scale_follows_the_values(unit, device, generator):
    x = unit * torch.randn(1, 4, 4, 32, device=device, generator=generator)
    with backend("triton"):
        rows = strided_rows(x, 2)
    assert rows.rows.isfinite().all()
    assert torch.equal(rows.bound, x.abs().max())
    values = join_ref(rows.rows, rows.bound)
    assert (values[0] - x[0, 0, 0]).abs().max() <= HALVES * unit * 4
