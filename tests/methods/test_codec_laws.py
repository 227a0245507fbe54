"""What every codec promises, whatever it does inside: bytes, batch independence, one meaning however it is read."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvlab.cache.layout import Geom
from kvlab.cache.scratch import Scratch
from kvlab.kernels.meta import MetaOverflow, NonFinite
from kvlab.methods.fp8 import Fp8
from kvlab.methods.full import Full
from kvlab.methods.int4 import Int4
from kvlab.methods.int8 import Int8
from kvlab.methods.kivi import Kivi
from kvlab.methods.turboquant import TurboQuant

SMOLLM2 = Geom(L=30, H=9, Hk=3, D=64, model="smollm2-135m")
B = 32
CODECS = [
    *(Full(t) for t in ("model", "float16", "bfloat16")),
    *(Fp8(f) for f in ("e4m3", "e5m2")),
    *(Int8(group=g) for g in (64, 32, 16)),
    *(Int4(bits=b, group=g) for b, g in ((4, 64), (4, 16), (3, 64), (3, 32), (2, 64), (2, 32))),
    *(c(meta_dtype=t) for c in (Int8, Int4, Kivi) for t in ("bfloat16", "float32")),
    *(Kivi(bits_k=k, bits_v=v, group=g) for k, v, g in ((2, 2, 32), (4, 4, 32), (3, 2, 16), (8, 1, 8))),
    *(TurboQuant(bits_k=b, bits_v=9 - b) for b in range(1, 9)),
    *(TurboQuant(bits_k=3, bits_v=3, scale=s) for s in ("none", "norm", "eden_mse", "const_unbiased")),
    *(TurboQuant(bits_k=b, bits_v=3, variant="prod", qjl_matrix=m) for b in (1, 3) for m in ("gaussian", "orthogonal")),
    *(TurboQuant(rotation=r, share=s) for r, s in (("rht", "head"), ("haar", "all"), ("identity", "layer"))),
    TurboQuant(bits_k=3, bits_v=3, share="head", variant="prod"),
]
TOKEN = [c for c in CODECS if c.scope == "token"]


def name(codec):
    return codec.fingerprint() if not isinstance(codec, TurboQuant) else codec.label() + f" {codec.share}"


@pytest.fixture(params=CODECS, ids=name)
def codec(request):
    return ready(request.param)


@pytest.fixture(params=TOKEN, ids=name)
def token_codec(request):
    return ready(request.param)


def ready(codec, D=64, L=3):
    codec.setup(Geom(L=L, H=9, Hk=3, D=D, model="toy"), B)
    return codec


def kv(M=2, n=2 * B, D=64, Hk=3, seed=0):
    """Every token, head and channel has its own size, a few channels are large: constant fills hide swapped axes."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(M, Hk, n, D, generator=g) for _ in "kv")
    return k * torch.linspace(0.5, 8, D) + torch.linspace(-1, 1, D), v * torch.linspace(0.2, 3, n)[:, None]


def page_of(codec, layer, k, v):
    """Encode n tokens; blocks of B for block scope."""
    if codec.scope == "token":
        return {name: x.clone() for name, x in codec.encode(layer, k, v).items()}
    pages = [codec.encode(layer, k[:, :, i : i + B], v[:, :, i : i + B]) for i in range(0, k.shape[2], B)]
    scope = {r.name: r.scope for r in codec.regions(codec.geom, B)}
    return {n: torch.cat([p[n] for p in pages], 2) if scope[n] == "token" else torch.stack([p[n] for p in pages], 2)
            for n in scope}  # fmt: skip


def test_encode_fills_exactly_the_declared_regions(codec):
    k, v = kv()
    page = page_of(codec, 1, k, v)
    regions = codec.regions(codec.geom, B)
    assert set(page) == {r.name for r in regions}
    for r in regions:
        slots = k.shape[2] if r.scope == "token" else k.shape[2] // B
        assert page[r.name].dtype == r.dtype and page[r.name].shape == (2, 3, slots, *r.shape), r.name


def test_decode_is_close_and_not_the_input(codec):
    """Guards against a silent no-op (a format below 16 bits with error 0) and against noise."""
    k, v = kv()
    back = codec.decode(1, page_of(codec, 1, k, v))
    for x, y in zip((k, v), back):
        assert y.dtype == torch.float32 and y.shape == x.shape
        error = ((x - y).norm() / x.norm()).item()
        one_bit = isinstance(codec, Kivi | TurboQuant) and 1 in (codec.bits_k, codec.bits_v)
        assert error < (1.7 if one_bit else 0.7)
        assert (error == 0) == (isinstance(codec, Full) and codec.dtype == "model")


