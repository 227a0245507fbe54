"""kvlab's side of the whole-step benchmarks: what is timed is a step that does something."""

from __future__ import annotations

import sys

import pytest
from front import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from ours import Ours, setting

from kvlab.models.load import ModelCfg, load


def test_a_step_without_tokens_is_an_error_and_not_a_fast_one():
    """A bench whose sequences had no room left once measured the full cache at 0.02 ms."""
    ours = Ours(load(ModelCfg(name="tiny_llama")))
    step = ours.step(ours.lab(setting("full"), 2, 20, 3))
    with pytest.raises(RuntimeError, match="no more room"):
        for _ in range(5):
            step()
