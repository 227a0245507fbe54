"""A plan: bytes of a region, groups that cover a model, identity of a layout, and the check that guards all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toys import Echo, quiet

from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import CachePlan, Geom, Group, Region, kv_regions, window_groups
from kvlab.engine.sequence import Sampling
from kvlab.errors import InvariantError

GEOM = Geom(L=3, H=4, Hk=2, D=16, windows=(24, None, 24))


def plan(**changes) -> CachePlan:
    regions = kv_regions(GEOM, torch.float16)
    return CachePlan(**{"geom": GEOM, "block": 16, "groups": window_groups(GEOM, regions), **changes})


def test_a_region_counts_the_bytes_of_one_head_and_nothing_is_rounded_up():
    assert Region("k", torch.uint8, (13,)).bytes(5) == 65
    assert Region("s", torch.float16, ()).bytes(5) == 10
    assert Region("z", torch.float16, (13,), "block").bytes(5) == 26
    group = Group((0, 2), (0, 1, 2), (Region("k", torch.uint8, (13,)), Region("z", torch.float16, (13,), "block")))
    assert group.block_bytes(5) == 6 * (65 + 26)


def test_storages_hold_what_the_regions_say_and_block_zero_is_zero():
    regions = (Region("k", torch.uint8, (13,)), Region("z", torch.float16, (13,), "block"))
    arrays = Arrays(regions, 7, layers=2, heads=3, block=5, device=torch.device("cpu"))
    assert arrays.data["k"].shape == (7, 2, 3, 5, 13) and arrays.data["z"].shape == (7, 2, 3, 13)
    assert arrays.nbytes() == 7 * arrays.block_bytes == 7 * 6 * (65 + 26)
    arrays.fill_garbage()
    assert not any(x[0].any() for x in arrays.data.values())
    before = {n: x.clone() for n, x in arrays.data.items()}
    arrays.copy_blocks(torch.tensor([2, 5]), torch.tensor([6, 1]))
    for name, x in arrays.data.items():
        assert torch.equal(x[[6, 1]].view(torch.uint8), before[name][[2, 5]].view(torch.uint8))
        assert torch.equal(x[[2, 3, 4, 5]].view(torch.uint8), before[name][[2, 3, 4, 5]].view(torch.uint8))


def test_rows_of_a_layer_and_head_are_its_blocks_side_by_side():
    regions = (Region("k", torch.uint8, (13,)), Region("z", torch.float16, (13,), "block"))
    arrays = Arrays(regions, 7, layers=2, heads=3, block=5, device=torch.device("cpu"))
    arrays.fill_garbage()
    blocks = torch.arange(7)
    for layer in range(2):
        for head in range(3):
            rows = arrays.row(blocks, 3 * layer + head)
            assert torch.equal(rows, rows[0] + blocks) and torch.equal(arrays.block_of(rows), blocks)
            for name, x in arrays.data.items():
                one = arrays.block_rows[name][rows].view(torch.uint8)
                assert torch.equal(one, x[:, layer, head].flatten(1).view(torch.uint8)), name
            token = (rows[:, None] * 5 + torch.arange(5)).flatten()
            assert torch.equal(arrays.token_rows["k"][token], arrays.data["k"][:, layer, head].flatten(0, 1))


def test_layers_with_the_same_window_share_a_group_and_full_attention_comes_first():
    groups = window_groups(GEOM, kv_regions(GEOM, torch.float16))
    assert [(g.window, g.layers, g.heads) for g in groups] == [(None, (1,), (0, 1)), (24, (0, 2), (0, 1))]


@pytest.mark.parametrize(
    "groups",
    [
        [((0, 1), (0, 1))],  # layer 2 is missing
        [((0, 1, 2), (0,))],  # head 1 is missing
        [((0, 1, 2), (0, 1)), ((1,), (1,))],  # one pair twice
        [((0, 1, 2, 3), (0, 1))],  # a layer too many
    ],
)
def test_groups_that_do_not_cover_every_head_once_are_refused(groups):
    made = tuple(Group(layers, heads, kv_regions(GEOM, torch.float16)) for layers, heads in groups)
    with pytest.raises(ValueError, match="exactly once"):
        plan(groups=made)


def test_heads_that_cannot_be_grouped_and_a_window_without_a_tail_are_refused():
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 kv heads"):
        Geom(L=1, H=5, Hk=2, D=16)
    with pytest.raises(ValueError, match="needs an exact tail"):
        plan(residual=4)


def test_two_layouts_that_mean_different_bytes_never_have_the_same_id():
    """Caches may exchange blocks only when the ids are equal. Fails for each field that is left out of it."""
    fp16 = kv_regions(GEOM, torch.float16)
    one = (Group((0, 1, 2), (0, 1), fp16),)
    others = [
        plan(),
        plan(block=32),
        plan(fingerprint="seed 1"),
        plan(tail=kv_regions(GEOM, torch.float32)),
        plan(tail=kv_regions(GEOM, torch.float32), residual=4),
        plan(groups=window_groups(GEOM, kv_regions(GEOM, torch.bfloat16))),
        plan(groups=one),
        plan(groups=(replace(one[0], window=24),)),
        plan(groups=tuple(Group((i,), (0, 1), fp16) for i in range(3))),
        plan(groups=(replace(one[0], regions=(fp16[1], fp16[0])),)),
        plan(groups=(replace(one[0], regions=(fp16[0], replace(fp16[1], role="metadata"))),)),
        plan(geom=replace(GEOM, model="another")),
        plan(geom=replace(GEOM, H=8)),
        plan(geom=replace(GEOM, dtype=torch.bfloat16)),
    ]
    ids = [p.layout_id for p in others]
    assert len(set(ids)) == len(ids) and {len(i) for i in ids} == {16}
    assert plan().layout_id == ids[0], "the same plan, the same id"


@pytest.mark.parametrize(
    "fault, says",
    [
        (lambda t, row: t.n_slots.__setitem__((row, 0), 3), "slots"),
        (lambda t, row: t.sealed.__setitem__((row, 0), 4), "sealed"),
        (lambda t, row: t.evicted.__setitem__((row, 0), 1), r"\+ 1 evicted != 9"),
        (lambda t, row: t.body.__setitem__((row, 0, 0), 0), "owners"),
        (lambda t, row: t.body.__setitem__((row, 0, 1), t.body[row, 0, 0]), "owners"),
        (lambda t, row: t.n_slots.__setitem__((row + 1, 0), 1), "row 1"),
        (lambda t, row: t.arrays.data["tok"].__setitem__((0, 0, 0, 0), 1), "null block is not zero"),
        (lambda t, row: t.tail_arrays.data["k"].__setitem__((0, 0, 0, 0, 0), 1), "null block is not zero"),
        (lambda t, row: t.tail_pool.incref(int(t.tail[row, 0, 2])), "owners"),
    ],
)
def test_the_check_of_a_cache_finds_every_planted_fault(fault, says):
    """What the random walks stand on (I1-I9)."""
    e = quiet(codec=Echo("block"))
    seq = e.add([1] * 9, Sampling(max_tokens=3))  # two sealed blocks and one exact slot
    e.step()
    e.cache.check({seq.row: 9})
    fault(e.cache.classes[0], seq.row)
    with pytest.raises(InvariantError, match=says):
        e.cache.check({seq.row: 9})
