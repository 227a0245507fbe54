"""Progress where nobody watches a terminal: plain lines, at most one every ten seconds."""

import io

import pytest
from rich.console import Console

from kvlab.tasks import progress as module
from kvlab.tasks.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] seconds."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)


def lines(c: Console) -> list[str]:
    return c.file.getvalue().splitlines()


def test_a_pipe_gets_a_line_at_the_start_and_one_every_ten_seconds(clock):
    c = console()
    with Progress(c) as p:
        p.say("loading tiny ...")
        p.start("full: needle", 1000)
        for _ in range(5):
            clock[0] += 3
            p.advance(100)
        p.advance(50, ratio=3.75)
        clock[0] += 11
        p.advance(50)
    assert lines(c) == [
        "loading tiny ...",
        "full: needle ...",
        "full: needle: 40 %  33 tok/s",  # 400 tokens in 12 s, the first moment after 10
        "full: needle: 60 %  23 tok/s  3.75x",  # 600 in 26 s; the ratio is the last one known
    ]


def test_a_new_stretch_starts_with_its_own_clock_and_without_the_old_ratio(clock):
    c = console()
    with Progress(c) as p:
        p.start("one", 10)
        p.advance(10, ratio=2.0)
        clock[0] += 100
        p.start("two", 100)
        clock[0] += 11
        p.advance(55)
    assert lines(c)[-1] == "two: 55 %  5 tok/s"


def test_a_terminal_gets_a_bar_unless_plain_lines_are_asked_for(monkeypatch):
    monkeypatch.delenv("KVLAB_PROGRESS", raising=False)
    c = console(terminal=True)
    with Progress(c) as p:
        p.start("full: needle", 10)
        p.advance(5, ratio=1.5)
    assert "━" in c.file.getvalue()
    monkeypatch.setenv("KVLAB_PROGRESS", "plain")
    c = console(terminal=True)
    with Progress(c) as p:
        p.start("full: needle", 10)
    assert lines(c) == ["full: needle ..."]


def test_quiet_prints_nothing():
    c = console()
    with Progress(c, quiet=True) as p:
        p.say("loading")
        p.start("full", 0)
        p.advance(5)
    assert not lines(c)


def test_an_error_inside_leaves_the_terminal_as_it_was(monkeypatch):
    """Fails when the bar is not stopped: the cursor stays hidden."""
    monkeypatch.delenv("KVLAB_PROGRESS", raising=False)
    c = console(terminal=True)
    with pytest.raises(KeyboardInterrupt), Progress(c) as p:
        p.start("full", 10)
        raise KeyboardInterrupt
    assert c.file.getvalue().count("\x1b[?25l") == c.file.getvalue().count("\x1b[?25h") == 1


def test_drive_counts_every_token_once(benches, tiny):
    """Fails when tokens of an earlier drive are counted again: a bar beyond 100 %."""
    from kvlab.engine.sequence import Sampling

    lab, seen = benches.lab(tiny), []

    class Counting(Progress):
        def advance(self, tokens, ratio=None):
            seen.append(tokens)

    for _ in range(2):
        seen.clear()
        lab.engine.add(list(range(50)), Sampling(max_tokens=4))
        module.drive(lab, Counting(quiet=True), "t", 53)
        assert sum(seen) == 50 + 3
