"""The regression gate of benchmarks: statistics, verdicts, file. No test measures a time."""

import io
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from precondattn.command_line.commands import app
from precondattn_conformance.bench import committed, gate, gate_command
from precondattn_conformance.bench.bootstrap import Interval, ratio_of_medians
from precondattn_conformance.bench.cases import COMPARED

KIND = {"processor": "a processor", "cores": 2}


def times(median, noise, count=40, seed=0):
    return median * np.exp(noise * np.random.default_rng(seed).normal(size=count))


def around(ratio, width=0.02):
    return Interval(ratio, ratio - width, ratio + width)


def a_file(path, ratios, kind=KIND, rate=1.0):
    committed.save(committed.Committed(kind, "2026-01-01", rate, ratios), path)
    return path


def run_gate(monkeypatch, tmp_path, measured, ratios, rates=1.0, kind=KIND, save=None):
    """Run the gate on rows with given measurements; returns the exit code and the text."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(committed, "machine_kind", lambda: kind)
    a_file(tmp_path / "committed.json", ratios)
    find = partial(committed.of_this_kind, path=tmp_path / "committed.json")
    monkeypatch.setattr(gate_command.committed, "of_this_kind", find)
    left = {name: list(each) for name, each in measured.items()}
    monkeypatch.setattr(gate_command, "ratio_to_peer", lambda case: left[case.name].pop(0))
    monkeypatch.setattr(gate_command, "_matrix_product", lambda: rates)
    printed = io.StringIO()
    code = gate_command.run(tuple(measured), save, Console(file=printed, width=200))
    assert not any(left.values()), "every measurement is made"
    return code, printed.getvalue()


def test_the_interval_contains_the_true_ratio_and_is_as_narrow_as_the_noise():
    inside = widths = 0
    for seed in range(100):
        found = ratio_of_medians(times(3, 0.03, seed=seed), times(1.5, 0.03, seed=1000 + seed))
        inside += found.low <= 2 <= found.high
        widths += found.high - found.low
        assert found.low <= found.ratio <= found.high
    assert inside >= 75  # A bootstrap of five blocks is narrower than its nominal level.
    assert 0.01 < widths / 100 < 0.1


def test_equal_noise_of_both_leaves_the_ratio_and_a_slow_block_widens_the_interval():
    both = times(1, 0.3)
    assert ratio_of_medians(2 * both, both) == pytest.approx((2, 2, 2))
    slow = np.ones(40)
    slow[24:] = 1.5
    found = ratio_of_medians(slow, np.ones(40))
    assert found.low == 1
    assert found.high == 1.5


@pytest.mark.parametrize(("ours", "peers"), [(4, 4), (6, 5)])
def test_too_few_or_unpaired_times_have_no_interval(ours, peers):
    with pytest.raises(ValueError, match="expected 5 pairs"):
        ratio_of_medians([1.0] * ours, [1.0] * peers)


@pytest.mark.parametrize(
    ("now", "before", "verdict"),
    [
        (around(2.0), around(2.0), gate.FINE),
        (around(2.1), around(2.0), gate.FINE),  # Within the slack.
        (around(2.4), around(2.0), gate.WORSE),
        (around(2.4, 0.3), around(2.0), gate.FINE),  # Within the noise of this measurement.
        (around(2.4), around(2.0, 0.3), gate.FINE),  # Within the noise of the committed value.
        (around(1.5), around(2.0), gate.BETTER),
        (around(2.0), None, gate.UNKNOWN),
        ("wrong: 1e-2", None, gate.UNKNOWN),
        ("wrong: 1e-2", around(2.0), gate.LOST),
    ],
)
def test_a_ratio_is_worse_beyond_both_intervals_and_the_slack(now, before, verdict):
    assert gate.judge(now, before) == verdict


def test_a_row_fails_after_two_more_measurements(monkeypatch, tmp_path):
    ratios = {"lucid": around(2.0), "laser": around(1.0)}
    measured = {"lucid": [around(2.5)] * 3, "laser": [around(1.0)]}
    code, text = run_gate(monkeypatch, tmp_path, measured, ratios)
    assert code == 1
    assert gate.WORSE in text
    assert text.count("2.50") == 6


@pytest.mark.parametrize("again", [[around(2.0)], [around(2.5), around(2.0)]])
def test_a_row_that_recovers_passes(monkeypatch, tmp_path, again):
    measured = {"lucid": [around(2.5), *again]}
    code, text = run_gate(monkeypatch, tmp_path, measured, {"lucid": around(2.0)})
    assert code == 0
    assert gate.WORSE not in text


def test_rows_are_measured_again_after_all_others():
    order = []

    def measure(case):
        order.append(case.name)
        return around(2.5)

    before = {"lucid": around(2.0), "laser": around(2.5)}
    found = gate.outcomes(gate.rows(["lucid", "laser"]), measure, before, lambda: True)
    assert order == ["lucid", "laser", "lucid", "lucid"]
    assert [each.verdict for each in found] == [gate.WORSE, gate.FINE]


def test_a_busy_machine_is_not_judged(monkeypatch, tmp_path):
    measured = {"lucid": [around(2.5)] * 3}
    code, text = run_gate(monkeypatch, tmp_path, measured, {"lucid": around(2.0)}, rates=0.7)
    assert code == 0
    assert gate.BUSY in text
    assert "the machine is busy" in text


def test_another_machine_is_recorded_only(monkeypatch, tmp_path):
    measured, ratios = {"lucid": [around(9.0)]}, {"lucid": around(2.0)}
    code, text = run_gate(monkeypatch, tmp_path, measured, ratios, kind={**KIND, "cores": 4})
    assert code == 0
    assert "no committed ratio for this machine: recorded only" in text


def test_a_committed_row_that_has_no_ratio_any_more_fails(monkeypatch, tmp_path):
    measured = {"lucid": ["wrong: the error is 1"], "laser": [around(1.0)]}
    code, text = run_gate(monkeypatch, tmp_path, measured, {"lucid": around(2.0)})
    assert code == 1
    assert "wrong: the error is 1" in text
    assert gate.LOST in text


def test_what_is_saved_is_the_envelope_of_some_runs(monkeypatch, tmp_path):
    other = a_file(tmp_path / "new.json", {"lucid": around(7.0)}, kind={"cores": 64})
    a_file(other, {"path": around(2.0), "lucid": around(5.0)})
    measured = {"lucid": [around(2.0), around(2.1), around(1.9)]}
    code, _ = run_gate(monkeypatch, tmp_path, measured, {}, rates=5.0, save=other)
    assert code == 0
    (here,) = (each for each in committed.load(other) if each.machine == KIND)
    assert here.ratios["lucid"] == pytest.approx((2.0, 1.88, 2.12))
    assert here.ratios["path"] == around(2.0)
    assert here.flops_per_second == 5.0
    assert len(committed.load(other)) == 2


def test_a_row_without_a_ratio_is_not_saved(monkeypatch, tmp_path):
    measured = {"lucid": [around(2.0), "failed: no", around(2.0)]}
    file = tmp_path / "new.json"
    assert run_gate(monkeypatch, tmp_path, measured, {}, save=file)[0] == 1
    assert committed.load(file)[0].ratios == {}


def test_rows_are_cases_with_one_peer_at_a_third_of_their_size():
    assert {case.name for case in gate.rows()} == set(gate.ROWS)
    full = {case.name: case for case in COMPARED}
    for case in gate.rows():
        whole = full[case.name].layout
        tokens = whole.b * whole.t / (case.layout.b * case.layout.t)
        assert tokens == pytest.approx(3, rel=0.1)
        assert case.peers == (gate.ROWS[case.name],)
        assert set(case.peers) <= set(full[case.name].peers)


def test_one_row_is_measured_beside_its_peer(monkeypatch):
    monkeypatch.setattr(gate_command, "BUDGET", 0.01)
    (case,) = gate.rows(["packed_lucid"])
    small = replace(case, layout=case.layout._replace(t=16, s=16, b=2))
    found = gate_command.ratio_to_peer(small)
    assert isinstance(found, Interval)
    assert 0 < found.low <= found.high


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gate", "--memory"], "names of its rows, --instructions and --save only"),
        (["--gate", "--rounds", "9"], "names of its rows, --instructions and --save only"),
        (["--gate", "--neighbours", "1"], "names of its rows, --instructions and --save only"),
    ],
)
def test_what_the_gate_does_not_take_is_refused(arguments, complaint):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


def test_several_threads_are_refused(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(ValueError, match="set OMP_NUM_THREADS=1; found 2"):
        gate_command.run((), None, Console(file=io.StringIO()))


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "ratios.json"
    file.write_text(json.dumps([{"machine": {}}]))
    with pytest.raises(ValueError, match=r"ratios\.json has no ratios"):
        committed.load(file)


def test_the_kind_of_a_machine_has_what_changes_ratios(monkeypatch):
    kind = committed.machine_kind()
    assert {"processor", "cores", "threads", "versions", "model", "settings"} <= set(kind)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert committed.machine_kind() != kind
