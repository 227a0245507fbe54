"""Which kernels run where, and what is said where they cannot."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from kvlab.errors import ConfigError
from kvlab.kernels import dispatch


def without_triton(code: str) -> subprocess.CompletedProcess:
    """The code in a process in which `import triton` fails, as where it is not installed."""
    hide = "import sys, importlib.util as u; sys.modules['triton'] = None; real = u.find_spec\n"
    hide += "u.find_spec = lambda name, *a: None if name == 'triton' else real(name, *a)\n"
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, timeout=120)


def test_kvlab_runs_where_triton_is_not_installed():
    """Fails for an import of triton on the way to a run on a CPU."""
    code = "import kvlab; print(kvlab.load('tiny_llama', 'turboquant').generate([1, 2, 3], max_tokens=2).tokens)"
    done = without_triton(code)
    assert done.returncode == 0 and done.stdout.startswith("["), done.stderr


def test_a_gpu_without_triton_runs_in_torch_with_one_notice_and_never_where_it_was_asked_for():
    code = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from kvlab.kernels import dispatch\n"
        "print([dispatch.variant('cuda:0') for _ in range(3)], dispatch.backend('cuda:0'))\n"
        "dispatch.variant('cuda:0', 'triton')"
    )
    done = without_triton(code)
    assert done.stdout == "['torch', 'torch', 'torch'] None\n", done.stderr
    assert done.stderr.count("no Triton kernels") == 1
    assert "ConfigError" in done.stderr and "pip install triton" in done.stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cuda:0"])
@pytest.mark.parametrize("kernels", ["avx2", "avx512", "generic"])
def test_kernels_of_another_device_are_refused(device, kernels):
    with pytest.raises(ConfigError, match="is the CPU's"):
        dispatch.variant(device, kernels)


def test_off_is_torch_everywhere_and_says_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        for device in ("cpu", "cuda:0"):
            assert dispatch.variant(device, "off") == "torch" and dispatch.backend(device, "off") is None
            assert set(dispatch.chosen(device, "off").values()) == {"torch", "exact"}
    assert not caplog.records


def test_a_row_says_what_each_op_ran_on():
    pytest.importorskip("triton")
    ran = dispatch.chosen("cuda:0", "auto", "fast")
    assert {op for op in dispatch.OPS if ran[op] == "triton"} == {"attention", "encode", "move"}
    assert ran["arithmetic"] == "fast" and dispatch.backend("cuda:0").name == "triton"
    with pytest.raises(ConfigError, match="interpreter"):
        dispatch.variant("cpu", "triton")
