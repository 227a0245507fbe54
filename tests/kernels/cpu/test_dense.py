"""Products, norms, rope and the gate of step.cpp against float64, and what they promise about bits."""

from __future__ import annotations

import pages
import pytest
import torch
import torch.nn.functional as F
from pages import VARIANTS

from kvlab.kernels.cpu import dense
from kvlab.kernels.cpu.dense import LayerParts, Matrix, Step, interleaved, padded

EPS = 2.0**-24
KINDS = tuple(dense.KINDS)
SHAPES = [(1, 1), (2, 16), (37, 33), (64, 32), (100, 70), (257, 96)]  # inputs, outputs


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide(x: torch.Tensor) -> torch.Tensor:
    """Rows as the kernels take them: padded to a multiple of 32."""
    return F.pad(x, (0, padded(x.shape[1]) - x.shape[1])).contiguous()


def head(variant: str, kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Step:
    """A step without layers whose norm does nothing to rows of mean square 1."""
    return Step(pages.library(variant), [], torch.ones(weight.shape[1]), 0.0, Matrix(kind, weight, bias))


def unit_rows(T: int, inputs: int) -> torch.Tensor:
    x = normal(T, inputs, seed=1)
    return x / x.square().mean(1, keepdim=True).sqrt()


def stored(m: Matrix) -> torch.Tensor:
    """The weight that a matrix holds, float64 [outputs, inputs], out of its panels."""
    if m.scale is None:
        return m.data.transpose(1, 2).flatten(0, 1)[: m.outputs].double()
    codes = m.data.transpose(1, 2).reshape(len(m.scale), -1)[: m.outputs, : m.inputs]
    return codes.double() * m.scale[: m.outputs, None].double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_is_off_by_its_roundings_only(variant, kind, shape, bias):
    """float32 and bf16: n sums and the norm's few roundings of terms |w x|. int8: sums are exact; an input is off by
    half a step of its row, 1 / (2 top) of the largest. Fails for panels in another order, an odd last input, a lost
    bias."""
    inputs, outputs = shape
    weight, offset = normal(outputs, inputs), normal(outputs, seed=2) if bias else None
    step = head(variant, kind, weight, offset)
    x, w = unit_rows(9, inputs), stored(step.head_matrix)
    got = step.head(wide(x))
    want = x.double() @ w.T + (0 if offset is None else offset.double())
    terms = x.double().abs() @ w.abs().T + want.abs()
    bound = EPS * (inputs + 16) * terms
    if kind == "int8":
        top = step.head_matrix.top
        bound = bound + x.double().abs().amax(1, keepdim=True) / (2 * top) * (1 + 1e-3) * w.abs().sum(1)
    assert got.shape == (9, outputs)
    assert ((got - want).abs() <= bound).all(), f"{((got - want).abs() / bound).max():.2f} of the bound"


def test_stored_weights_are_the_weights_but_for_their_rounding():
    weight = normal(70, 37)
    assert torch.equal(stored(Matrix("float32", weight, None)).float(), weight)
    assert torch.equal(stored(Matrix("bf16", weight, None)).float(), weight.bfloat16().float())
    m = Matrix("int8", weight, None)
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert ((stored(m) - weight.double()).abs() <= step * (0.5 + 1e-5)).all()
    assert m.nbytes == 96 * 38 + 96 * 4, "codes of padded rows and inputs, and a scale per row"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_sums_of_int8_products_stay_exact(variant):
    """All weights and inputs at their largest: 70,000 of them would leave int32 if rows kept 15 bits."""
    inputs = 70_000
    step = head(variant, "int8", torch.ones(32, inputs))
    top = step.head_matrix.top
    assert top == (2**31 - 1) // (127 * inputs) < 2**15 - 1
    x = torch.ones(3, inputs)
    x[1], x[2, ::2] = -1.0, -1.0
    got = step.head(wide(x))
    assert torch.equal(got[2], torch.zeros(32))
    for row, sign in ((0, 1), (1, -1)):
        assert ((got[row] - sign * inputs).abs() <= 4 * EPS * inputs).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_of_a_row_depend_neither_on_other_rows_nor_on_threads(variant, kind):
    step, x = head(variant, kind, normal(96, 100)), normal(23, 100, seed=3)
    x[7] *= 1e6  # a row that would widen a range shared by all
    want = step.head(wide(x))
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13):
        assert torch.equal(step.head(wide(x[:n])), want[:n]), f"{n} rows"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(step.head(wide(x)), want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_number_that_is_not_finite_reaches_its_row_and_no_other(variant, kind, bad):
    """An int8 product has no NaN: without care it would give a plausible number."""
    step, x = head(variant, kind, normal(40, 50)), normal(4, 50)
    want = step.head(wide(x))
    x[2, 17] = bad
    got = step.head(wide(x))
    assert not got[2].isfinite().any()
    assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-33])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_nothing_give_nothing(variant, size):
    """Fails where a range of zero is divided by, or one so small that its inverse overflows."""
    for kind in KINDS:
        step = head(variant, kind, normal(33, 20))
        step.eps = 1.0
        assert step.head(wide(torch.full((2, 20), size))).abs().max() <= 1e-30


