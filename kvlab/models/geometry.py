"""The shape of a transformers model's KV cache, read from its config and checked against its modules."""

from __future__ import annotations

import sys

import torch

from kvlab.cache.layout import Geom
from kvlab.errors import ConfigError


def geometry(model: torch.nn.Module, name: str) -> Geom:
    """Geom of a causal LM. ConfigError names what kvlab does not cover (soft-capped logits, mixed head counts)."""
    config = model.config.get_text_config()
    modules = [
        m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling") and hasattr(m, "head_dim")
    ]
    L = config.num_hidden_layers
    if len(modules) != L:
        raise ConfigError(
            f"{name}: {len(modules)} attention modules for {L} layers. kvlab needs one softmax attention per layer "
            "(llama, qwen2, qwen3, mistral, gemma3 are covered; linear-attention layers are not)."
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(
            f"{name}: soft-capped attention logits (gemma2) are not covered. Use gemma3 or another family."
        )
    scales = {float(m.scaling) for m in modules}
    if len(scales) > 1:
        raise ConfigError(f"{name}: attention scale differs between layers ({sorted(scales)}), which is not covered")
    H = config.num_attention_heads
    Hk = getattr(config, "num_key_value_heads", None) or H
    D = getattr(config, "head_dim", None) or config.hidden_size // H
    return Geom(
        L=L,
        H=H,
        Hk=Hk,
        D=D,
        dtype=next(model.parameters()).dtype,
        scale=scales.pop(),
        windows=windows(config, L),
        inv_freq=rope(model, modules, L),
        model=name,
    )


def windows(config, L: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, None = full attention."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if size is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * L
    if kinds is None:
        return (size,) * L
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def rope(model: torch.nn.Module, attention: list[torch.nn.Module], L: int) -> tuple[tuple[float, ...], ...]:
    """RoPE frequencies of each layer, or () when keys cannot be turned: no RoPE, another pairing of channels than
    (j, j + r/2), or frequencies that change with the length (dynamic NTK)."""
    rotate_half = getattr(sys.modules[type(attention[0]).__module__], "rotate_half", None)
    if rotate_half is None or rotate_half(torch.arange(4.0)).tolist() != [-2.0, -3.0, 0.0, 1.0]:
        return ()
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"] * L
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if not names:
            continue
        types = getattr(module, "rope_type", "default")
        used = set(types.values()) if isinstance(types, dict) else {types}
        if used & {"dynamic", "longrope"}:
            return ()
        of = [f"{kind}_inv_freq" if f"{kind}_inv_freq" in names else "inv_freq" for kind in kinds]
        return tuple(tuple(getattr(module, name).float().tolist()) for name in of)
    return ()
