"""What is found again, what is not, and how much is kept."""

import pytest
import torch

from comfyui_h3.h3core.result_cache import ResultCache, key_of


def counting(value, calls):
    def make():
        calls.append(value)
        return (torch.full((256,), float(value)),)  # 1 KiB

    return make


def test_result_is_made_once():
    cache, calls = ResultCache(1 << 20), []
    first = cache.get("a", counting(1, calls))
    assert cache.get("a", counting(2, calls)) is first
    assert calls == [1]


def test_longest_unused_leaves():
    cache, calls = ResultCache(2 << 10), []
    for key in ("a", "b", "a", "c"):
        cache.get(key, counting(key == "b", calls))
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)
    assert cache.num_bytes == 2 << 10


def test_result_larger_than_the_cache_is_given_all_the_same():
    cache = ResultCache(10)
    assert cache.get("a", counting(1, []))[0].sum() == 256
    cache.get("b", counting(2, []))
    assert "a" not in cache


def test_what_raises_is_not_kept():
    cache = ResultCache(1 << 20)

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get("a", fail)
    assert "a" not in cache


def test_key_knows_bytes_shape_and_dtype():
    pixels = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    keys = [
        key_of(pixels),
        key_of(pixels.view(4, 3, 2)),
        key_of(pixels.view(torch.int8)),
        key_of(pixels.flip(0)),
        key_of(pixels, "x"),
        key_of(pixels.view(torch.uint8)[:1], pixels[1:]),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(pixels, "x", [1]) == key_of(pixels.clone(), "x", [1])
    assert key_of(pixels.movedim(0, -1)) == key_of(pixels.movedim(0, -1).contiguous())
