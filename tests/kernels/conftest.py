"""What kernel tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fill_empty_with_nan():
    """What ``torch.empty`` allocates holds NaN, so that an element which no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, dtype=torch.bfloat16).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def generator(device):
    return torch.Generator(device).manual_seed(0)
