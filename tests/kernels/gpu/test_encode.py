"""Tokens and blocks that Triton kernels write: the bytes of `Codec.encode`, nowhere else; bad numbers are reported."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvlab import names, registry
from kvlab.cache.arrays import Arrays
from kvlab.cache.layout import Geom
from kvlab.codec import Codec
from kvlab.kernels import affine, packing
from kvlab.kernels.format import Format, Refused, Side, exact

writer = pytest.importorskip("kvlab.kernels.triton.writer", reason="no triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no GPU; TRITON_INTERPRET=1 runs these kernels without one", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LAYER = 2  # of a model of 3: what the class's second layer is
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SCALES = ("none", "norm", "eden_mse", "eden_unbiased", "const_unbiased")


@dataclass(eq=False)
class Pool:
    """A codec's pages, full of garbage, and their writer."""

    codec: Codec
    geom: Geom
    arrays: Arrays
    writer: writer.Writer
    flat: dict[str, Tensor]  # what it writes to
    before: dict[str, Tensor]

    @classmethod
    def of(cls, method: str, D: int, Hk: int = 1, block: int = 16, blocks: int = 4, **options) -> Pool:
        geom = Geom(3, 2 * Hk, Hk, D)
        codec = registry.build(method, **options).codec
        codec.setup(geom, block)
        arrays = Arrays(codec.regions(geom, block), blocks, 1, Hk, block, torch.device("cpu"))
        arrays.fill_garbage()
        flat = {n: arrays.token_rows.get(n, rows).to(DEVICE) for n, rows in arrays.block_rows.items()}
        made = writer.Writer(codec.page_format(), flat, block, [0, LAYER], Hk * blocks)
        return cls(codec, geom, arrays, made, flat, {n: x.clone() for n, x in flat.items()})

    def rows(self, T: int, first: int = 0) -> Tensor:
        """int64 [Hk, T]: token rows of slots first, first + 1, .. of a sequence in blocks 2, 1, 3."""
        B, Hk = self.arrays.block, self.geom.Hk
        slot = first + torch.arange(T)
        return self.arrays.row(torch.tensor([2, 1, 3])[slot // B], torch.arange(Hk)[:, None]) * B + slot % B

    def append(self, k: Tensor, v: Tensor, rows: Tensor) -> None:
        self.writer.append(1, k.to(DEVICE), v.to(DEVICE), rows.reshape(-1).to(DEVICE))

    def seal(self, k: Tensor, v: Tensor, src: list[int], dst: list[int]) -> None:
        self.writer.seal(1, k.to(DEVICE), v.to(DEVICE), *(torch.tensor(x, device=DEVICE) for x in (src, dst)))

    def tokens(self, rows: Tensor) -> dict[str, Tensor]:
        """{region: [1, Hk, T, *shape]} at rows [Hk, T]."""
        return {
            n: self.flat[n].cpu()[rows][None].view(1, *rows.shape, *r.shape) for n, r in self.arrays.regions.items()
        }

    def blocks(self, rows: Tensor) -> dict[str, Tensor]:
        """{region: [M, Hk, ...]} at block rows [M, Hk], as `encode` gives blocks."""
        block_rows = {n: x.cpu().view(len(self.arrays.block_rows[n]), -1) for n, x in self.flat.items()}
        return {n: x[rows] for n, x in block_rows.items()}

    def assert_untouched(self, written: Tensor, scope: str = "token") -> None:
        """All bytes but those of the written rows (token or block rows) are as they were."""
        for n, old in self.before.items():
            units = len(self.arrays.block_rows[n]) * (self.arrays.block if scope == "token" else 1)
            new, old = (bytes_of(x.cpu().view(units, -1)) for x in (self.flat[n], old))
            keep = torch.ones(units, dtype=torch.bool)
            keep[written.reshape(-1)] = False
            assert torch.equal(new[keep], old[keep]), n


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def assert_bytes(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for n, x in want.items():
        assert torch.equal(bytes_of(got[n].reshape(x.shape)), bytes_of(x)), n


def tokens(D: int, Hk: int = 1, T: int = 16, dtype: torch.dtype = F32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """k, v [1, Hk, T, D]. Sizes from 1e-7 (steps below float16's normal numbers) to 100; a zero vector, a constant one,
    one channel alone, ties between codes, all sizes in one vector, numbers below float32's normal ones."""
    gen = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, Hk, T, D, generator=gen) * torch.logspace(-7, 2, T)[:, None] for _ in "kv")
    k[..., 3, :], v[..., 2, :], k[..., 5, :], v[..., 5, :] = 0, 1.5, 0, 0
    k[..., 5, 7] = -3
    v[..., 5, D - 1] = 0 if dtype == BF16 else 1e-40  # the interpreter misreads such bfloat16 numbers
    v[..., 9, :], v[..., 10, :] = torch.arange(D) / 2, torch.logspace(-9, 2, D)
    return k.to(dtype), v.to(dtype)


# -- tokens as they come -------------------------------------------------------------------------------------------
EXACT = [
    ("full", {"dtype": "float32"}, 80, BF16),
    ("full", {"dtype": "float16"}, 96, F16),
    ("full", {"dtype": "float16"}, 32, F32),
    ("full", {"dtype": "bfloat16"}, 128, F32),
    ("full", {"dtype": "bfloat16"}, 64, F16),
    ("fp8", {}, 112, F32),
    ("fp8", {}, 64, BF16),
    ("fp8", {"format": "e5m2"}, 80, F32),
    ("int8", {"group": 256}, 256, F32),
    ("int8", {"group": 16, "meta_dtype": "float32"}, 32, F16),
    ("int8", {"group": 40, "meta_dtype": "bfloat16"}, 80, F32),
    ("int4", {"group": 64}, 64, BF16),
    ("int4", {"group": 16, "meta_dtype": "float32"}, 32, F32),
    ("int4", {"group": 80, "meta_dtype": "bfloat16"}, 80, F32),
    ("int4", {"bits": 3, "group": 96}, 96, F32),
    ("int4", {"bits": 3, "group": 16, "meta_dtype": "float32"}, 32, F32),
    ("int4", {"bits": 3, "group": 80, "meta_dtype": "bfloat16"}, 80, F32),
    ("int4", {"bits": 2, "group": 112}, 112, F32),
    ("int4", {"bits": 2, "group": 128, "meta_dtype": "float32"}, 128, F16),
    ("int4", {"bits": 2, "group": 16, "meta_dtype": "bfloat16"}, 32, F32),
]


@pytest.mark.parametrize(("method", "options", "D", "dtype"), EXACT, ids=str)
def test_a_kernel_writes_the_bytes_of_encode(method, options, D, dtype):
    pool, (k, v) = Pool.of(method, D, **options), tokens(D, dtype=dtype)
    rows = pool.rows(16, first=9)
    pool.append(k[0], v[0], rows)
    assert_bytes(pool.tokens(rows), pool.codec.encode(LAYER, k, v))
    assert not pool.writer.bad.any()


def assert_rotated(codec: Codec, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """A coordinate is a sum of D products in another order: one in 10,000 passes an edge at 8 bits. Norms are made of
    such sums, whose roundings walk sqrt(D) ulp of float32, and rounded to their type; where codes are the same."""
    D = codec.geom.D
    for side in "kv":
        a, b = (packing.unpack(page[side].reshape(want[side].shape), D, codec.bits[side]).int() for page in (got, want))
        gap = (a - b).abs()
        assert gap.max() <= 1 and gap.sum() <= 1e-3 * gap.numel(), f"{side}: {int(gap.sum())} codes differ"
        same = gap.amax(-1) == 0
        m, n = (x.reshape(same.shape)[same] for x in (got[f"{side}_norm"], want[f"{side}_norm"]))
        kind, off = torch.finfo(n.dtype), (m.double() - n.double()).abs()
        assert bool((off <= n.double() * (kind.eps + D**0.5 * 2**-23) + kind.tiny * kind.eps).all()), side


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_width_are_chosen_along_a_rotation(bits):
    pool, (k, v) = Pool.of("turboquant", 48, bits_k=bits, bits_v=bits), tokens(48)
    rows = pool.rows(16)
    pool.append(k[0], v[0], rows)
    assert_rotated(pool.codec, pool.tokens(rows), pool.codec.encode(LAYER, k, v))
    assert not pool.writer.bad.any()


@pytest.mark.parametrize(
    ("scale", "norm", "D"),
    [*zip(SCALES, ("float16", "float32", "bfloat16", "float16", "float32"), (80, 112, 32, 256, 96))],
    ids=str,
)
def test_norms_are_stored_by_scale_and_each_head_has_its_rotation(scale, norm, D):
    pool = Pool.of("turboquant", D, Hk=2, bits_k=3, bits_v=2, scale=scale, norm_dtype=norm, share="head")
    k, v = tokens(D, Hk=2, dtype=BF16)
    rows = pool.rows(16)
    pool.append(k[0], v[0], rows)
    assert_rotated(pool.codec, pool.tokens(rows), pool.codec.encode(LAYER, k, v))


def test_a_coordinate_on_an_edge_takes_the_upper_cell():
    """One channel alone, not rotated: all other coordinates are 0, the middle edge."""
    pool, (k, v) = Pool.of("turboquant", 32, rotation="identity", bits_k=2, bits_v=1), tokens(32)
    k[..., :8, 9], v[..., :8, 9] = 0, 0
    k[..., :8, 5] = v[..., :8, 5] = 2
    k[..., :8, 6:] = v[..., :8, 6:] = k[..., :8, :5] = v[..., :8, :5] = 0
    rows = pool.rows(16)
    pool.append(k[0], v[0], rows)
    assert_bytes(pool.tokens(rows), pool.codec.encode(LAYER, k, v))


def test_keys_and_values_may_be_slices_of_a_wider_tensor():
    """As a fused projection gives them: [T, heads, D] seen as [heads, T, D], each with strides of its own."""
    pool, T, D = Pool.of("int4", 32, Hk=2, group=32), 18, 32
    k, v = tokens(D, Hk=2, T=T, dtype=F16)
    wide = torch.full((T, 7, D + 8), torch.nan, dtype=F16)
    wide[:, 1:3, :D], v_wide = k[0].transpose(0, 1), torch.full((2, 3 * T, D), torch.nan, dtype=F16)
    v_wide[:, ::3] = v[0]
    rows = pool.rows(T, first=5)
    pool.append(wide[:, 1:3, :D].transpose(0, 1), v_wide[:, ::3], rows)
    assert_bytes(pool.tokens(rows), pool.codec.encode(LAYER, k, v))


@pytest.mark.parametrize(("method", "options"), [("int4", {"bits": 3, "group": 32}), ("turboquant", {})], ids=str)
def test_a_token_has_the_same_bytes_alone_and_among_others(method, options):
    pool, (k, v) = Pool.of(method, 32, **options), tokens(32, T=19)
    rows = pool.rows(19)
    pool.append(k[0], v[0], rows)
    together = pool.tokens(rows)
    for t in (4, 18):
        pool.append(k[0][:, t : t + 1], v[0][:, t : t + 1], pool.rows(1, first=30))
        assert_bytes(pool.tokens(pool.rows(1, first=30)), {n: x[:, :, t : t + 1] for n, x in together.items()})


# -- whole blocks --------------------------------------------------------------------------------------------------
def tail(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Exact block rows [M * Hk, B * D] of k, v [M, Hk, B, D]."""
    return k.flatten(0, 1).flatten(1), v.flatten(0, 1).flatten(1)


def blocks(D: int, Hk: int, M: int, B: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """k, v [M, Hk, B, D]: channels of very different sizes, a constant one, a zero one, two far from zero."""
    k, v = (x.view(Hk, M, B, D).transpose(0, 1).contiguous() for x in tokens(D, Hk, M * B))
    k *= torch.logspace(-5, 2, D)
    k[..., 1], k[..., 2] = -0.3, 0
    k[..., 3] += 500
    k[..., 4] -= 500
    return k.to(dtype), v.to(dtype)


KIVI = [  # bits of keys and values, group, block, D, type of scales, of the tail
    (1, 8, 16, 16, 32, "float16", F32),
    (2, 2, 32, 32, 64, "float16", BF16),
    (3, 7, 16, 16, 32, "float32", F32),
    (4, 4, 16, 32, 16, "bfloat16", F32),
    (5, 6, 16, 16, 32, "float16", F16),
    (6, 5, 40, 80, 80, "float16", F32),  # groups of 40 tokens: two tiles of 32, the second with room
    (7, 3, 16, 16, 48, "float32", F32),
    (8, 1, 64, 64, 64, "float16", F32),
]


@pytest.mark.parametrize(("bits_k", "bits_v", "group", "B", "D", "meta", "dtype"), KIVI, ids=str)
def test_a_kernel_seals_the_bytes_of_encode(bits_k, bits_v, group, B, D, meta, dtype):
    """Keys with steps over tokens, values with steps over channels."""
    pool = Pool.of("kivi", D, block=B, bits_k=bits_k, bits_v=bits_v, group=group, meta_dtype=meta)
    k, v = blocks(D, 1, 1, B, dtype)
    pool.seal(*tail(k, v), [0], [2])
    assert_bytes(pool.blocks(torch.tensor([[2]])), pool.codec.encode(LAYER, k, v))
    pool.assert_untouched(torch.tensor([2]), "block")
    assert not pool.writer.bad.any()


@pytest.mark.parametrize(
    ("method", "options"),
    [("full", {"dtype": "float16"}), ("int8", {"group": 32}), ("turboquant", {"share": "head"})],
    ids=str,
)
def test_tokens_without_scales_over_blocks_are_sealed_too(method, options):
    """As a window of exact tokens in front of them needs it: the kernel cuts a block into tiles of tokens."""
    pool = Pool.of(method, 32, Hk=2, block=32, **options)
    k, v = blocks(32, 2, 1, 32)
    pool.seal(*tail(k, v), [0, 1], [6, 3])  # heads of a block pairwise, as cache/pages.py orders them
    got, want = pool.blocks(torch.tensor([[6, 3]])), pool.codec.encode(LAYER, k, v)
    (assert_rotated if method == "turboquant" else lambda codec, *pages: assert_bytes(*pages))(pool.codec, got, want)


@pytest.mark.parametrize("bits", range(1, 8))
def test_a_packed_row_may_hold_several_groups(bits):
    """Reference: affine.py and packing.py. (Codes of 8 bits have no rows: a group is its bytes.)"""
    group, pack = 16, 16 * 8 // packing.planes(bits)[0]
    D = max(64, pack)
    side = Side("k", "codes", D, bits, pack, "token", group, "k_step", zero="k_zero", fit="minmax")
    rows = D // pack
    k, v = tokens(D)
    arrays = {
        f"{n}{suffix}": torch.full((16, size), 7, dtype=dtype, device=DEVICE)
        for n in "kv"
        for suffix, size, dtype in (
            ("", rows * packing.packed_bytes(pack, bits), torch.uint8),
            ("_step", D // group, F16),
            ("_zero", D // group, F16),
        )
    }
    fmt = Format((side,), replace(side, codes="v", scale="v_step", zero="v_zero"))
    to = torch.arange(16).flip(0)
    writer.Writer(fmt, arrays, 16, [0], 1).append(0, k[0].to(DEVICE), v[0].to(DEVICE), to.to(DEVICE))
    for n, x in (("k", k), ("v", v)):
        x = x[0, 0].unflatten(-1, (-1, group))
        step, zero = affine.asymmetric_params(x, -1, bits, F16)
        codes = affine.asymmetric_codes(x, step, zero, bits).view(16, rows, pack)
        want = {n: packing.pack(codes, bits).flatten(1), f"{n}_step": step[..., 0], f"{n}_zero": zero[..., 0]}
        assert_bytes({m: arrays[m].cpu()[to] for m in want}, want)


# -- nothing but what was asked for --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "options"),
    [("full", {"dtype": "bfloat16"}), ("fp8", {}), ("int4", {"bits": 3, "group": 32}), ("turboquant", {"bits_k": 3})],
    ids=str,
)
def test_other_slots_keep_their_bytes_and_padding_is_not_written(method, options):
    """Padding (a row of -1, or beyond the pool) may hold anything: a NaN there is nobody's."""
    pool, T = Pool.of(method, 32, Hk=2, **options), 18
    k, v = tokens(32, Hk=2, T=T)
    rows = pool.rows(T, first=7)
    keep = torch.ones(2, T, dtype=torch.bool)
    keep[0, 3] = keep[1, 16] = keep[1, 0] = keep[:, 17] = False
    padded = rows.masked_fill(~keep, -1)
    padded[0, 17] = 4 * 2 * 16  # the first row that the pool has not
    noisy = [x[0].masked_fill(~keep[..., None], torch.nan) for x in (k, v)]
    pool.append(*noisy, padded)
    pool.assert_untouched(rows[keep])
    got, want = pool.tokens(rows), pool.codec.encode(LAYER, k, v)
    assert_bytes(*({n: x[:, keep] for n, x in page.items()} for page in (got, want)))
    assert not pool.writer.bad.any()


def test_pairs_with_a_missing_block_are_left_out():
    pool = Pool.of("kivi", 32, Hk=1, group=16)
    k, v = blocks(32, 1, 4, 16)
    k[1], v[2] = torch.nan, torch.inf
    pool.seal(*tail(k, v), [0, 1, -1, 3, 4, 3], [3, -1, 2, 1, 2, 4])  # 4: neither tail nor pool have it
    pool.assert_untouched(torch.tensor([3, 1]), "block")
    assert_bytes(pool.blocks(torch.tensor([[3], [1]])), pool.codec.encode(LAYER, k[[0, 3]], v[[0, 3]]))
    assert not pool.writer.bad.any()


def test_no_tokens_and_no_blocks_are_no_launch():
    pool = Pool.of("int8", 32, group=32)
    pool.append(torch.empty(1, 0, 32), torch.empty(1, 0, 32), pool.rows(0))
    pool.seal(*tail(*blocks(32, 1, 1, 16)), [], [])
    pool.assert_untouched(torch.tensor([], dtype=torch.int64))


# -- bad numbers ---------------------------------------------------------------------------------------------------
ONLY_LAYER = [0, 0, 1]
BAD = [
    ("full", {"dtype": "float16"}),
    ("fp8", {}),
    ("int8", {"group": 32}),
    ("int4", {"group": 32}),
    ("turboquant", {}),
]


@pytest.mark.parametrize(("value", "side", "at"), [(torch.nan, "k", 0), (torch.inf, "v", 31), (-torch.inf, "v", 20)])
@pytest.mark.parametrize(("method", "options"), BAD, ids=str)
def test_a_number_that_is_not_finite_is_reported_for_its_layer(method, options, value, side, at):
    pool, (k, v) = Pool.of(method, 32, **options), tokens(32)
    {"k": k, "v": v}[side][0, 0, 11, at] = value
    pool.append(k[0], v[0], pool.rows(16))
    assert pool.writer.bad.tolist() == ONLY_LAYER
    with pytest.raises(ValueError, match=f"layer {LAYER} {side}"):
        pool.codec.encode(LAYER, k, v)


@pytest.mark.parametrize(("method", "size"), [("full", 7e4), ("int8", 1e7), ("int4", 7e4), ("turboquant", 1e6)])
def test_what_does_not_fit_its_type_is_reported(method, size):
    options = {"full": {"dtype": "float16"}, "turboquant": {}}.get(method, {"group": 32})
    pool, (k, v) = Pool.of(method, 32, **options), tokens(32)
    v[0, 0, 15, 31] = -size
    pool.append(k[0], v[0], pool.rows(16))
    assert pool.writer.bad.tolist() == ONLY_LAYER
    with pytest.raises(ValueError, match="float16"):
        pool.codec.encode(LAYER, k, v)


@pytest.mark.parametrize(
    ("method", "options", "dtype", "value"),
    [
        ("full", {"dtype": "float16"}, F16, torch.inf),
        ("full", {"dtype": "bfloat16"}, F32, -torch.inf),
        ("fp8", {}, F32, 3e38),
        ("int4", {"group": 32, "meta_dtype": "bfloat16"}, F32, 1e38),
    ],
    ids=str,
)
def test_what_the_reference_stores_is_stored(method, options, dtype, value):
    """Numbers in their own type, or one with their range, are not looked at."""
    pool, (k, v) = Pool.of(method, 32, **options), tokens(32, dtype=dtype)
    v[0, 0, 15, 31] = value
    rows = pool.rows(16)
    pool.append(k[0], v[0], rows)
    assert_bytes(pool.tokens(rows), pool.codec.encode(LAYER, k, v))
    assert not pool.writer.bad.any()


@pytest.mark.parametrize(("side", "value"), [("k", torch.nan), ("k", -torch.inf), ("v", torch.inf), ("k", -7e4)])
def test_a_bad_number_in_a_block_is_reported(side, value):
    pool, (k, v) = Pool.of("kivi", 32, group=16), blocks(32, 1, 1, 16)
    {"k": k, "v": v}[side][0, 0, 11, 31] = value
    pool.seal(*tail(k, v), [0], [1])
    assert pool.writer.bad.tolist() == ONLY_LAYER
    with pytest.raises(ValueError, match=f"layer {LAYER} {side}"):
        pool.codec.encode(LAYER, k, v)


def test_writers_may_share_what_they_report_to():
    bad = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    fmt, arrays = exact(F16, 32), {n: torch.zeros(16, 32, dtype=F16, device=DEVICE) for n in "kv"}
    x = torch.full((1, 1, 32), 1e6, device=DEVICE)
    for layer in (3, 1):
        writer.Writer(fmt, arrays, 16, [layer], 1, bad).append(0, x, x, torch.tensor([5], device=DEVICE))
    assert bad.tolist() == [0, 1, 0, 1]


# -- addresses -----------------------------------------------------------------------------------------------------
def reserved(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are touched."""
    return torch.frombuffer(mmap.mmap(-1, rows * width * dtype.itemsize), dtype=dtype).view(rows, width)


@pytest.mark.skipif(not INTERPRETED, reason="reserves addresses of the host")
def test_rows_beyond_two_billion_elements_are_addressed():
    """Seen to crash with a row number as int32."""
    D, B = 256, 16
    tokens_, exact_blocks = 2**31 // D + 2 * B, 2**31 // (B * D) + 2
    codec = registry.build("int8", group=D).codec
    codec.setup(Geom(1, 1, 1, D), B)
    fmt = codec.page_format()
    arrays = {n: reserved(tokens_, w, t) for s in "kv" for n, w, t in ((s, D, torch.int8), (f"{s}_step", 1, F16))}
    write = writer.Writer(fmt, arrays, B, [0], tokens_ // B)
    k, v = (x[:, :, -2:] for x in tokens(D))
    rows = torch.tensor([tokens_ - 1, 3])
    write.append(0, k[0], v[0], rows)
    assert_bytes({n: x[rows][None, None] for n, x in arrays.items()}, codec.encode(0, k, v))
    far = reserved(exact_blocks, B * D, F16)
    k, v = (x.half() for x in tokens(D, T=B))
    far[-1] = k.view(-1)
    write.seal(0, far, far, torch.tensor([exact_blocks - 1]), torch.tensor([tokens_ // B - 1]))
    rows = torch.arange(tokens_ - B, tokens_)
    assert_bytes({n: x[rows][None, None] for n, x in arrays.items()}, codec.encode(0, k, k))


# -- which formats -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in names.names() if n != "composed"])
def test_every_method_is_written_by_kernels(name):
    codec = registry.build(name).codec
    codec.setup(Geom(1, 2, 1, 64), 32)
    arrays = Arrays(codec.regions(codec.geom, 32), 2, 1, 1, 32, DEVICE)
    made = writer.Writer(codec.page_format(), {n: arrays.block_rows[n] for n in arrays.data}, 32, [0], 2)
    assert made.seals, made.refused
    assert made.appends == (codec.scope == "token")


def test_what_kernels_do_not_write_is_said():
    made = Pool.of("turboquant", 32, variant="prod").writer
    assert not made.appends and not made.seals and "2 parts" in made.refused
    side = Side("k", "codes", 64, 4, 64, "token", 16, "s", zero="z", fit="minmax")
    for changed in (side, replace(side, group=64, fit=""), replace(side, group=64, scale2="x")):
        with pytest.raises(Refused):
            writer.encoding(changed, turned=False)
    with pytest.raises(Refused, match="rotation"):
        writer.encoding(replace(side, group=64), turned=True)
