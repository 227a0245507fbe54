"""Every page format that codecs have: what the kernels of each backend are tested with."""

from __future__ import annotations

from kvlab.codec import Codec
from kvlab.names import config, names
from kvlab.registry import instantiate

DIMS = (32, 64, 80, 96, 112, 128, 256)
BLOCKS = (16, 32, 64, 128)
META = ("bfloat16", "float32")
FORMATS: dict[str, tuple[str, dict]] = {
    **{f"full {t}": ("full", {"dtype": t}) for t in ("float32", "bfloat16", "float16")},
    **{f"fp8 {f}": ("fp8", {"format": f}) for f in ("e4m3", "e5m2")},
    **{f"int8 g{g}": ("int8", {"group": g}) for g in (8, 16, 32, "D")},
    **{f"int4 {b} g{g}": ("int4", {"bits": b, "group": g}) for b in (2, 3, 4) for g in (8, 16, 32, "D")},
    **{f"kivi k{b} v{9 - b} g{g}": ("kivi", {"bits_k": b, "bits_v": 9 - b, "group": g})
       for b in range(1, 9) for g in (16, 32, 64)},
    **{f"turboquant k{b} v{9 - b}": ("turboquant", {"bits_k": b, "bits_v": 9 - b}) for b in range(1, 9)},
    **{f"prod k{b} v{b}": ("turboquant", {"bits_k": b, "bits_v": b, "variant": "prod"}) for b in range(1, 9)},
    **{f"turboquant {o} {v}": ("turboquant", {"share" if o in ("head", "all") else "rotation": o, "variant": v})
       for o in ("head", "all", "identity", "rht") for v in ("mse", "prod")},
    **{f"{m} {t}": (m, {"meta_dtype": t, "group": 16}) for m in ("int8", "int4", "kivi") for t in META},
    **{f"turboquant {t}": ("turboquant", {"norm_dtype": t, "variant": "prod"}) for t in META},
}  # fmt: skip
DEFAULT = {n: config(n).get("group") for n in names()}
FORMATS |= {n: (n, {}) for n in names() if n != "composed" and isinstance(instantiate(config(n)), Codec)}


def options_of(name: str, D: int) -> dict:
    """A format's options at a head dim."""
    return {k: D if v == "D" else v for k, v in FORMATS[name][1].items()}


def fits(method: str, options: dict, D: int, block: int) -> bool:
    group = options.get("group", DEFAULT[method])
    group = D if group in ("D", None) else group
    if group < 16 and D > 128:  # more runs of codes than the kernels hold: the torch path's
        return False
    if options.get("rotation") == "rht" and D & (D - 1):
        return False
    return D % group == 0 and (method != "kivi" or block % group == 0)
