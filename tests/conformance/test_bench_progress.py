"""Output of a benchmark run while it works, and the results that remain after Ctrl-C."""

import io
import os
import signal
import time
from contextlib import suppress

import pytest

pytest.importorskip("pytest_benchmark")

from rich.console import Console

from precondattn_conformance import progress
from precondattn_conformance.bench import command
from precondattn_conformance.bench.progress import BenchProgress, Interruption
from precondattn_conformance.bench.record import TIMED, load
from precondattn_conformance.progress import CLEAR


@pytest.fixture(autouse=True)
def _interrupts():
    """Enable interrupts as in a terminal, since tests in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.thorough
def test_an_interrupted_run_prints_and_saves_what_was_measured(tmp_path, monkeypatch):
    at_round = BenchProgress.at_round

    def in_the_second_case(self, number, of):
        at_round(self, number, of)
        if self.number == 2 and number == 2:
            interrupt()

    monkeypatch.setattr(BenchProgress, "at_round", in_the_second_case)
    printed, path = io.StringIO(), tmp_path / "rows.json"
    code = command.bench(
        names=("numpy_lucid", "numpy_softmax"),
        peers=(),
        quick=True,
        rounds=3,
        save=path,
        console=Console(file=printed, width=120),
    )
    assert code == 130
    (row,) = load(path).rows
    assert row.status == TIMED
    assert "interrupted: 1 of 2 cases were not measured" in printed.getvalue()
    assert "median times" in printed.getvalue()


def test_an_interrupt_that_becomes_another_error_ends_the_run():
    with Interruption() as interruption:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise TypeError("unsupported operand") from None
    assert interruption.is_here
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_dropped_is_raised_again():
    with Interruption() as interruption:
        with suppress(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            interruption.check()


def test_other_errors_leave_the_run():
    with pytest.raises(TypeError, match="of a case"), Interruption():
        raise TypeError("of a case")


def test_the_time_left_counts_rounds_and_the_cases_after_them():
    clock = Clock()
    of = BenchProgress(Console(file=io.StringIO()), 3, clock)
    of.starts("lucid")
    assert str(of) == "lucid (case 1 of 3): checked first"
    clock.now = 4.0
    of.at_round(0, 9)
    clock.now = 6.0
    of.at_round(1, 9)
    clock.now = 14.0
    of.at_round(4, 9)  # Five rounds of 2 s are over and five are left; then two cases of 24 s.
    assert str(of) == "lucid (case 1 of 3): round 4 of 9, about 58 s left"
    clock.now = 24.0
    of.ends("2 s")
    of.starts("laser")
    assert str(of) == "laser (case 2 of 3): checked first"


def test_the_time_left_of_a_run_of_cases_is_that_of_as_many_finished_ones():
    clock = Clock()
    of = progress.Progress(Console(file=io.StringIO()), 12, clock)
    assert str(of) == "0 of 12 cases, 0 failed"
    clock.now = 30.0  # Processes have started.
    of.advance()
    clock.now = 36.0
    of.advance(is_failed=True)
    of.advance()
    assert str(of) == "3 of 12 cases, 1 failed, about 27 s left"


def written(of, console, until):
    with of:
        of.starts("lucid")
        deadline = time.monotonic() + 20
        while until not in console.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
    return console.file.getvalue()


def test_a_pipe_gets_a_line_at_a_time(monkeypatch):
    assert progress.EVERY_TEN_SECONDS == 10
    monkeypatch.setattr(progress, "EVERY_TEN_SECONDS", 0.01)
    console = Console(file=io.StringIO(), width=60)
    text = written(BenchProgress(console, 1), console, "first\n")
    assert text.splitlines()[0] == "lucid (case 1 of 1): checked first"
    assert "\x1b" not in text


def test_a_terminal_has_one_line_that_changes(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_SECOND", 0.01)
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    text = written(BenchProgress(console, 1), console, "first" + CLEAR)
    assert "\n" not in text
    assert text.startswith(CLEAR + "lucid (case 1 of 1)")
    assert text.endswith(CLEAR)


def test_an_interrupted_count_has_judged_nothing(monkeypatch):
    from typer.testing import CliRunner

    from precondattn.command_line.commands import app
    from precondattn_conformance.bench import instructions

    def run(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(instructions, "run", run)
    assert CliRunner().invoke(app, ["bench", "--instructions"]).exit_code == 130
