"""The lean step: a llama-like model as few calls per layer, on the weights of a transformers model.

x [T, E]      packed rows of all sequences
per layer     norm -> q, k, v in one product -> rope -> Compressor.write -> Compressor.attend -> o -> + x
              norm -> gate, up in one product -> silu(gate) * up -> down -> + x
at the end    norm and head of the wanted rows only

Covered are LlamaForCausalLM (llama, smollm2, ...), Qwen2, Qwen3 and Mistral as transformers builds them; `unsupported`
says what keeps a model out. Everything else runs the transformers forward (`seam`), which is also the oracle:
tests/models/test_lean.py. The rope angles come from the model's own module.

What is around attention runs on the CPU kernels (lean_native) for float32 models on a CPU, else in torch (lean_torch).
The residual stream, the norms, rope, keys and values stay in the model's dtype whatever `weights` is: bf16 and int8
change what the matrices are made of, not what the cache is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvlab.cache.paged import StepPages
from kvlab.compressor import Compressor
from kvlab.errors import ConfigError
from kvlab.kernels import dispatch
from kvlab.kernels.cpu import lib
from kvlab.kernels.cpu.turn import Turn
from kvlab.models.geometry import windows
from kvlab.models.lean_native import NativeBody
from kvlab.models.lean_torch import TorchBody
from kvlab.models.load import Loaded
from kvlab.models.rope import Rope
from kvlab.models.seam import Runner
from kvlab.models.weights import Weights, check_kind

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
Angles = Any  # of a body's own
PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList)  # besides its family's own modules and the activation


class Body(Protocol):
    """A model without its attention. x [T, width]: the residual stream in a form of the body's own."""

    facts: dict[str, str]
    whole: bool  # it has `all_layers`

    def embed(self, tokens: Tensor) -> Tensor: ...

    def angles(self, rope: Tensor) -> Angles:
        """What `Rope` gives, [T, D], as `front` wants it; made once a step."""

    def all_layers(self, x: Tensor, angles: Angles, turn: Turn) -> bool:
        """All layers and their attention. False if that cannot be: x is to be made again, and done layer by layer."""

    def front(self, i: int, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, H, T, D] and k [1, Hk, T, D] after rope, v [1, Hk, T, D]; each row's channels lie together."""

    def back(self, i: int, attended: Tensor, x: Tensor) -> None:
        """attended [T, H * D]; changes x."""

    def head(self, x: Tensor) -> Tensor:
        """x [k, width] -> logits [k, vocab]"""


class LeanRunner:
    """`Runner` for the covered models. Leaves the transformers model as it is, but may move its weights (`weights`).

    kernels: as runtime.kernels. min_rows: a product of torch is padded to at most this many rows, where its bits would
    depend on the number of rows. compiled: torch.compile for what is between the products.
    """

    def __init__(
        self, model: nn.Module, weights: str = "model", kernels: str = "auto", min_rows: int = 4, compiled: bool = False
    ) -> None:
        check_kind(weights)
        if why := unsupported(model):
            raise ConfigError(f"runtime.step=lean: {why}. Use runtime.step=auto or hf.")
        self.rope, self.layers = Rope(model.model.rotary_emb), len(model.model.layers)
        self.vocab = model.lm_head.out_features
        with torch.no_grad():
            self.body = _body(model, weights, kernels, min_rows, compiled)
        self.facts = {"step": "lean", "weights": weights, **self.body.facts}

    def forward(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, compressor: Compressor, pages: StepPages
    ) -> Tensor:
        """tokens, positions int64 [T]; rows int64 [k]: packed rows, ascending, whose logits are wanted. Returns float
        [k, vocab]."""
        body, T = self.body, len(tokens)
        x = body.embed(tokens)
        angles = body.angles(self.rope(x, positions))
        turn = compressor.turn(pages) if body.whole else None
        if turn is not None and body.all_layers(x, angles, turn):
            compressor.counters.encoded_blocks += turn.encoded
        else:
            x = body.embed(tokens)  # it may have come half the way, to a number that the method below refuses in words
            for i in range(self.layers):
                q, k, v = body.front(i, x, angles)
                compressor.write(i, k, v, pages)
                body.back(i, compressor.attend(i, q, k, v, pages).view(T, -1), x)
        if not len(rows):
            return x.new_empty(0, self.vocab)
        return body.head(x if len(rows) == T else x.index_select(0, rows))


def _body(model: nn.Module, weights: str, kernels: str, min_rows: int, compiled: bool) -> Body:
    like = model.lm_head.weight
    native = like.device.type == "cpu" and dispatch.variant("cpu", kernels) != "triton"
    ours = lib.load(kernels) if native else lib.Loaded("torch", reason="those are for a CPU")
    if ours.library is not None and like.dtype == torch.float32:
        if compiled:
            raise ConfigError(
                "runtime.compile=true: the CPU kernels run the whole step, nothing is left for torch.compile. Use "
                "runtime.compile=false, or runtime.kernels=off."
            )
        return NativeBody(model, ours.library, ours.variant, weights)
    if weights == "int8":
        why = ours.reason or f"the model is {str(like.dtype).removeprefix('torch.')}, not float32"
        raise ConfigError(
            f"runtime.weights=int8 needs the CPU kernels and a float32 model: {why}. Ways out: runtime.weights=bf16 or "
            "model, runtime.kernels=auto, model.dtype=float32."
        )
    return TorchBody(model, Weights(weights, like, min_rows), compiled)


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


def runner(
    loaded: Loaded,
    step: str = "auto",
    weights: str = "model",
    kernels: str = "auto",
    min_rows: int = 4,
    compiled: bool = False,
) -> Runner | LeanRunner:
    """What runs the model: lean where it is covered and not declined. `facts` of a runner say which, for result rows.

    Converted weights stay with `loaded`, which keeps the newest kind: labs of one model share them.
    """
    check_kind(weights)
    why = "runtime.step=hf" if step == "hf" else unsupported(loaded.model)
    if why and (step == "lean" or weights != "model" or compiled):
        asked = "runtime.step=lean" if step == "lean" else f"runtime.weights={weights}"
        asked = "runtime.compile=true" if compiled else asked
        raise ConfigError(
            f"{asked}: the lean step does not cover {loaded.id}: {why}. Ways out: runtime.step=auto with "
            "runtime.weights=model, which runs the transformers forward, or another model."
        )
    if why:
        return Runner(loaded.model, min_rows)
    key = (weights, kernels, min_rows, compiled)
    if key not in loaded.lean:
        loaded.lean.clear()
        loaded.lean[key] = LeanRunner(loaded.model, weights, kernels, min_rows, compiled)
    return loaded.lean[key]
