"""kvlab: every KV-cache compression idea in one paged runtime, on real models, judged by real bytes.

import kvlab
lab = kvlab.load("smollm2", method="turboquant", bits_k=4, bits_v=4)
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Lab", "load"]

if TYPE_CHECKING:
    from kvlab.lab import Lab, load


def __getattr__(name: str):
    # torch and transformers take seconds to import: only when the API is used
    if name in __all__:
        from kvlab import lab

        return getattr(lab, name)
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