# -- a layer ----------------------------------------------------------------------------------------------------------


def layer(kind: str, E: int = 40, heads: int = 3, kv: int = 1, D: int = 16, wide_: int = 50, qk_norm: bool = True):
    """A layer's parts and the weights that its matrices hold."""
    sizes = {
        "qkv": ((heads + 2 * kv) * D, E),
        "o": (E, heads * D),
        "gate": (wide_, E),
        "up": (wide_, E),
        "down": (E, wide_),
    }
    raw = {n: normal(*s, seed=i) / s[1] ** 0.5 for i, (n, s) in enumerate(sizes.items())}
    bias = normal((heads + 2 * kv) * D, seed=9)
    parts = LayerParts(
        qkv=Matrix(kind, raw["qkv"], bias), o=Matrix(kind, raw["o"], None), down=Matrix(kind, raw["down"], None),
        gate_up=Matrix(kind, interleaved(raw["gate"], raw["up"]), None),
        norm=1 + 0.1 * normal(E, seed=10), mlp_norm=1 + 0.1 * normal(E, seed=11),
        qk_norm=1 + 0.1 * normal(heads + kv, D, seed=12) if qk_norm else None, eps=1e-5, qk_eps=1e-6,
        turned=heads + kv, dim=D,
    )  # fmt: skip
    return parts, raw, bias


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


