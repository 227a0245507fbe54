"""The rules that tests run under hold: no network, one thread, reproducible examples, dirty memory."""

import os
import socket
import threading

import pytest
import torch
from hypothesis import settings
from toys import echo_geom, quiet


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("2001:db8::1", 80)])
def test_a_test_cannot_reach_another_machine(address):
    """Documentation addresses, which nobody has. Fails when the block is gone: that would be a timeout or no route."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as s:
        s.settimeout(1)
        for call in (s.connect, s.connect_ex):
            with pytest.raises(OSError, match="a test tried to connect to"):
                call(address)
    with pytest.raises(OSError, match="a test tried to connect to"):
        socket.create_connection(("192.0.2.1", 443), timeout=1)


def test_a_test_may_talk_to_itself():
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = threading.Thread(target=lambda: server.accept()[0].sendall(b"hi"))
        answer.start()
        with socket.create_connection(server.getsockname(), timeout=5) as s:
            assert s.recv(2) == b"hi"
        answer.join()


def test_tests_run_on_one_thread_without_a_hub_and_with_the_same_examples_every_time():
    assert torch.get_num_threads() == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    if "HYPOTHESIS_PROFILE" not in os.environ:
        assert settings().derandomize and settings().deadline is None


def test_the_garbage_fixture_dirties_every_page_but_the_null_block(garbage):
    t = garbage(quiet(geom=echo_geom(L=2, Hk=2))).cache.classes[0]
    for data in t.arrays.data.values():
        assert (data[0] == 0).all()
        assert data[1:].unique().numel() > 100