def test_attention_on_read_equals_attention_on_decode(codec):
    """query . read(k) == q . decode(k), and the outputs agree after `output`, also through a fused attention.

    1e-5: float32 sums of 64 to 128 products (2**-24 each), and for rotated codecs one more product with a matrix.
    """
    k, v = kv()
    page = page_of(codec, 1, k, v)
    dk, dv = codec.decode(1, page)
    rk, rv = codec.read(1, page, Scratch())
    q = torch.randn(2, 3, 6, 64, generator=torch.Generator().manual_seed(1))
    inner = codec.query(1, q)
    scores = q @ dk.mT
    assert (inner @ rk.mT - scores).norm() <= 1e-5 * scores.norm()
    want = sdpa(q, dk, dv, scale=0.02)
    got = codec.output(1, sdpa(inner, rk, rv, scale=0.02))
    assert got.shape == want.shape and (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("codec", [c for c in CODECS if not isinstance(c, TurboQuant)], ids=name)
def test_read_is_decode_bit_for_bit_where_nothing_is_rotated(codec):
    """Only the order of channels may differ: a fused multiply-add in the fast path would show here."""
    k, v = kv()
    ready(codec)
    page = page_of(codec, 1, k, v)
    for x, y, turned in zip(codec.decode(1, page), codec.read(1, page, Scratch()), (codec.query, codec.output)):
        if turned == codec.query:
            assert torch.equal(codec.query(1, x), y)
        else:
            assert torch.equal(codec.output(1, y), x)


def test_a_row_is_read_the_same_in_any_batch(codec):
    k, v = kv(M=5, n=3 * B)
    page = page_of(codec, 2, k, v)
    scope = {r.name: r.scope for r in codec.regions(codec.geom, B)}
    whole = [x.clone() for x in codec.read(2, page, Scratch())]
    for rows, blocks in ((slice(3, 4), slice(0, 3)), (slice(1, 3), slice(1, 2)), (slice(0, 5), slice(2, 3))):
        tokens = slice(blocks.start * B, blocks.stop * B)
        part = {n: x[rows][:, :, tokens if scope[n] == "token" else blocks].clone() for n, x in page.items()}
        for a, b in zip(codec.read(2, part, Scratch()), whole):
            assert torch.equal(a, b[rows][:, :, tokens])


def test_token_by_token_is_batched_bit_for_bit(token_codec):
    k, v = kv(M=1, n=40)
    whole = page_of(token_codec, 1, k, v)
    for chunk in (1, 3, 7):
        parts = [token_codec.encode(1, k[:, :, i : i + chunk], v[:, :, i : i + chunk]) for i in range(0, 40, chunk)]
        for n, x in whole.items():
            assert torch.equal(torch.cat([p[n] for p in parts], 2), x), f"{n}, chunks of {chunk}"


def test_bytes_of_a_sequence_do_not_depend_on_its_neighbours(codec):
    k, v = kv(M=4, n=B)
    whole = page_of(codec, 0, k, v)
    big = torch.tensor([1.0, 20.0, 1.0, 300.0]).view(4, 1, 1, 1)
    other = page_of(codec, 0, k * big, v * big)
    for n, x in whole.items():
        assert torch.equal(x[[0, 2]], other[n][[0, 2]]), n
        assert torch.equal(x.flip(0), page_of(codec, 0, k.flip(0), v.flip(0))[n]), n


def test_garbage_in_unused_slots_stays_there(codec):
    """Pages hold arbitrary bytes, NaN patterns too, behind the last token."""
    k, v = kv(M=2, n=2 * B)
    page = page_of(codec, 1, k, v)
    want = [x.clone() for x in codec.read(1, page, Scratch())], codec.decode(1, page)
    scope = {r.name: r.scope for r in codec.regions(codec.geom, B)}
    for fill in (0xFF, 0x7F, 0x00, 0xA5):
        for n, x in page.items():
            if scope[n] == "token":
                x[:, :, B + 5 :].copy_(torch.full((x.element_size(),), fill, dtype=torch.uint8).view(x.dtype))
        for a, b in zip((codec.read(1, page, Scratch()), codec.decode(1, page)), want):
            for x, y in zip(a, b):
                assert torch.equal(x[:, :, : B + 5], y[:, :, : B + 5])


def test_encode_takes_views_and_other_float_types(token_codec):
    """What a model hands over: [1, T, Hk, D] turned, in bfloat16."""
    k, v = kv(M=1, n=12)
    page = token_codec.encode(0, k.bfloat16().float(), v.bfloat16().float())
    turned = token_codec.encode(0, *(x.transpose(1, 2).contiguous().transpose(1, 2).bfloat16() for x in (k, v)))
    if isinstance(token_codec, Full) and token_codec.dtype == "model":
        page = turned
    for n, x in page.items():
        assert torch.equal(x, turned[n]), n


BYTES = [
    (Full("float16"), 23_040),
    (Full("model"), 46_080),
    (Int8(), 11_880),
    (Int4(), 6_480),
    (Int4(bits=3), 5_040),
    (Int4(bits=2), 3_600),
    (Kivi(), 4_320),
    (Kivi(bits_k=4, bits_v=4), 7_200),
    (Fp8(), 12_240),
    (TurboQuant(bits_k=4, bits_v=4), 6_120),
    (TurboQuant(bits_k=3, bits_v=3), 4_680),
    (TurboQuant(bits_k=2, bits_v=2), 3_240),
    (TurboQuant(bits_k=4, bits_v=4, variant="prod"), 6_300),
    (TurboQuant(bits_k=3, bits_v=3, variant="prod"), 4_860),
]


@pytest.mark.parametrize(("codec", "want"), BYTES, ids=lambda x: name(x) if not isinstance(x, int) else str(x))
def test_bytes_per_token_are_the_published_ones(codec, want):
    """From the regions' own types: 3-bit codes that take 4 bits, or norms left out, fail here."""
    codec.setup(SMOLLM2, B)
    regions = codec.regions(SMOLLM2, B)
    assert SMOLLM2.L * SMOLLM2.Hk * sum(r.bytes(B) for r in regions) == want * B
    k, v = kv(M=1, n=B)
    held = sum(x.untyped_storage().nbytes() if x._base is None else x.nbytes for x in page_of(codec, 0, k, v).values())
    assert SMOLLM2.L * held == want * B, "and the tensors really are that small"


def test_kivi_with_its_exact_tail():
    codec = Kivi()
    codec.setup(SMOLLM2, B)
    sealed = SMOLLM2.L * SMOLLM2.Hk * sum(r.bytes(B) for r in codec.regions(SMOLLM2, B)) // B
    fp16 = SMOLLM2.bytes_per_token(torch.float16)
    assert ((2048 - codec.residual) * sealed + codec.residual * fp16) / 2048 == 5_490


@pytest.mark.parametrize("D", [80, 96, 128, 256, 36])
def test_other_head_dims(D):
    k, v = kv(D=D, n=B)
    q = torch.randn(2, 3, 2, D, generator=torch.Generator().manual_seed(1))
    for codec in (Int4(bits=3, group=D), Kivi(group=4), TurboQuant(bits_k=3, bits_v=5), TurboQuant(variant="prod")):
        ready(codec, D)
        page = page_of(codec, 1, k, v)
        scores = q @ codec.decode(1, page)[0].mT
        assert (codec.query(1, q) @ codec.read(1, page, Scratch())[0].mT - scores).norm() <= 1e-5 * scores.norm()


@pytest.mark.parametrize("codec", [c for c in CODECS if not isinstance(c, Full)], ids=name)
def test_a_bad_key_or_value_is_refused(codec):
    """A NaN must not be hidden by a clamp, a cast or a zero weight. (full shows it: it stays a NaN.)"""
    ready(codec)
    for side, bad in ((0, torch.nan), (1, torch.inf), (1, -torch.inf)):
        pair = kv(M=1, n=B)
        pair[side][0, 2, 5, 7] = bad
        with pytest.raises(
            NonFinite, match=rf"layer 1 {'kv'[side]} is -?(nan|inf) at row 0, head 2, token 5, channel 7"
        ):
            codec.encode(1, *pair)


@pytest.mark.parametrize(
    ("make", "size"),
    [(Int4, 7e4), (Kivi, 7e4), (Int8, 1e7), (lambda **m: TurboQuant(norm_dtype=m.get("meta_dtype", "float16")), 7e4)],
)
def test_overflowing_metadata_is_refused_and_float32_holds_it(make, size):
    """Fails when inf is stored: everything else of the group would decode to NaN."""
    k, v = kv(M=1, n=B)
    v[0, 1, 3] = -size
    with pytest.raises(MetaOverflow, match=r"layer 1 v: .* head 1, token 3, .*Use method\.\w+=float32"):
        ready(make()).encode(1, k, v)
    codec = ready(make(meta_dtype="float32"))
    assert torch.isfinite(codec.decode(1, page_of(codec, 1, k, v))[1]).all()


def test_fingerprints_tell_settings_apart():
    prints = {c.fingerprint() for c in CODECS}
    assert len(prints) == len(CODECS)
    assert TurboQuant(seed=1).fingerprint() != TurboQuant(seed=2).fingerprint()


def test_labels_are_short_and_tell_settings_of_a_table_apart(codec):
    assert codec.label().startswith(type(codec).__name__.lower()[:3]) and len(codec.label()) < 48


def test_static_counts_the_rotations_as_they_are_held(codec):
    """Dense float32 matrices, not the bits of their seed."""
    held = sum(t.untyped_storage().nbytes() for t in codec.static().values())
    if isinstance(codec, TurboQuant):
        matrices = {"all": 1, "layer": 3, "head": 9}[codec.share] * 64 * 64 * 4
        assert held >= (3 if codec.variant == "prod" else 2) * matrices
    else:
        assert held == 0


def test_tables_move_to_a_device(codec):
    moved = codec.to("meta")
    assert all(t.device.type == "meta" for t in moved.static().values())
    ready(codec)
