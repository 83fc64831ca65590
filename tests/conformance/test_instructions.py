"""Instruction counts: verdicts, file, and one real count if valgrind is installed."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from precondattn.command_line.commands import app
from precondattn_conformance.bench import instructions


def run(monkeypatch, tmp_path, counted, committed, save=None, absent=""):
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
    ("counted", "committed", "code", "verdict"),
    [
        ({"lucid": 1000}, {"lucid": 1000}, 0, "fine"),
        ({"lucid": 1014}, {"lucid": 1000}, 0, "fine"),
        ({"lucid": 1016}, {"lucid": 1000}, 1, "worse"),
        ({"lucid": 970}, {"lucid": 1000}, 0, "better"),
        ({"overhead_lucid": 1030}, {"overhead_lucid": 1000}, 0, "fine"),
        ({"overhead_lucid": 1050}, {"overhead_lucid": 1000}, 1, "worse"),
        ({"lucid": 1000, "path": 1100}, {"lucid": 1000, "path": 1000}, 1, "worse"),
        ({"path": 9}, {"lucid": 1000}, 0, "new"),
    ],
)
def test_a_count_is_worse_beyond_its_slack(
    monkeypatch, tmp_path, counted, committed, code, verdict
):
    exit_code, text = run(monkeypatch, tmp_path, counted, committed)
    assert exit_code == code
    assert verdict in text.partition("worse is")[0]


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
