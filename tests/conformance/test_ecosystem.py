"""`precondattn ecosystem`: cells, processes that die or hang, judgements, the page."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Measured
from precondattn_conformance.ecosystem import command
from precondattn_conformance.ecosystem.cells import cells_of
from precondattn_conformance.ecosystem.contenders import OfOurs, contenders
from precondattn_conformance.ecosystem.judgement import Judgement, StaleError, require_true
from precondattn_conformance.ecosystem.page import page
from precondattn_conformance.ecosystem.run import Ran, run_all
from precondattn_conformance.ecosystem.table import Table, TableRow, load, row_of
from precondattn_conformance.inputs import PLAIN
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import FAILED, PASSED, UNSUPPORTED

FOLDER = Path(__file__).parent / "fake_peers"


def outcome(status, error=None, check="outputs", kind="random", reason=""):
    case = Case(check, "softmax", "numpy", "float64", PLAIN, kind)
    return Outcome(case, status, None if error is None else Measured(error, 1e-4), reason)


RIGHT = outcome(PASSED, 1e-5)
WRONG = outcome(FAILED, 2.0, kind="zero", reason="the output is off by 2")
NOT_FINITE = outcome(FAILED, math.nan, kind="tied", reason="the output is off by nan")
RAISED = outcome(FAILED, reason="it raised ValueError: no")
DECLINED = outcome(UNSUPPORTED, kind="real", reason="has no gradient")


def cell(*outcomes, conventions=()):
    """The cell of the check `outputs`, in a row of which another check was compared."""
    beside = outcome(PASSED, 0.0, check="future")
    return cells_of([*outcomes, beside], dict.fromkeys(conventions, ("head_order",)))["outputs"]


@pytest.mark.parametrize(
    ("word", "outcomes", "conventions"),
    [
        ("right", [RIGHT, DECLINED], ()),
        ("wrong", [RIGHT, NOT_FINITE, WRONG], ()),
        ("not finite", [RIGHT, NOT_FINITE], ()),
        ("convention differs", [RIGHT, NOT_FINITE, WRONG], (NOT_FINITE.case.id, WRONG.case.id)),
        ("not finite", [NOT_FINITE, WRONG], (WRONG.case.id,)),
        ("declined", [DECLINED], ()),
        ("wrong", [NOT_FINITE, RAISED], ()),  # A failure without an error is no NaN.
    ],
)
def test_a_cell_says_what_the_outcomes_of_a_check_are(word, outcomes, conventions):
    assert cell(*outcomes, conventions=conventions).word == word


def test_a_row_of_which_nothing_was_compared_is_not_compared():
    assert cells_of([DECLINED], {})["outputs"].word == "not compared"


def test_a_cell_has_how_much_was_compared_and_the_first_reason():
    found = cell(RIGHT, WRONG, DECLINED)
    assert (found.cases, found.compared, found.failed) == (3, 2, 1)
    assert found.reason == "the output is off by 2"
    assert cell(RIGHT, DECLINED).reason == ""
    assert cell(DECLINED, DECLINED).reason == "has no gradient"


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import fake_peers

    return lambda *names: [fake_peers.Fake(name) for name in names]


def rows_of(contenders, **options):
    return {c.name: row_of(c, ran) for c, ran in run_all(contenders, "smoke", **options)}


def test_rows_run_in_processes_of_their_own_and_one_that_dies_fails_in_one_case(fakes):
    names = ("fake/first_aligned", "fake/dies", "fake/fails", "absent/absent")
    rows = rows_of(fakes(*names))

    first_aligned, dies, fails, absent = (rows[name] for name in names)
    assert first_aligned.checks["outputs"].word == "convention differs"
    assert first_aligned.checks["outputs"].conventions == ("bottom_right",)
    assert "first query is aligned with the first key" in first_aligned.findings[0]
    assert first_aligned.version
    assert first_aligned.date == "2026-01-02"

    assert dies.checks["outputs"].word == "right"
    assert dies.checks["refusals"].word == "right"  # It runs after the crash.
    assert dies.checks["stability"].reason == "the process died of SIGKILL"
    assert not dies.missing

    assert {each.word for each in fails.checks.values()} == {"not compared"}
    assert fails.missing == "raised RuntimeError: needs another machine"
    assert absent.missing == "no-such-package is not installed"
    assert not absent.checks


@pytest.mark.thorough
def test_a_row_that_hangs_is_ended_and_the_next_one_runs(fakes):
    rows = rows_of(fakes("fake/hangs", "absent/absent"), jobs=1, seconds=8)
    assert rows["fake/hangs"].missing == "no result after 8 s"
    assert rows["fake/hangs"].checks["outputs"].word == "right"
    assert rows["fake/hangs"].checks["stability"].reason.startswith("it hung")
    assert rows["absent/absent"].missing == "no-such-package is not installed"


def test_rows_are_chosen_by_patterns_and_a_pattern_without_rows_is_an_error():
    assert [each.name for each in contenders(["precondattn/torch/k*"])] == ["precondattn/torch/kda"]
    with pytest.raises(ValueError, match=r"'flaa/\*' matches no peer; there are .*fla/..."):
        contenders(["flaa/*"])


def test_all_our_backends_are_in_the_table():
    ours = {each.backend for each in contenders() if isinstance(each, OfOurs)}
    assert ours == {"reference", "portable", "torch", "jax", "triton", "pallas", "cupy"}


DEFECT = Judgement("fake/*", ("outputs",), "defect", "It returns twice the output.")


def table(*outcomes, name="fake/attend"):
    row = TableRow(
        name, "Fake", "https://fake.example", "1.2", "2026-01-02", "softmax", "numpy", 1.0, "",
        cells_of(outcomes, {}),
    )  # fmt: skip
    return Table("smoke", rows=[row])


OTHER = "fape/attend"
STALE = [
    # The table, the judgement, the chosen rows, and the error.
    (table(WRONG), DEFECT, (), None),
    (table(RIGHT), DEFECT, (), r"fake/attend, outputs: the cell is right, .* a defect"),
    (table(DECLINED), DEFECT, (), None),  # This machine can not run it.
    (table(WRONG, name=OTHER), DEFECT, (), r"fake/\*: no row has such a name"),
    (table(WRONG, name=OTHER), DEFECT, ("fape/*",), None),
    (table(WRONG), replace(DEFECT, peers="fake/a* fape/*"), (), r"\nfape/\*: no row has such"),
]


@pytest.mark.parametrize(("one", "judgement", "patterns", "error"), STALE)
def test_a_judgement_that_is_not_true_any_more_is_an_error(one, judgement, patterns, error):
    one = replace(one, patterns=patterns)
    if error is None:
        require_true(one, [judgement])
        return
    with pytest.raises(StaleError, match=error):
        require_true(one, [judgement])


def test_a_judgement_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="kind is one of defect, limit, convention; found 'bug'"):
        replace(DEFECT, kind="bug")


def test_the_page_shows_a_judged_cell_and_others_as_not_yet_looked_at():
    red = table(WRONG, RIGHT, outcome(FAILED, math.nan, check="gradients"))
    text = page(red, [DEFECT])
    assert "**wrong 1/2** [D1](#defect-1)" in text
    assert "**infinite 1/1** not yet examined" in text
    assert "(defect-1)=" in text
    assert "| `fake/attend` | gradients |" in text.partition("## Not yet examined")[2]
    assert DEFECT.sentence in text


def test_a_documented_limit_of_an_adapter_judges_its_red_cell():
    red = table(WRONG)
    red.rows[0] = replace(red.rows[0], limits={"outputs": "Needs one head.", "future": "None."})
    text = page(red, [])
    assert "**wrong 1/1** [L1](#limit-1)" in text
    assert "Needs one head." in text
    assert "None." not in text


def test_a_saved_table_is_read_back_and_another_file_is_an_error(tmp_path):
    written = table(WRONG, RIGHT, NOT_FINITE, DECLINED)
    written.save(tmp_path / "table.json")
    assert load(tmp_path / "table.json") == written
    (tmp_path / "other.json").write_text('{"schema": "x"}')
    with pytest.raises(ValueError, match="is no table"):
        load(tmp_path / "other.json")


def test_the_command_writes_the_table_before_it_says_that_a_judgement_is_stale(
    tmp_path, monkeypatch
):
    judgement = replace(DEFECT, peers="precondattn/torch/kda")
    outcomes = [replace(RIGHT, case=replace(RIGHT.case, mechanism="kda"))]
    monkeypatch.setattr(command, "JUDGEMENTS", (judgement,))
    monkeypatch.setattr(command, "run_all", lambda rows, *_, **__: [(rows[0], Ran(outcomes))])
    files = {"record": tmp_path / "a.json", "page": tmp_path / "a.md"}
    with pytest.raises(StaleError, match="precondattn/torch/kda, outputs: the cell is right"):
        command.ecosystem(Console(), patterns=("precondattn/torch/kda",), **files)
    assert load(files["record"]).rows[0].checks["outputs"].word == "right"
    assert re.search(r"`torch/kda` .* ✓", files["page"].read_text())
