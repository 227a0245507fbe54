"""Rows and blocks that Triton moves: what torch's index_select and index_copy do (kernels/move.py), bit by bit."""

from __future__ import annotations

import backends
import pytest
import torch
from torch import Tensor

from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Region
from kvlab.kernels import move as torch_move
from kvlab.kernels.triton import move

DEVICE = "cpu" if backends.INTERPRETED else "cuda"
ROWS = [(torch.float16, 64), (torch.bfloat16, 3), (torch.float32, 1), (torch.float16, 1), (torch.int8, 80),
        (torch.uint8, 7), (torch.bool, 5), (torch.float8_e4m3fn, 12), (torch.float32, 3000)]  # fmt: skip


def garbage(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bytes, signalling NaNs included."""
    raw = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=torch.Generator().manual_seed(seed)
    )
    return (raw % 2 if dtype == torch.bool else raw).byte().view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("n", [0, 1, 5, 150])
@pytest.mark.parametrize(("dtype", "width"), ROWS, ids=str)
def test_rows_move_as_if_all_were_read_before_any_is_written(dtype, width, n):
    """Any order, overlaps, one row to many: not what a copy in place does."""
    gen = torch.Generator().manual_seed(n)
    src, dst = torch.randint(0, 200, (n,), generator=gen), torch.randperm(200, generator=gen)[:n]
    want = garbage((200, width), dtype)
    got = want.clone().to(DEVICE)
    torch_move.move_rows(want.view(torch.uint8), src, dst)
    move.move_rows(got, src.to(DEVICE), dst.to(DEVICE))
    assert same(got, want)


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_survivors_of_a_compaction_slide_to_the_front(n):
    """Every row is written over one that another program may still have to read."""
    want = garbage((200, 16), torch.float16)
    got = want.clone().to(DEVICE)
    src = torch.randperm(200, generator=torch.Generator().manual_seed(n))[:n].sort().values
    move.move_rows(got, src.to(DEVICE), torch.arange(n, device=DEVICE))
    assert same(got[:n], want[src]) and same(got[n:], want[n:])


def test_copies_of_blocks_are_those_of_every_region():
    """Codes of more than one chunk of words, scales of a block, odd bytes; other blocks stay."""
    regions = (
        Region("k", torch.uint8, (300,)),
        Region("v", torch.float16, (129,)),
        Region("scale", torch.float32, (), "token"),
        Region("odd", torch.uint8, (3, 5), "block"),
    )
    arrays = Arrays(regions, 9, 2, 3, 16, torch.device("cpu"))
    arrays.fill_garbage()
    src, dst = torch.tensor([3, 8, 3]), torch.tensor([7, 1, 2])
    want = {n: t.clone(memory_format=torch.contiguous_format) for n, t in arrays.data.items()}
    for t in want.values():
        raw = t.flatten(1) if t.dim() > 3 else t.flatten(1)[..., None]
        raw.view(torch.uint8)[dst] = raw.view(torch.uint8)[src]
    for n in (3, 0):
        got = Arrays(regions, 9, 2, 3, 16, torch.device(DEVICE), move)
        for name, t in got.data.items():
            t.copy_(arrays.data[name])
        got.copy_blocks(src[:n].to(DEVICE), dst[:n].to(DEVICE))
        for name, t in got.data.items():
            assert same(t.contiguous(), (want if n else arrays.data)[name].contiguous()), name


def test_rows_are_moved_in_the_widest_words_that_divide_them():
    x = torch.zeros(64, dtype=torch.uint8)
    for width, dtype in ((16, torch.int64), (12, torch.int32), (6, torch.int16), (5, torch.uint8)):
        words = move.as_words(x[: width * 3].view(3, width))
        assert words.dtype == dtype and words.shape == (3, width // dtype.itemsize)
        assert words.data_ptr() == x.data_ptr()
    assert move.as_words(x[4:36].view(2, 16)).dtype == torch.int32, "rows that begin at 4 bytes"
    with pytest.raises(AssertionError, match="dense"):
        move.as_words(x.view(8, 8)[:, :4])


def test_rows_beyond_two_billion_words_are_found():
    """Bytes, so that a word is an address. Fails when a row's place is an int32. Reserved, not touched."""
    width = 4095
    rows = 2**31 // width + 9
    flat = torch.empty(rows, width, dtype=torch.uint8, device=DEVICE)
    flat[-3:] = garbage((3, width), torch.uint8).to(DEVICE)
    flat[1] = 7
    want = flat[-3:].clone()
    at = torch.tensor([rows - 1, rows - 2, rows - 3], device=DEVICE)
    move.move_rows(flat, at, at.flip(0))
    assert same(flat[-3:], want.flip(0))
    move.copy_blocks([flat], at[:1], torch.tensor([1], device=DEVICE))
    move.copy_blocks([flat], at[2:], torch.tensor([rows - 2], device=DEVICE))
    assert same(flat[1], want[0]) and same(flat[rows - 2], want[2])
