"""Large pages: what asks for them gets them asked for, and an arena's arrays are copies that share nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlab import hugepages
from kvlab.hugepages import ALIGNED, LARGE, Arena

SMAPS, SETTING = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
linux = pytest.mark.skipif(not (SMAPS.exists() and SETTING.exists()), reason="no transparent huge pages here")


def flags(t: Tensor) -> list[str]:
    """Of the memory area that holds the middle of t."""
    address, inside = t.data_ptr() + t.nbytes // 2, False
    for line in SMAPS.read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            first, end = (int(x, 16) for x in head.split("-"))
            inside = first <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the address is in no area")


@linux
def test_a_large_array_asks_for_large_pages():
    torch.ones(8 * LARGE, dtype=torch.uint8)  # given back at once, on small pages
    out = hugepages.empty((8 * LARGE,), torch.uint8)
    assert "hg" in flags(out) and out.data_ptr() % LARGE == 0


@linux
def test_weights_and_caches_do():
    from kvlab.cache.arrays import Arrays
    from kvlab.cache.layout import Region

    arrays = Arrays((Region("k", torch.float32, (64,)),), 64, 30, 3, 32, torch.device("cpu"))
    assert "hg" in flags(arrays.data["k"])
    assert "hg" in flags(Arena().copy(torch.ones(100)))


def test_more_than_there_is_is_torchs_error():
    with pytest.raises(RuntimeError, match="memory"):
        hugepages.empty((1 << 50,), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_shape_and_type_are_as_asked(dtype):
    for shape in [(), (0,), (3, 5), (LARGE, 2)]:
        out = hugepages.empty(shape, dtype)
        assert out.shape == shape and out.dtype == dtype and out.is_contiguous()
        assert out.untyped_storage().nbytes() == out.nbytes


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.int8, torch.bfloat16]))))
def test_an_arenas_arrays_are_aligned_copies_that_do_not_overlap(wanted):
    """A chunk of 300 bytes: arrays fill it, end it early, and are larger than it."""
    arena, given_, got = Arena(300), [], []
    for i, (n, dtype) in enumerate(wanted):
        given_.append(torch.full((n, 3), i % 100, dtype=dtype).T)
        got.append(arena.copy(given_[-1]))
    for x, y in zip(given_, got):
        assert torch.equal(x, y) and y.dtype == x.dtype and y.is_contiguous()
        assert not y.numel() or y.data_ptr() % ALIGNED == 0
