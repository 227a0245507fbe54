"""The option files, the docstrings and the refusals of the codecs."""

import importlib
from dataclasses import fields
from pathlib import Path

import hydra.utils
import pytest
from omegaconf import OmegaConf

import kvlab
from kvlab.cache.layout import Geom
from kvlab.errors import ConfigError
from kvlab.methods.fp8 import Fp8
from kvlab.methods.full import Full
from kvlab.methods.int4 import Int4
from kvlab.methods.int8 import Int8
from kvlab.methods.kivi import Kivi
from kvlab.methods.turboquant import TurboQuant

CONFIGS = Path(kvlab.__file__).parent / "configs" / "method"
METHODS = ("full", "fp8", "int8", "int4", "kivi", "turboquant")


@pytest.mark.parametrize("method", METHODS)
def test_the_yaml_names_every_option_and_builds_the_default(method):
    text = (CONFIGS / f"{method}.yaml").read_text()
    assert (
        text.splitlines()[0].startswith(f"# configs/method/{method}.yaml") and "python -m kvlab" in text.splitlines()[0]
    )
    cfg = OmegaConf.create(text)
    built = hydra.utils.instantiate(cfg)
    assert set(cfg) - {"_target_"} == {f.name for f in fields(built)}
    assert built == type(built)(), "the file shows the defaults of the class"
    options = [line for line in text.splitlines() if not line.startswith(("#", "_target_"))]
    assert all("#" in line for line in options), "every key is explained"


@pytest.mark.parametrize("method", METHODS)
def test_the_docstring_is_the_spec(method):
    doc = importlib.import_module(f"kvlab.methods.{method}").__doc__
    for word in ("Stored", "Bytes", "Error", "Keys", "Source"):
        assert f"\n{word}" in doc, word


REFUSED = [
    (Full("int8"), 64, "full: dtype='int8'.*method=int8"),
    (Fp8("e3m4"), 64, "fp8: format='e3m4'"),
    (Int8(group=48), 64, "int8: group=48 does not divide head_dim 64 of toy.*method.group=64 or 32 or 16"),
    (Int8(meta_dtype="fp8"), 64, "int8: meta_dtype='fp8'"),
    (Int4(bits=5), 64, "int4: bits=5.*method=turboquant"),
    (Int4(), 80, "int4: group=64 does not divide head_dim 80"),
    (Kivi(bits_k=0), 64, "kivi: bits_k=0"),
    (
        Kivi(group=24),
        48,
        r"kivi: a block of 32 tokens is not a whole number of groups of 24.*block of 48.*method.group=32",
    ),
    (Kivi(group=128), 64, "kivi: group=128 does not divide head_dim"),
    (Kivi(window="paper"), 64, "window=paper .* not built yet.*window=unified"),
    (Kivi(window="none"), 64, "kivi: window='none'"),
    (Kivi(residual=-1), 64, "kivi: residual=-1"),
    (TurboQuant(rotation="rht"), 80, "rotation=rht needs a power-of-two head_dim, toy has 80.*method.rotation=haar"),
    (TurboQuant(bits_v=9), 64, "turboquant: bits_v=9"),
    (TurboQuant(bits_k=0), 64, "turboquant: bits_k=0"),
    (TurboQuant(scale="eden"), 64, "scale='eden' is unknown; choose one of none, norm"),
    (TurboQuant(variant="QJL"), 64, "variant='QJL'"),
    (TurboQuant(rounds=0), 64, "rounds=0"),
    (TurboQuant(norm_dtype="int8"), 64, "norm_dtype='int8'"),
]


@pytest.mark.parametrize(("codec", "D", "message"), REFUSED, ids=[m[:40] for *_, m in REFUSED])
def test_what_cannot_work_is_refused_with_a_way_out(codec, D, message):
    with pytest.raises(ConfigError, match=message) as e:
        codec.setup(Geom(L=3, H=9, Hk=3, D=D, model="toy"), 32)
    assert e.value.exit_code == 2
