"""Instruction counts: verdicts, file, and one real count if valgrind is installed."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from precondattn.command_line.commands import app
from precondattn_conformance.bench import instructions
from precondattn_conformance.bench.cases import COMPARED


def run(monkeypatch, tmp_path, counted, committed, save=None, absent=None):
    """Run the command with given counts; returns the exit code and the text."""
    file = tmp_path / "committed.json"
    entry = {"kind": instructions.kind(), "date": "2026-01-01", "counts": committed}
    file.write_text(json.dumps([entry]))
    monkeypatch.setattr(instructions, "FILE", file)
    monkeypatch.setattr(instructions, "counts", lambda names: counted)
    monkeypatch.setattr(instructions, "missing", lambda: absent)
    printed = io.StringIO()
    code = instructions.run(tuple(counted), save, Console(file=printed, width=200))
    return code, printed.getvalue()


@pytest.mark.parametrize(
    ("now", "code", "verdict"),
    [(1000, 0, "fine"), (1014, 0, "fine"), (1016, 1, "worse"), (970, 0, "better")],
)
def test_a_count_is_worse_beyond_the_slack(monkeypatch, tmp_path, now, code, verdict):
    found, text = run(monkeypatch, tmp_path, {"lucid": now}, {"lucid": 1000})
    assert found == code
    assert verdict in text


def test_small_calls_have_more_slack(monkeypatch, tmp_path):
    for now, code in ((1030, 0), (1050, 1)):
        found = {"overhead_lucid": now}
        assert run(monkeypatch, tmp_path, found, {"overhead_lucid": 1000})[0] == code


def test_one_worse_row_among_others_fails(monkeypatch, tmp_path):
    counted = {"lucid": 1000, "path": 1100}
    code, _ = run(monkeypatch, tmp_path, counted, {"lucid": 1000, "path": 1000})
    assert code == 1


def test_a_row_that_is_not_committed_is_recorded_only(monkeypatch, tmp_path):
    code, text = run(monkeypatch, tmp_path, {"path": 9}, {"lucid": 1000})
    assert code == 0
    assert "new" in text


def test_where_valgrind_is_missing_nothing_is_judged_or_saved(monkeypatch, tmp_path):
    absent = "valgrind is not installed"
    code, text = run(monkeypatch, tmp_path, {"path": 9}, {"path": 1}, absent=absent)
    assert code == 0
    assert f"no instructions were counted: {absent}" in text
    save = tmp_path / "new.json"
    assert run(monkeypatch, tmp_path, {"path": 9}, {}, save, absent)[0] == 1
    assert not save.exists()


def test_counts_are_saved_by_kind(monkeypatch, tmp_path):
    save = tmp_path / "new.json"
    other = {"kind": {"system": "another"}, "date": "2026-01-01", "counts": {"lucid": 1}}
    save.write_text(json.dumps([other]))
    run(monkeypatch, tmp_path, {"lucid": 7, "path": 8}, {}, save)
    run(monkeypatch, tmp_path, {"lucid": 9}, {}, save)
    entries = {json.dumps(e["kind"]): e["counts"] for e in instructions.load(save)}
    assert entries[json.dumps(other["kind"])] == {"lucid": 1}
    assert entries[json.dumps(instructions.kind())] == {"lucid": 9, "path": 8}


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps([{"machine": {}}]))
    with pytest.raises(ValueError, match=r"counts\.json has no counts"):
        instructions.load(file)


def test_rows_are_small_cases_of_torch():
    found = instructions.cases()
    assert {case.name for case in found} == set(instructions.ROWS)
    assert {case.library for case in found} == {"torch"}
    assert all(case.calls == 1 and case.peers == () for case in found)
    assert [case.name for case in found] == [
        case.name for case in COMPARED if case.name in instructions.ROWS
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--instructions", "laser"], "'laser' is no row of instructions"),
        (["--instructions", "--memory"], "combined with rows and --save only"),
    ],
)
def test_what_it_does_not_take_is_refused(arguments, complaint):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


def test_programs_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert instructions.missing() == "valgrind is not installed"
    with pytest.raises(instructions.CannotCountError, match="valgrind is not installed"):
        instructions.counts(["lucid"])
