"""The lean step in torch calls: a dozen per layer. What runs where the native one (lean_native.py) cannot, and its
reference. `runtime.compile` makes a kernel or two of what stands between the products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.models.weights import Linear, Weights


def rms(stream: Tensor, weight: Tensor) -> Tensor:
    """stream [T, E + 1] as Norm says -> [T, E]"""
    x = stream[:, :-1]
    size = torch.linalg.vector_norm(stream, 2, -1, keepdim=True, dtype=torch.float32)
    out = x.div(size).mul_(weight)
    return out if out.dtype == x.dtype else out.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel j turns with j + D/2: rolled by half, every channel meets its partner. x [1, heads, T, D]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def gated(both: Tensor) -> Tensor:
    """[T, 2 I] -> silu(first half) * second half"""
    wide = both.shape[-1] // 2
    return F.silu(both.narrow(-1, 0, wide)).mul_(both.narrow(-1, wide, wide))


class Small:
    """What stands between the products, each a kernel or two when compiled. Shapes are free: no compile per length."""

    def __init__(self, compiled: bool) -> None:
        each = [torch.compile(f, dynamic=True) for f in (rms, rope, gated)] if compiled else (rms, rope, gated)
        self.rms, self.rope, self.gated = each


class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight = x / |(x, c)| * sqrt(E) weight with c = sqrt(E eps).

    So the residual stream carries c as one more channel, and a norm is three calls; F.rms_norm is seven inside, which
    made a tenth of a decode step. float32 inside, like transformers'.
    """

    def __init__(self, module: nn.Module, small: Small) -> None:
        self.rms = small.rms
        self.weight = module.weight.detach().float() * module.weight.numel() ** 0.5
        self.c = (module.weight.numel() * module.variance_epsilon) ** 0.5

    def __call__(self, stream: Tensor) -> Tensor:
        """stream [T, E + 1], whose last channel is c -> [T, E]"""
        return self.rms(stream, self.weight)


@dataclass(frozen=True)
class Layer:
    norm: Norm
    qkv: Linear  # E -> (H + 2 Hk) D
    qk_norm: tuple[Tensor, float] | None  # weight [H + Hk, 1, D], eps
    o: Linear
    mlp_norm: Norm
    gate_up: Linear  # E -> 2 I
    down: Linear


class TorchBody:
    """See lean.Body. x is the residual stream with the norms' channel, [T, E + 1], in the model's dtype."""

    whole = False

    def __init__(self, model: nn.Module, store: Weights, compiled: bool = False) -> None:
        body, self.small = model.model, Small(compiled)
        self.H, self.Hk = model.config.num_attention_heads, model.config.num_key_value_heads
        self.D = body.layers[0].self_attn.head_dim
        self.layers = [self._layer(layer, store) for layer in body.layers]
        self.logits = store.linear(model.lm_head)
        self.weight, self.norm = body.embed_tokens.weight.detach(), Norm(body.norm, self.small)
        self.facts = store.facts | ({"compile": "inductor"} if compiled else {})

    def _layer(self, layer: nn.Module, store: Weights) -> Layer:
        a, m, qk_norm = layer.self_attn, layer.mlp, None
        if hasattr(a, "q_norm"):
            each = a.q_norm.weight.expand(self.H, 1, -1), a.k_norm.weight.expand(self.Hk, 1, -1)
            qk_norm = torch.cat(each), a.q_norm.variance_epsilon
        return Layer(
            norm=Norm(layer.input_layernorm, self.small),
            qkv=store.linear(a.q_proj, a.k_proj, a.v_proj),
            qk_norm=qk_norm,
            o=store.linear(a.o_proj),
            mlp_norm=Norm(layer.post_attention_layernorm, self.small),
            gate_up=store.linear(m.gate_proj, m.up_proj),
            down=store.linear(m.down_proj),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return F.pad(F.embedding(tokens, self.weight), (0, 1), value=self.norm.c)

    def angles(self, rope: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [T, D]. The sine of the first half of the channels is negative: see `front`."""
        cos, sin = rope.chunk(2, -1)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def front(self, i: int, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        layer, (cos, sin) = self.layers[i], angles
        heads = layer.qkv(layer.norm(x)).view(1, x.shape[0], -1, self.D).transpose(1, 2)
        qk = heads.narrow(1, 0, self.H + self.Hk)  # narrow: split and chunk take twice as long
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.D,), None, layer.qk_norm[1]).mul_(layer.qk_norm[0])
        qk = self.small.rope(qk, cos, sin)
        return qk.narrow(1, 0, self.H), qk.narrow(1, self.H, self.Hk), heads.narrow(1, self.H + self.Hk, self.Hk)

    def back(self, i: int, attended: Tensor, x: Tensor) -> None:
        layer, stream = self.layers[i], x[:, :-1]
        stream.add_(layer.o(attended))
        stream.add_(layer.down(self.small.gated(layer.gate_up(layer.mlp_norm(x)))))

    def head(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))
