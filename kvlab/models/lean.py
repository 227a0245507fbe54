"""The lean step: a llama-like model as a dozen torch calls per layer, on the weights of a transformers model.

x [T, E]      packed rows of all sequences
per layer     norm -> q, k, v in one product -> rope -> Compressor.write -> Compressor.attend -> o -> + x
              norm -> gate, up in one product -> silu(gate) * up -> down -> + x
at the end    norm and head of the wanted rows only

Covered are LlamaForCausalLM (llama, smollm2, ...), Qwen2, Qwen3 and Mistral as transformers builds them; `unsupported`
says what keeps a model out. Everything else runs the transformers forward (`seam`), which is also the oracle:
tests/models/test_lean.py. The rope angles come from the model's own module.

The residual stream, the norms, rope, keys and values stay in the model's dtype whatever `weights` is: bf16 and int8
change what the matrices are made of (`weights`), not what the cache is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvlab.cache.paged import StepPages
from kvlab.compressor import Compressor
from kvlab.errors import ConfigError
from kvlab.models.geometry import windows
from kvlab.models.load import Loaded
from kvlab.models.seam import Runner
from kvlab.models.weights import Linear, Weights, check_kind

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList)  # besides its family's own modules and the activation


class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight = x / |(x, c)| * sqrt(E) weight with c = sqrt(E eps).

    So the residual stream carries c as one more channel, and a norm is three calls; F.rms_norm is seven inside, which
    made a tenth of a decode step. float32 inside, like transformers'.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weight = module.weight.detach().float() * module.weight.numel() ** 0.5
        self.c = (module.weight.numel() * module.variance_epsilon) ** 0.5

    def __call__(self, x: Tensor, stream: Tensor) -> Tensor:
        """x [T, E] is stream [T, E + 1] without the last channel, which is c."""
        size = torch.linalg.vector_norm(stream, 2, -1, keepdim=True, dtype=torch.float32)
        out = x.div(size).mul_(self.weight)
        return out if out.dtype == x.dtype else out.to(x.dtype)


@dataclass(frozen=True)
class Layer:
    norm: Norm
    qkv: Linear  # E -> (H + 2 Hk) D
    qk_norm: tuple[Tensor, float] | None  # weight [H + Hk, 1, D], eps
    o: Linear
    mlp_norm: Norm
    gate_up: Linear  # E -> 2 I
    down: Linear


class LeanRunner:
    """`Runner` for the covered models. Leaves the transformers model as it is, but may move its weights (`weights`).

    min_rows: a product is padded to at most this many rows, where its bits would depend on the number of rows.
    """

    def __init__(self, model: nn.Module, weights: str = "model", min_rows: int = 4) -> None:
        if why := unsupported(model):
            raise ConfigError(f"runtime.step=lean: {why}. Use runtime.step=auto or hf.")
        config, body = model.config, model.model
        store = Weights(weights, model.lm_head.weight, min_rows)
        self.H, self.D = config.num_attention_heads, body.layers[0].self_attn.head_dim
        self.Hk, self.vocab = config.num_key_value_heads, model.lm_head.out_features
        self.wide = body.layers[0].mlp.gate_proj.out_features
        with torch.no_grad():
            self.layers = [self._layer(layer, store) for layer in body.layers]
            self.head = store.linear(model.lm_head)
        self.embed, self.rotary, self.norm = body.embed_tokens.weight.detach(), body.rotary_emb, Norm(body.norm)
        self.facts = {"step": "lean", "weights": weights, **store.facts}

    def _layer(self, layer: nn.Module, store: Weights) -> Layer:
        a, m, qk_norm = layer.self_attn, layer.mlp, None
        if hasattr(a, "q_norm"):
            each = a.q_norm.weight.expand(self.H, 1, -1), a.k_norm.weight.expand(self.Hk, 1, -1)
            qk_norm = torch.cat(each), a.q_norm.variance_epsilon
        return Layer(
            norm=Norm(layer.input_layernorm),
            qkv=store.linear(a.q_proj, a.k_proj, a.v_proj),
            qk_norm=qk_norm,
            o=store.linear(a.o_proj),
            mlp_norm=Norm(layer.post_attention_layernorm),
            gate_up=store.linear(m.gate_proj, m.up_proj),
            down=store.linear(m.down_proj),
        )

    def forward(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, compressor: Compressor, pages: StepPages
    ) -> Tensor:
        """tokens, positions int64 [T]; rows int64 [k]: packed rows whose logits are wanted. Returns float [k,
        vocab]."""
        stream = F.pad(F.embedding(tokens, self.embed), (0, 1), value=self.norm.c)
        x = stream[:, :-1]
        cos, sin = self._angles(x, positions)
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, layer.norm(x, stream), cos, sin)
            compressor.write(i, k, v, pages)
            out = compressor.attend(i, q, k, v, pages)
            x.add_(layer.o(out.view(len(tokens), -1)))
            both = layer.gate_up(layer.mlp_norm(x, stream))
            gate, up = both.narrow(1, 0, self.wide), both.narrow(1, self.wide, self.wide)
            x.add_(layer.down(F.silu(gate).mul_(up)))
        if not len(rows):
            return x.new_empty(0, self.vocab)
        last = stream.index_select(0, rows)
        return self.head(self.norm(last[:, :-1], last))

    def _angles(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D]; the sine of the first half of the channels is negative (see `_qkv`)."""
        cos, sin = self.rotary(x, positions[None])
        return cos[0], torch.cat([-sin[0, :, : self.D // 2], sin[0, :, self.D // 2 :]], -1)

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, H, T, D] and k [1, Hk, T, D] after rope, v [1, Hk, T, D]; each row's channels lie together.

        Rope turns channel j with j + D/2: rolled by half, every channel meets its partner.
        """
        heads = layer.qkv(x).view(1, x.shape[0], -1, self.D).transpose(1, 2)
        qk = heads.narrow(1, 0, self.H + self.Hk)  # narrow: split and chunk take twice as long
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self.D,), None, layer.qk_norm[1]).mul_(layer.qk_norm[0])
        qk = torch.addcmul(qk * cos, qk.roll(self.D // 2, -1), sin)
        return qk.narrow(1, 0, self.H), qk.narrow(1, self.H, self.Hk), heads.narrow(1, self.H + self.Hk, self.Hk)


def unsupported(model: nn.Module) -> str | None:
    """Why the lean step cannot stand for this model's forward, in words; None when it can."""
    kind, config = type(model), model.config
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is none of transformers' {', '.join(FAMILIES)}"
    for name, module in model.named_modules():
        own = type(module).__module__ == kind.__module__ or name.endswith("mlp.act_fn")
        if not own and type(module) not in PLAIN:
            return f"its module {name} is a {type(module).__qualname__}, not what transformers builds"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"its module {name or 'itself'} has hooks or a forward of its own, which would not run"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if len(kinds := {(p.device, p.dtype) for p in model.parameters()}) > 1:
        return f"its weights have several devices or dtypes ({', '.join(sorted(map(str, kinds)))})"
    return next(_odd_layers(model), None)


def _odd_layers(model: nn.Module) -> Iterator[str]:
    config, body = model.config, model.model
    rotary = 2 * body.rotary_emb.inv_freq.shape[-1]
    for i, (layer, window) in enumerate(zip(body.layers, windows(config, len(body.layers)))):
        a, m = layer.self_attn, layer.mlp
        own = config.sliding_window if "Mistral" in type(a).__name__ else getattr(a, "sliding_window", None)
        if own != window:
            yield f"layer {i} attends to a window of {own}, its config says {window}"
        if rotary != a.head_dim:
            yield f"rope turns {rotary} of {a.head_dim} channels"
        for group in ((a.q_proj, a.k_proj, a.v_proj), (m.gate_proj, m.up_proj)):
            if len({p.bias is None for p in group}) > 1:
                yield f"layer {i} has a bias on some of the matrices that are joined, not on all"


def runner(loaded: Loaded, step: str = "auto", weights: str = "model", min_rows: int = 4) -> Runner | LeanRunner:
    """What runs the model: lean where it is covered and not declined. `facts` of a runner say which, for result rows.

    Converted weights stay with `loaded`, which keeps the newest kind: labs of one model share them.
    """
    check_kind(weights)
    why = "runtime.step=hf" if step == "hf" else unsupported(loaded.model)
    if why and (step == "lean" or weights != "model"):
        asked = "runtime.step=lean" if step == "lean" else f"runtime.weights={weights}"
        raise ConfigError(
            f"{asked}: the lean step does not cover {loaded.id}: {why}. Ways out: runtime.step=auto with "
            "runtime.weights=model, which runs the transformers forward, or another model."
        )
    if why:
        return Runner(loaded.model, min_rows)
    key = (weights, min_rows)
    if key not in loaded.lean:
        loaded.lean.clear()
        loaded.lean[key] = LeanRunner(loaded.model, weights, min_rows)
    return loaded.lean[key]
