"""What every test runs under: one torch thread, no hub, no network but loopback, reproducible hypothesis, dirty memory.

A test marked `slow` runs only when the marker is asked for: `python -m pytest -m slow` (make soak).
"""

import os
import socket
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))  # `import toys`

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=_quiet)
settings.register_profile("dev", deadline=None, suppress_health_check=_quiet)
settings.register_profile(  # HYPOTHESIS_PROFILE=hunt: other examples every time, the first failure as it is
    "hunt", deadline=None, suppress_health_check=_quiet, phases=[Phase.generate], report_multiple_bugs=False
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes, not seconds; runs only with -m slow")


def pytest_collection_modifyitems(config, items):
    if "slow" in (config.getoption("-m") or ""):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


class NetworkUsed(OSError):
    """A test tried to reach another machine."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Connecting anywhere but to this machine fails."""
    connect = socket.socket.connect

    def guarded(self, address):
        host = address[0] if isinstance(address, tuple) else None  # a path: a socket of this machine
        if host is None or host in ("localhost", "::1") or str(host).startswith("127."):
            return connect(self, address)
        raise NetworkUsed(f"a test tried to connect to {address!r}")

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded)


@pytest.fixture
def garbage():
    """garbage(engine or cache): every page starts as random bytes, a quarter of the floats NaN. Returns its
    argument."""
    from toys import dirty

    return dirty
