"""Output of a benchmark run while it works, and the results that remain after Ctrl-C."""

import io
import itertools
import os
import signal
import time

import pytest

pytest.importorskip("pytest_benchmark")

from rich.console import Console

from precondattn_conformance import progress
from precondattn_conformance.bench import command
from precondattn_conformance.bench.measure import outcome_in
from precondattn_conformance.bench.paired import Turns
from precondattn_conformance.bench.record import TIMED, load
from precondattn_conformance.progress import CLEAR, Progress


@pytest.fixture(autouse=True)
def _interrupts():
    """Enable interrupts as in a terminal, since tests in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.thorough
def test_an_interrupted_run_prints_and_saves_what_was_measured(tmp_path, monkeypatch):
    turns, rounds = Turns.__call__, itertools.count()

    def interrupted(self):
        if next(rounds) == 6:  # The second case, after its round to warm up.
            os.kill(os.getpid(), signal.SIGINT)
        turns(self)

    monkeypatch.setattr(Turns, "__call__", interrupted)
    printed, path = io.StringIO(), tmp_path / "rows.json"
    options = {"peers": (), "quick": True, "rounds": 3, "save": path}
    console = Console(file=printed, width=120)
    code = command.bench(names=("numpy_lucid", "numpy_softmax"), console=console, **options)
    assert code == 130
    (row,) = load(path).rows
    assert (row.case, row.status) == ("numpy_lucid", TIMED)
    assert "interrupted: 1 of 2 cases were not measured" in printed.getvalue()
    assert "median times" in printed.getvalue()


def test_an_interrupt_that_a_library_makes_another_error_ends_the_run():
    def interrupted():
        with outcome_in(None):
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                raise TypeError("unsupported operand") from None

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_the_time_left_of_a_run_of_cases_is_that_of_as_many_finished_ones():
    clock = Clock()
    of = Progress(Console(file=io.StringIO()), 12, clock)
    assert str(of) == "0 of 12 cases, 0 failed"
    clock.now = 30.0  # Processes have started.
    of.advance()
    clock.now = 36.0
    of.advance(is_failed=True)
    of.advance()
    assert str(of) == "3 of 12 cases, 1 failed, about 27 s left"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pipe_gets_lines_and_a_terminal_one_line_that_changes(monkeypatch, is_terminal):
    monkeypatch.setattr(progress, "EVERY_SECOND" if is_terminal else "EVERY_TEN_SECONDS", 0.01)
    console = Console(file=io.StringIO(), width=60, force_terminal=is_terminal)
    line, deadline = "0 of 2 cases, 0 failed", time.monotonic() + 20
    ending = CLEAR if is_terminal else "\n"
    with Progress(console, 2):
        while line + ending not in console.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
    text = console.file.getvalue()
    assert text.startswith(CLEAR + line if is_terminal else line + "\n")
    assert ("\n" in text, "\x1b" in text) == (not is_terminal, is_terminal)
    assert text.endswith(ending)
