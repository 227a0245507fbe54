"""The lean step on the CPU kernels (kernels/cpu/step.cpp): one call for all layers where kernels read and write the
method's pages too, else two a layer and the method's own between them.

For float32 models; `kind` says what the matrices are made of. Between them everything stays float32.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.hugepages import Arena
from kvlab.kernels.cpu.dense import LayerParts, Matrix, Step, interleaved, padded
from kvlab.kernels.cpu.turn import Turn

KINDS = {"model": "float32", "bf16": "bf16", "int8": "int8"}


class NativeBody:
    """See lean.Body. x is the residual stream, [T, E padded to 32]."""

    whole = True

    def __init__(self, model: nn.Module, library: ctypes.CDLL, variant: str, kind: str) -> None:
        body, config = model.model, model.config
        self.H, self.Hk = config.num_attention_heads, config.num_key_value_heads
        self.D, self.kind = body.layers[0].self_attn.head_dim, KINDS[kind]
        self.weight = body.embed_tokens.weight.detach()
        self.pad = padded(self.weight.shape[1]) - self.weight.shape[1]
        norm, self._arena = body.norm, Arena()
        layers = [self._layer(layer) for layer in body.layers]
        head = Matrix(self.kind, model.lm_head.weight, model.lm_head.bias, self._arena)
        self.step = Step(library, layers, norm.weight.detach(), norm.variance_epsilon, head)
        self.facts = {"linear": f"{variant} {self.kind}"}

    def _matrix(self, *modules: nn.Linear, join=torch.cat) -> Matrix:
        bias = None if modules[0].bias is None else join([m.bias.detach() for m in modules])
        return Matrix(self.kind, join([m.weight.detach() for m in modules]), bias, self._arena)

    def _layer(self, layer: nn.Module) -> LayerParts:
        a, m, qk_norm, qk_eps = layer.self_attn, layer.mlp, None, 0.0
        if hasattr(a, "q_norm"):
            each = a.q_norm.weight.detach().expand(self.H, -1), a.k_norm.weight.detach().expand(self.Hk, -1)
            qk_norm, qk_eps = torch.cat(each).contiguous(), a.q_norm.variance_epsilon
        return LayerParts(
            qkv=self._matrix(a.q_proj, a.k_proj, a.v_proj),
            o=self._matrix(a.o_proj),
            gate_up=self._matrix(m.gate_proj, m.up_proj, join=lambda pair: interleaved(*pair)),
            down=self._matrix(m.down_proj),
            norm=layer.input_layernorm.weight.detach().contiguous(),
            mlp_norm=layer.post_attention_layernorm.weight.detach().contiguous(),
            qk_norm=qk_norm,
            eps=layer.input_layernorm.variance_epsilon,
            qk_eps=qk_eps,
            turned=self.H + self.Hk,
            dim=self.D,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight)
        return F.pad(x, (0, self.pad)) if self.pad else x

    def angles(self, rope: Tensor) -> Tensor:
        return rope

    def front(self, i: int, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.step.front(i, x, angles)
        heads = qkv.unflatten(1, (-1, self.D)).transpose(0, 1)[None]
        return heads.narrow(1, 0, self.H), heads.narrow(1, self.H, self.Hk), heads.narrow(1, self.H + self.Hk, self.Hk)

    def all_layers(self, x: Tensor, angles: Tensor, turn: Turn) -> bool:
        return turn.run(self.step, x, angles, self.H, self.Hk)

    def back(self, i: int, attended: Tensor, x: Tensor) -> None:
        self.step.back(i, attended, x)

    def head(self, x: Tensor) -> Tensor:
        return self.step.head(x)
