"""The C ABI refuses what it cannot hold with a negative number, and then writes nothing."""

from __future__ import annotations

import ctypes

import numpy as np
import pages
import pytest
import torch
from pages import VARIANTS, Rows

from kvlab.cache.layout import Geom
from kvlab.kernels.cpu.attend import View
from kvlab.kernels.cpu.structs import MAX_LANES, Refused, kv_format, kv_side

SIZE, FORMAT, TABLE, RANGE, SPACE = -1, -2, -3, -4, -5


@pytest.fixture(params=VARIANTS)
def library(request):
    return pages.library(request.param)


@pytest.fixture
def cache():
    return pages.build("int4", Geom(1, 6, 2, 64), 32, [100, 40])


@pytest.fixture
def layers(cache, library):
    return cache.layers(library)


def copy(struct):
    return type(struct).from_buffer_copy(struct)


def side(**changes) -> kv_side:
    return kv_side(**({"kind": 6, "bits": 4, "width": 64, "pack": 64, "axis": 1, "group": 64, "meta": 2} | changes))


def attend(layers, fmt, view, work: int) -> tuple[int, torch.Tensor]:
    """The return code of kv_attend, and everything that it could have written, full of NaN before."""
    q, out = torch.zeros(10, 6, 64), torch.full((10 * 6 * 65 + max(work, 1),), torch.nan)
    lse, scratch = out[10 * 6 * 64 :], out[10 * 6 * 65 :]
    code = layers.lib.kv_attend(
        fmt, view, q.data_ptr(), 64, 384, out.data_ptr(), 64, 384, lse.data_ptr(), 1, 6, 0, scratch.data_ptr(), work, 1
    )
    return code, out


@pytest.mark.parametrize("off", [-8, 8, None])
def test_a_struct_of_another_size_is_refused_by_every_entry(cache, layers, off):
    """What a library of another version would be given."""
    rows = Rows.last([1, 5], [100, 40])
    view = rows.view(cache.table)
    fmt, wrong = layers.formats[0], copy(layers.formats[0])
    wrong.size = 0 if off is None else wrong.size + off
    assert layers.lib.kv_check_format(wrong) == SIZE
    struct = copy(view.struct)
    struct.size = 0 if off is None else struct.size + off
    assert layers.lib.kv_check_view(struct, 32, cache.arrays.n_blocks) == SIZE
    for f, v in ((wrong, view.struct), (fmt, struct)):
        code, out = attend(layers, f, v, 10**4)
        assert code == SIZE and out.isnan().all()
        mass, lse = torch.full((2, 6, 128), torch.nan), torch.zeros(10, 6)
        args = (lse.data_ptr(), 64, 384, lse.data_ptr(), 1, 6, mass.data_ptr(), 128, 1)
        assert layers.lib.kv_mass(f, v, *args) == SIZE and mass.isnan().all()


@pytest.mark.parametrize(
    ("what", "index", "value", "code"),
    [
        ("table", (0, 0, 0), -1, TABLE),
        ("table", (1, 0, 3), 9, TABLE),  # blocks 0..8 exist
        ("table", (1, 0, 3), 2**31 - 1, TABLE),
        ("lo", (0, 0, 0), -1, RANGE),
        ("lo", (1, 0, 4), -(2**31), RANGE),
        ("hi", (0, 0, 0), 129, RANGE),  # four blocks of 32
        ("hi", (1, 0, 4), 2**31 - 1, RANGE),
        ("count", (0,), 6, RANGE),  # the longest sequence has 5 rows
        ("count", (1,), -1, RANGE),
        ("first", (1,), -1, RANGE),
    ],
)
def test_a_view_that_leaves_the_pool_or_its_table_is_refused(cache, layers, what, index, value, code):
    rows = Rows.last([1, 5], [100, 40])
    good = rows.view(cache.table)
    assert layers.lib.kv_check_view(good.struct, 32, cache.arrays.n_blocks) == 0
    arrays = {n: a.copy() for n, a in pages.arrays_of(good).items()}
    arrays[what][index] = value
    bad = View.of(*arrays.values())
    assert layers.lib.kv_check_view(bad.struct, 32, cache.arrays.n_blocks) == code
    q = pages.queries(cache, rows)
    out, lse = torch.full(q.shape, torch.nan), torch.full(q.shape[:2], torch.nan)
    for call in (lambda: layers.attend(0, bad, q.float(), out, lse), lambda: layers.mass(0, bad, q.float(), lse, 128)):
        with pytest.raises(ValueError, match="refused"):
            call()
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("group", [-1, 1, 2**31 - 1])
def test_a_head_whose_table_is_not_in_the_view_is_refused(cache, layers, group):
    """A view of one table for all heads, and a layer whose heads have tables of their own."""
    view = Rows.last([1, 1], [100, 40]).view(cache.table)
    fmt, groups = copy(layers.formats[0]), (ctypes.c_int32 * 2)(0, group)
    fmt.group_of = ctypes.addressof(groups)
    code, out = attend(layers, fmt, view.struct, 10**5)
    assert code == TABLE and out.isnan().all()
    mass, lse = torch.full((2, 6, 128), torch.nan), torch.zeros(10, 6)
    args = (lse.data_ptr(), 64, 384, lse.data_ptr(), 1, 6, mass.data_ptr(), 128, 1)
    assert layers.lib.kv_mass(fmt, view.struct, *args) == TABLE and mass.isnan().all()


