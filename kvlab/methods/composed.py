"""composed: a pruner and a quantizer in one pipeline. Prune first, then quantize the survivors.

    python -m kvlab +method=snapkv+turboquant
    python -m kvlab +method=composed +method@method.stages.0=snapkv +method@method.stages.1=int4

Order   exact q, k, v -> prune's scores -> quantize's encode -> attend -> evict -> compaction. With a codec that seals
        whole blocks (kivi) the prompt stays exact until the pruner has acted, so that scales are computed over
        survivors
Refused two pruners, two quantizers, a pruner that evicts while decoding over a codec whose blocks share scales
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvlab.codec import Codec
from kvlab.compressor import Compressor
from kvlab.errors import ConfigError
from kvlab.families.pruner import Pruner
from kvlab.methods.full import Full

Part = Codec | Pruner | Compressor


def compose(parts: Iterable[Part], dtype: str = "model") -> Compressor:
    """At most one pruner and at most one codec, in any order. `dtype`: storage of a pruner without a codec."""
    parts = list(parts)
    if len(parts) == 1 and isinstance(parts[0], Compressor):
        return parts[0]
    other = [type(p).__name__ for p in parts if not isinstance(p, (Codec, Pruner))]
    if other:
        raise ConfigError(f"composed: a pipeline is made of a pruner and a codec, got {', '.join(other)}")
    pruners = [p for p in parts if isinstance(p, Pruner)]
    codecs = [c for c in parts if isinstance(c, Codec)]
    for kind, found in (("pruners", pruners), ("quantizers", codecs)):
        if len(found) > 1:
            names = " and ".join(p.label() for p in found)
            raise ConfigError(
                f"composed: a pipeline takes one of each kind, got two {kind}: {names}. Drop one of them."
            )
    return Compressor(codecs[0] if codecs else Full(dtype), pruners[0] if pruners else None)


def composed(stages: Mapping[str, Part] | Iterable[Part]) -> Compressor:
    """`stages` as a list, or as a mapping whose keys give the order (what Hydra's package overrides make)."""
    if isinstance(stages, Mapping):
        stages = [stages[key] for key in sorted(stages, key=str)]
    stages = list(stages)
    if not stages:
        raise ConfigError(
            "composed: no stages. Use +method=snapkv+int4, or +method=composed "
            "+method@method.stages.0=snapkv +method@method.stages.1=int4"
        )
    return compose(stages)
