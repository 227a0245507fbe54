"""Matrices of the lean step in torch: those of the transformers model, stored in the form that runs fastest.

kind    form     stored                                      arithmetic
model   joined   views of the model's parameters             F.linear in the model's dtype
model   blocked  a float32 copy in oneDNN's blocked order    oneDNN, float32; chosen for float32 weights on a CPU
bf16    bf16     a bfloat16 copy                             bfloat16 products, result rounded to bfloat16

int8 is the CPU kernels' alone (kernels/cpu/dense.py).
Matrices over the same input (q, k, v; gate, up) are joined into one [sum of outputs, inputs]. Copies stand beside the
model's own weights, which stay usable (a float32 model read from a file is mapped: the kernel drops its pages when
memory is short).

A sequence alone must equal itself in a batch, bit for bit, so a row's sums may not depend on the number of rows.
Blocked matrices have that by their arithmetic. F.linear does not: below 4 rows of float32 it takes other code.
What a form needs is probed, since it differs between CPUs, and only such products are padded, not the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.errors import ConfigError

KINDS = ("model", "bf16", "int8")
PROBE = 64  # rows that a product of few rows is compared with

log = logging.getLogger(__name__)


class Linear:
    """x [T, inputs] -> [T, outputs], both in the model's dtype. Fewer rows than `rows` are padded with zeros."""

    form = ""
    rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        short = self.rows - x.shape[0]
        return self.product(x) if short <= 0 else self.product(F.pad(x, (0, 0, 0, short)))[: x.shape[0]]

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Joined(Linear):
    form = "joined"


class Blocked(Linear):
    form = "blocked"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # the number of rows is what the order is chosen for; in that for 1 row, bits depend on the number of rows
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight, PROBE), bias)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class BFloat16(Linear):
    form = "bf16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.bfloat16(), None if bias is None else bias.bfloat16())

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).to(x.dtype)


class Weights:
    """Makes the matrices of one model in one kind. like: one of its weights (device, dtype). ConfigError where this
    machine or this torch cannot."""

    def __init__(self, kind: str, like: Tensor, min_rows: int = 4) -> None:
        check_kind(kind)
        self.min_rows, on_cpu = min_rows, like.device.type == "cpu"
        self._rows: dict[tuple[int, int], int] = {}
        if kind == "bf16":
            if on_cpu and not (_has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
                log.warning(
                    "runtime.weights=bf16: this CPU has no bfloat16 products; a prompt is slower than in float32"
                )
            self.make = BFloat16
        else:
            self.make = Blocked if on_cpu and like.dtype == torch.float32 and _has_onednn() else None
        self.facts = {"linear": self.make.form if self.make else Joined.form}

    def linear(self, *modules: nn.Linear) -> Linear:
        """One matrix of modules that take the same input; their outputs side by side."""
        weights, biases = [m.weight for m in modules], [m.bias for m in modules if m.bias is not None]
        if self.make is None:
            made = Joined(join(weights), join(biases) if biases else None)
        else:
            made = self.make(torch.cat(weights).detach(), torch.cat(biases).detach() if biases else None)
        shape = (modules[0].in_features, sum(m.out_features for m in modules))
        if shape not in self._rows:
            self._rows[shape] = stable_rows(made, weights[0], self.min_rows)
        made.rows = self._rows[shape]
        return made


def check_kind(kind: str) -> None:
    """ConfigError for a kind that there is not."""
    if kind not in KINDS:
        raise ConfigError(f"runtime.weights={kind!r} is not one of {', '.join(KINDS)}")


def join(parts: Sequence[nn.Parameter]) -> Tensor:
    """Weights (or biases) below each other as one tensor, of which the parameters become views: nothing is held twice,
    no value changes. Parameters that already lie like this are not copied."""
    if _adjacent(parts):
        shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
        return parts[0].detach().as_strided(shape, parts[0].stride())
    whole = torch.cat([p.detach() for p in parts])
    for part, view in zip(parts, whole.split([p.shape[0] for p in parts])):
        part.data = view
    return whole


def stable_rows(linear: Linear, like: Tensor, most: int) -> int:
    """The least number of rows, up to `most`, from which on a row's bits do not depend on how many there are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE, like.shape[1], generator=generator).to(like.device, like.dtype)
    want = linear.product(x)
    differ = [n for n in range(1, most) if not torch.equal(linear.product(x[:n]), want[:n])]
    return max(differ, default=0) + 1


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Do these tensors follow each other in one storage?"""
    at, storage = parts[0].storage_offset(), parts[0].untyped_storage().data_ptr()
    for p in parts:
        if p.untyped_storage().data_ptr() != storage or p.storage_offset() != at or not p.is_contiguous():
            return False
        at += p.numel()
    return True


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