@pytest.mark.parametrize("wrong", [lambda q: q.double(), lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)])
def test_tensors_that_are_no_dense_float32_rows_are_refused(cache, layers, wrong):
    rows = Rows.last([1, 1], [100, 40])
    q = pages.queries(cache, rows).float()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    for args in ((wrong(q), out, lse), (q, wrong(out), lse), (q, out, lse.double())):
        with pytest.raises(AssertionError, match="float32"):
            layers.attend(0, rows.view(cache.table), *args)
    with pytest.raises(AssertionError, match="float32"):
        layers.append(0, wrong(q), q, torch.zeros(12, dtype=torch.int64))


def test_what_rows_beyond_a_sequences_count_say_does_not_matter(cache, layers):
    view = Rows.last([1, 5], [100, 40]).view(cache.table)
    seen = pages.arrays_of(view)
    assert seen["lo"][0, 0, 1] < 0 and seen["hi"][0, 0, 1] > 10**6, "Rows.last no longer puts nonsense there"
    assert layers.lib.kv_check_view(view.struct, 32, cache.arrays.n_blocks) == 0


def test_sources_of_other_rows_are_refused_together(cache, layers):
    """What is read together belongs to the same rows; fails when the second view is taken as it is."""
    rows = Rows.last([1, 5], [100, 40])
    good = rows.view(cache.table)
    need = 2 * layers.lib.kv_workspace(layers.formats[0], good.struct)
    q, out, lse = torch.zeros(6, 6, 64), torch.full((6, 6, 64), torch.nan), torch.full((6, 6), torch.nan)
    work = torch.empty(need)

    def both(view, fmt=layers.formats[0], n=2, room=need) -> int:
        source = [ctypes.addressof(x) for x in (layers.formats[0], good.struct, fmt, view.struct)]
        return layers.lib.kv_attend_all(
            (ctypes.c_void_p * 4)(*source), n, q.data_ptr(), 64, 384, out.data_ptr(), 64, 384, lse.data_ptr(), 1, 6, 0,
            work.data_ptr(), room, 1,
        )  # fmt: skip

    other, wide = copy(layers.formats[0]), copy(layers.formats[0])
    other.heads, wide.size = 1, 8
    short = Rows.last([1, 4], [100, 40]).view(cache.table)
    later = View.of(*(pages.arrays_of(good) | {"first": np.array([0, 2])}).values())
    fewer = View.of(*(pages.arrays_of(good) | {"count": np.array([1, 4])}).values())
    one = Rows.last([1], [100]).view(cache.table[:1])
    assert {both(v) for v in (short, later, fewer, one)} == {RANGE} and both(good, other) == RANGE
    assert {both(good, n=0), both(good, n=3)} == {RANGE}
    assert (both(good, wide), both(good, room=need - 1)) == (SIZE, SPACE)
    assert out.isnan().all() and lse.isnan().all()
    assert both(good) == 0 and not out.isnan().any()


@pytest.mark.parametrize("short", [1, 10**6])
def test_too_little_scratch_is_refused(cache, layers, short):
    view = Rows.last([1, 1], [100, 40]).view(cache.table)
    need = layers.lib.kv_workspace(layers.formats[0], view.struct)
    assert need > 0
    code, out = attend(layers, layers.formats[0], view.struct, max(need - short, 0))
    assert code == SPACE and out.isnan().all()
    code, out = attend(layers, layers.formats[0], view.struct, need)
    assert code == 0 and not out[: 2 * 6 * 64].isnan().any()


WRONG = {  # of a side of codes
    "bits": [0, 9, -1], "width": [0, -64, 72, 1024], "pack": [0, 4, 48, -8], "kind": [-1, 8], "axis": [-1, 3],
    "group": [0, -1, 48], "meta": [-1, 3], "slots": [0, 65], "codes": [None], "scale": [None], "channel": [None],
    "row_bytes": [0, -1, 31],
}  # fmt: skip


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize(("name", "value"), [(n, x) for n, xs in WRONG.items() for x in xs])
def test_a_side_that_cannot_be_is_refused(layers, name, value, which):
    """Fails when a check of one field is missing: a wrong number would then be an address."""
    fmt: kv_format = copy(layers.formats[0])
    assert layers.lib.kv_check_format(fmt) == 0
    setattr(fmt.k[0] if which == "k" else fmt.v, name, value)
    assert layers.lib.kv_check_format(fmt) == FORMAT


