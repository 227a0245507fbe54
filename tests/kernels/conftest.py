"""The fixture that runs a test on every backend of this process (backends.py), and where Triton's tests run."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `import backends`, from any folder below

import backends

if backends.INTERPRETED:
    import interpreter

    interpreter.hasten()


@pytest.fixture(params=backends.names())
def backend(request, monkeypatch) -> backends.Backend:
    return backends.make(request.param, monkeypatch)


def pytest_collect_directory(path, parent):
    """gpu/ is not even imported where its kernels cannot run."""
    if path == Path(__file__).parent / "gpu" and no_triton():
        return Elsewhere.from_parent(parent, path=path)


def no_triton() -> str:
    if not importlib.util.find_spec("triton"):
        return "the package triton is not installed"
    if not (backends.INTERPRETED or torch.cuda.is_available()):
        return "no GPU; TRITON_INTERPRET=1 python -m pytest tests/kernels/gpu runs Triton's kernels without one"
    return ""


class Elsewhere(pytest.Dir):
    """A folder of tests for another process: one skip that says why."""

    def collect(self):
        pytest.skip(no_triton())
