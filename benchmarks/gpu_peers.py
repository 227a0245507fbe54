"""What others take for the same attention: one decoding row of each sequence over a full cache of float16.

sdpa BACKEND FORM      torch's scaled_dot_product_attention on contiguous keys and values. FORM of the query heads that
                       share a kv head: gqa (enable_gqa), folded (onto the query axis), expanded (keys and values copied
                       beforehand: G times the bytes, which `bytes` counts)
flex, flex paged       FlexAttention, compiled; paged: shuffled blocks of one pool through its block mask
flash_attn, flashinfer, vllm   where they are installed; paged

Outputs are compared with float32 attention of the first sequence. Clock and layers: gpu_clock.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from gpu_cache import SHAPES
from gpu_clock import Machine, broken
from gpu_run import Absent, LeftOut, failure
from torch import Tensor

SDPA = [
    ("flash", "gqa"), ("flash", "folded"), ("cudnn", "gqa"), ("cudnn", "folded"), ("efficient", "folded"),
    ("math", "folded"), ("math", "gqa"), ("efficient", "gqa"), ("flash", "expanded"), ("efficient", "expanded"),
    ("cudnn", "expanded"),
]  # fmt: skip
PACKAGES = ("flash_attn", "flash_attn_interface", "flashinfer", "vllm")
PAGE = 128  # tokens of a page of FlexAttention's block mask
REFUSALS = (RuntimeError, NotImplementedError, ValueError, ImportError)


class Cache:
    """k, v float16 [layers][N, Hk, n, D] and the queries of one row each. The layers are as many as those of kvlab's
    full cache."""

    def __init__(self, facts: dict, machine: Machine) -> None:
        self.Hk, self.G, self.D = SHAPES[facts["shape"]]
        self.N, self.n, dtype = facts["batch"], facts["context"], torch.float16
        one = 2 * self.N * self.Hk * self.n * self.D * dtype.itemsize
        layers = machine.layers(one)
        while layers > 1 and one * layers > machine.room():
            layers -= 1
        if one * layers > machine.room():
            raise LeftOut(f"memory: {one / 1e9:.0f} GB of keys and values")
        shape = self.N, self.Hk, self.n, self.D
        gen = torch.Generator(machine.device).manual_seed(0)
        self.kv = [
            tuple(torch.empty(shape, dtype=dtype, device=machine.device).normal_(generator=gen) for _ in "kv")
            for _ in range(layers)
        ]
        self.q = torch.empty(self.N, self.Hk * self.G, 1, self.D, dtype=dtype, device=machine.device)
        self.q.normal_(generator=gen)
        self.bytes = one

    def folded(self) -> Tensor:
        return self.q.view(self.N, self.Hk, self.G, self.D)

    def expected(self) -> Tensor:
        """float32 [H, D] of the first sequence and layer."""
        k, v = (x[0].float() for x in self.kv[0])
        q = self.q[0].float().view(self.Hk, self.G, self.D)
        return ((q @ k.mT * self.D**-0.5).softmax(-1) @ v).flatten(0, 1)


def sdpa(facts: dict, machine: Machine) -> Iterator[dict]:
    """All forms of a case over the same keys and values, those that matter most first."""
    cache = Cache(facts, machine)
    for backend, form in SDPA:
        if form == "expanded" and not facts.get("expanded", True):
            continue
        yield from measured(cache, machine, f"sdpa {backend} {form}", partial(_sdpa, cache, machine, backend, form))


def _sdpa(cache: Cache, machine: Machine, backend: str, form: str) -> tuple[list[Callable], int]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    name = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
    kind, kv, size = getattr(SDPBackend, name[backend]), cache.kv, cache.bytes
    if backend == "math" and 3 * cache.bytes > machine.room():
        raise LeftOut("memory: it makes float32 copies")
    if form == "expanded":
        size *= cache.G
        if size > machine.room():
            raise LeftOut(f"memory: {size / 1e9:.0f} GB of copied keys and values")
        kv = [tuple(x.repeat_interleave(cache.G, 1) for x in layer) for layer in kv[: max(1, len(kv) // cache.G)]]
    q = cache.folded() if form == "folded" else cache.q

    def call(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=form == "gqa")

    return [partial(call, *layer) for layer in kv], size


def flex(facts: dict, machine: Machine) -> Iterator[dict]:
    """Compiled for the case: ten seconds and more before the first figure."""
    cache = Cache(facts, machine)
    for name, make in (("flex", _flex), ("flex paged", _flex_paged)):
        yield from measured(cache, machine, name, partial(make, cache, machine))


def _compiled(machine: Machine) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if machine.dry:  # its plain path: nothing is compiled, and the blocks of a mask are not looked at
        return flex_attention
    return torch.compile(flex_attention, dynamic=False)


def _flex(cache: Cache, machine: Machine) -> tuple[list[Callable], int]:
    attend = _compiled(machine)
    return [partial(attend, cache.q, k, v, enable_gqa=True) for k, v in cache.kv], cache.bytes


def _flex_paged(cache: Cache, machine: Machine) -> tuple[list[Callable], int]:
    from torch.nn.attention.flex_attention import BlockMask

    N, Hk, n, D = cache.kv[0][0].shape
    per_seq = n // PAGE
    if not per_seq:
        raise LeftOut(f"pages of {PAGE} tokens, a context of {n}")
    if machine.dry:
        raise LeftOut("only its compiled form reads through the block mask")
    ids = torch.randperm(N * per_seq, generator=torch.Generator().manual_seed(0)).to(machine.device)
    table = torch.zeros(N, 1, 1, N * per_seq, dtype=torch.int32, device=machine.device)
    table[:, 0, 0, :per_seq] = ids.view(N, per_seq)
    full = torch.full((N, 1, 1), per_seq, dtype=torch.int32, device=machine.device)
    mask = BlockMask.from_kv_blocks(
        full * 0, torch.zeros_like(table), full, table, BLOCK_SIZE=(PAGE, PAGE), seq_lengths=(1, N * n)
    )
    pools = []
    for k, v in cache.kv:  # page ids[j] of the pool holds page j of the contiguous cache
        pages = [x.view(N, Hk, per_seq, PAGE, D).transpose(0, 1).reshape(Hk, N * per_seq, PAGE, D) for x in (k, v)]
        pool = [torch.empty_like(x).index_copy_(1, ids, x).view(1, Hk, N * n, D) for x in pages]
        pools.append(pool)
    attend = _compiled(machine)
    return [partial(attend, cache.q, k, v, block_mask=mask, enable_gqa=True) for k, v in pools], cache.bytes


def packages(facts: dict, machine: Machine) -> Iterator[dict]:
    """Paged kernels of other projects; a row for each, present or not."""
    missing = [p for p in PACKAGES if importlib.util.find_spec(p) is None]
    cache = None if len(missing) == len(PACKAGES) else Cache(facts, machine)
    for name in PACKAGES:
        if name in missing:
            yield {"side": name, **failure(Absent("not installed"))}
        else:
            make = {"flashinfer": _flashinfer, "vllm": _vllm}.get(name, partial(_flash, name))
            yield from measured(cache, machine, name, partial(make, cache))


def _paged(cache: Cache, page: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """[layers] of k, v [pages, page, Hk, D], and the table int32 [N, pages of a sequence]."""
    N, Hk, n, D = cache.kv[0][0].shape
    if n % page:
        raise LeftOut(f"pages of {page} tokens, a context of {n}")
    count = N * n // page
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(cache.q.device)
    pools = []
    for layer in cache.kv:
        pages = [x.transpose(1, 2).reshape(count, page, Hk, D) for x in layer]
        pools.append(tuple(torch.empty_like(x).index_copy_(0, ids, x) for x in pages))
    return pools, ids.view(N, -1).int()


def _flash(name: str, cache: Cache) -> tuple[list[Callable], int]:
    """flash_attn (FlashAttention 2), flash_attn_interface (3)."""
    attend = importlib.import_module(name).flash_attn_with_kvcache
    pools, table = _paged(cache, 256)
    lengths = torch.full((cache.N,), cache.n, dtype=torch.int32, device=table.device)
    keyword = "page_table" if name == "flash_attn_interface" else "block_table"
    q = cache.q.transpose(1, 2).contiguous()
    return [partial(attend, q, k, v, cache_seqlens=lengths, **{keyword: table}) for k, v in pools], cache.bytes


def _flashinfer(cache: Cache) -> tuple[list[Callable], int]:
    import flashinfer

    page = 16
    pools, table = _paged(cache, page)
    space = torch.zeros(128 * 2**20, dtype=torch.uint8, device=table.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=cache.G >= 4)
    indptr = torch.arange(cache.N + 1, dtype=torch.int32, device=table.device) * table.shape[1]
    last = torch.full((cache.N,), page, dtype=torch.int32, device=table.device)
    wrapper.plan(
        indptr, table.flatten(), last, cache.Hk * cache.G, cache.Hk, cache.D, page, q_data_type=cache.q.dtype,
        kv_data_type=cache.q.dtype,
    )  # fmt: skip
    q = cache.q[:, :, 0].contiguous()
    return [partial(wrapper.run, q, layer) for layer in pools], cache.bytes


def _vllm(cache: Cache) -> tuple[list[Callable], int]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func as attend

    pools, table = _paged(cache, 16)
    lengths = torch.full((cache.N,), cache.n, dtype=torch.int32, device=table.device)
    rows = torch.arange(cache.N + 1, dtype=torch.int32, device=table.device)
    q = cache.q[:, :, 0].contiguous()
    options = {"max_seqlen_q": 1, "cu_seqlens_q": rows, "max_seqlen_k": cache.n, "seqused_k": lengths}
    return [partial(attend, q, k, v, block_table=table, causal=True, **options) for k, v in pools], cache.bytes


def measured(
    cache: Cache, machine: Machine, side: str, make: Callable[[], tuple[list[Callable], int]]
) -> Iterator[dict]:  # fmt: skip
    """A row of a peer. Its refusals are rows too; an error that ruins the device goes on."""
    try:
        calls, size = make()
        out = calls[0]()
        out = out[0] if isinstance(out, tuple) else out
        want = cache.expected()
        error = float((out[0].float().reshape(want.shape) - want).abs().max() / want.square().mean().sqrt())
        if not error <= 0.05:
            raise ArithmeticError(f"wrong: off by {error:.2g} of the outputs' root mean square")
        yield {"side": side, "bytes": size, "layers": len(calls), "rel_error": error, **machine.time(calls)}
    except Exception as error:
        if broken(error):
            raise
        yield {"side": side, **failure(error, REFUSALS)}
    finally:
        machine.clean()