@pytest.mark.parametrize(
    ("name", "value"),
    [("heads", 0), ("group", 0), ("block", 8), ("block", 0), ("block", 40), ("keys", 0), ("keys", 3), ("dim", 0),
     ("dim", 80), ("group_of", None), ("offset", None)],
)  # fmt: skip
def test_a_format_that_cannot_be_is_refused(layers, name, value):
    fmt = copy(layers.formats[0])
    setattr(fmt, name, value)
    assert layers.lib.kv_check_format(fmt) == FORMAT


@pytest.mark.parametrize(
    "changes",
    [{"bits": 0}, {"bits": 9}, {"width": 0}, {"width": -1}, {"width": 513, "pack": 513}, {"pack": 0}, {"pack": 12},
     {"pack": 48}, {"kind": 0, "width": 40}],
)  # fmt: skip
def test_a_side_that_the_kernels_cannot_hold_has_no_slots(library, changes):
    channel = (ctypes.c_int16 * MAX_LANES)(*[77] * MAX_LANES)
    pages.prototypes(library)
    assert library.kv_slots(side(), channel) == 4
    channel[:] = [77] * MAX_LANES
    assert library.kv_slots(side(**changes), channel) < 0
    assert list(channel) == [77] * MAX_LANES


def test_rows_of_eight_codes_in_two_planes_fill_slots(library):
    """Of 512 channels: more than laced units hold, as many as AVX-512's do."""
    channel = (ctypes.c_int16 * MAX_LANES)(*[77] * MAX_LANES)
    pages.prototypes(library)
    slots = library.kv_slots(side(width=512, pack=8, bits=3), channel)
    if pages.isa_of(library) != "avx512":
        assert slots < 0 and list(channel) == [77] * MAX_LANES
        with pytest.raises(Refused, match="more than the kernels hold"):
            pages.build("int4", Geom(1, 2, 1, 512), 32, [20], group=8, bits=3).layers(library)
    else:
        assert slots == 64
        assert sorted(c for c in channel if c >= 0) == list(range(512))


def test_python_names_what_it_cannot_bind(library):
    """The runtime then takes the torch path, with this message in its log."""
    geom = Geom(1, 2, 1, 64)
    with pytest.raises(Refused, match="blocks of 8 tokens"):
        pages.build("int8", geom, 8, [20]).layers(library)
    with pytest.raises(Refused, match="scales over 8 tokens"):
        pages.build("kivi", geom, 32, [20], group=8).layers(library)
    with pytest.raises(Refused, match="rows of 4 codes"):
        pages.build("int4", geom, 32, [20], group=4).layers(library)
    with pytest.raises(Refused, match="40 channels"):
        pages.build("full", Geom(1, 2, 1, 40), 32, [20]).layers(library)


UNWRITTEN = {  # what a layer's keys need to be written, by the method and options of a codec
    "int4": {"fit": [0, 1, 2, 4, 9, -1, 10], "zero": [None], "scale2": [1]},
    "int8": {"fit": [0, 1, 3, 4, 9]},
    "full": {"fit": [0, 2, 3, 4, 9]},
    "turboquant": {"fit": [0, 1, 2, 3, 9, 10], "edges": [None], "scale2": [1]},
}


@pytest.mark.parametrize(
    ("method", "name", "value"), [(m, n, x) for m, w in UNWRITTEN.items() for n in w for x in w[n]]
)
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_the_kernels_do_not_write_is_refused(library, method, which, name, value):
    """Not read as an address, and not guessed: then torch writes it."""
    layers = pages.build(method, Geom(1, 6, 2, 64), 32, [100]).layers(library)
    lib, fmt = layers.lib, copy(layers.formats[0])
    assert lib.kv_writes(fmt) & 1
    setattr(fmt.k[0] if which == "k" else fmt.v, name, value)
    refuses_to_write(layers, fmt)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [(0, "fit", 5), (0, "fit", 9), (0, "edges", None), (1, "fit", 4), (1, "fit", 0), (1, "scale2", None)],
)
@pytest.mark.parametrize("bits", [1, 3])
def test_keys_of_two_parts_are_written_as_codes_and_their_sketch_alone(library, bits, part, name, value):
    layers = pages.build("turboquant", Geom(1, 6, 2, 64), 32, [100], variant="prod", bits_k=bits).layers(library)
    fmt = copy(layers.formats[0])
    assert layers.appends and not layers.seals and layers.lib.kv_writes(fmt) == 1
    if bits == 1 and part == 0:
        fmt.turn = None  # one part alone, the sketch: it needs its matrix
    else:
        setattr(fmt.k[part if bits > 1 else 0], name, value)
    refuses_to_write(layers, fmt)


def refuses_to_write(layers, fmt) -> None:
    before = {n: t.clone() for n, t in layers.bound.arrays.items()}
    rows, x = torch.arange(2), torch.randn(2, 1, 64)
    code = layers.lib.kv_append(fmt, x.data_ptr(), 64, 64, x.data_ptr(), 64, 64, rows.data_ptr(), layers.tokens, 1, 1)
    assert layers.lib.kv_writes(fmt) == 0 and code == FORMAT
    for n, t in layers.bound.arrays.items():
        assert torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)), n