# relative to the result: float32's few hundred roundings; bf16 weights 2**-9 each; int8 weights 1/127 of the largest
TOLERANCE = {"float32": 2e-6, "bf16": 4e-3, "int8": 1.5e-2}


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_is_norms_products_rope_and_gate(variant, kind, qk_norm):
    parts, raw, bias = layer(kind, qk_norm=qk_norm)
    step = Step(pages.library(variant), [parts], torch.ones(40), 1e-5, Matrix(kind, normal(8, 40), None))
    x, a, angle = normal(5, 40, seed=20), normal(5, 48, seed=21), normal(5, 8, seed=22)
    cos, sin = torch.cat([angle.cos()] * 2, 1), torch.cat([angle.sin()] * 2, 1)
    q64 = {n: w.double() for n, w in raw.items()}

    want = (rms(x.double(), parts.norm, 1e-5) @ q64["qkv"].T + bias.double()).view(5, 5, 16)
    turned = want[:, :4]
    if qk_norm:
        turned = rms(turned, parts.qk_norm, 1e-6)
    half = torch.cat([-turned[..., 8:], turned[..., :8]], -1)
    want = torch.cat([turned * cos.double()[:, None] + half * sin.double()[:, None], want[:, 4:]], 1).flatten(1)
    assert_close(step.front(0, wide(x), torch.cat([angle.cos(), angle.sin()], 1)), want, TOLERANCE[kind])

    y = x.double() + a.double() @ q64["o"].T
    n = rms(y, parts.mlp_norm, 1e-5)
    want = y + (F.silu(n @ q64["gate"].T) * (n @ q64["up"].T)) @ q64["down"].T
    got = wide(x)
    step.back(0, a, got)
    assert_close(got[:, :40], want, TOLERANCE[kind])
    assert (got[:, 40:] == 0).all(), "the padding of the residual stream stays zero"


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    error = ((got - want).norm() / want.norm()).item()
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_silu_holds_at_every_size(variant):
    """x / (1 + e^-x) from -2000 to 2000: fails where a power overflows, and where one is cut off too early."""
    g = torch.cat([torch.linspace(-90, 90, 41), torch.tensor([-2000.0, -128.0, 0.0, 128.0, 2000.0, 1e-3, -1e-3])])
    n = len(g)
    parts, *_ = layer("float32", E=n, wide_=n)
    one = Matrix("float32", torch.eye(n), None)
    zero = Matrix("float32", torch.zeros(n, 48), None)
    gate = Matrix("float32", interleaved(torch.eye(n), torch.zeros(n, n)), interleaved(torch.zeros(n), torch.ones(n)))
    size = g.square().mean().sqrt()
    changes = {"o": zero, "gate_up": gate, "down": one, "mlp_norm": size.expand(n).contiguous(), "eps": 0.0}
    parts = LayerParts(**{**vars(parts), **changes})
    step = Step(pages.library(variant), [parts], torch.ones(n), 1e-5, one)
    x = wide(g[None])
    step.back(0, torch.zeros(1, 48), x)
    want = g.double() + F.silu(g.double())
    # the norm and its undoing are off by a few parts in 2**24, which e^x turns into |x| times that
    bound = 8 * EPS * (1 + g.double().abs()) * (g.double().abs() + F.silu(g.double()).abs()) + 1e-36
    assert ((x[0, :n] - want).abs() <= bound).all()


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_the_kernels_cannot_hold_is_refused():
    parts, *_ = layer("float32")
    lib = dense.prototypes(pages.library("generic"))
    step = Step(lib, [parts], torch.ones(40), 1e-5, Matrix("float32", normal(8, 40), None))
    whole, size, formats = step.layers[0], -1, -2

    def copy():
        return type(whole).from_buffer_copy(whole)

    def check(change, code):
        other = copy()
        change(other)
        assert lib.kv_check_layer(other) == code

    check(lambda l: setattr(l, "size", 8), size)
    for name, value in (("dim", 15), ("turned", 6), ("turned", -1), ("wide", 51), ("wide", 2**30), ("norm", None)):
        check(lambda l, n=name, v=value: setattr(l, n, v), formats)
    for name in ("qkv", "o", "gate_up", "down"):
        for field, value in (("size", 1), ("kind", 3), ("kind", -1), ("inputs", 0), ("outputs", 0), ("weight", None)):
            check(lambda l, n=name, f=field, v=value: setattr(getattr(l, n), f, v), formats)
        check(lambda l, n=name: setattr(getattr(l, n), "kind", 2), formats)  # int8 without scales
    check(lambda l: setattr(l.o, "outputs", 32), formats)
    check(lambda l: setattr(l.down, "inputs", 49), formats)

    x, out = torch.full((4, 64), torch.nan), torch.full((4, 96), torch.nan)
    work = torch.empty(lib.kv_layer_bytes(whole, 4), dtype=torch.uint8)
    pointers, room = (x.data_ptr(), out.data_ptr(), work.data_ptr()), len(work)

    def front(x_row=64, T=4, row=96, space=room, layer=whole):
        return lib.kv_front(layer, pointers[0], x_row, T, pointers[0], pointers[1], row, pointers[2], space, 1)

    def back(a_row=64, x_row=64, T=4, space=room, layer=whole):
        return lib.kv_back(layer, pointers[0], a_row, pointers[1], x_row, T, pointers[2], space, 1)

    short = type(whole)()
    assert (front(layer=short), back(layer=short)) == (size, size)
    assert {front(x_row=39), front(row=95), front(T=-1), back(a_row=47), back(x_row=63), back(T=-1)} == {-4}
    assert {front(space=room - 1), back(space=room - 1)} == {-5}
    assert out.isnan().all()
    m = step.head_matrix.struct
    args = (1e-5, pointers[0], 64, 4, pointers[1], 32, pointers[2])
    assert lib.kv_head(m, pointers[0], *args, lib.kv_matrix_bytes(m, 4) - 1, 1) == -5
    assert lib.kv_head(dense.kv_matrix(), pointers[0], *args, 10**6, 1) == size
    assert out.isnan().all()


def test_undense_and_other_tensors_are_refused():
    step = head("generic", "float32", normal(8, 40))
    for wrong in (torch.zeros(2, 64).double(), torch.zeros(64, 2).T):
        with pytest.raises(AssertionError, match="float32"):
            step.head(wrong)
    with pytest.raises(ValueError, match="kv_head: refused"):
        step.head(torch.zeros(2, 39))


def test_no_rows_are_no_work():
    parts, *_ = layer("int8")
    step = Step(pages.library("generic"), [parts], torch.ones(40), 1e-5, Matrix("int8", normal(8, 40), None))
    assert step.head(torch.empty(0, 64)).shape == (0, 8)
    assert step.front(0, torch.empty(0, 64), torch.empty(0, 16)).shape == (0, 80)
