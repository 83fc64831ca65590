"""The page of what kernels compute is what the backends answer."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import precondattn as pa
from precondattn.kernel_backend.code_hash import code_of
from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn.kernel_backend.ledger import LedgerEntry

pytest.importorskip("triton")
pytest.importorskip("torch")
pytest.importorskip("jax")

MAKER = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_kernels.py"))
)
TRITON, _, TPU, CUPY = MAKER.COLUMNS
CLASS = "precondattn_triton.recurrence.leaves:RecurrenceKernels"


def test_the_page_is_what_the_backends_answer_and_has_every_mechanism():
    text = MAKER.PAGE.read_text(encoding="utf-8")
    assert text == MAKER.page(), "run python docs/make_kernels.py"
    rows = re.findall(r"^\| `(.+?)` ", text, re.M)
    ours = [n for n, c in pa.mechanisms().items() if c.__module__.startswith("precondattn.")]
    assert not [name for name in ours if not any(re.search(rf"\b{name}\b", row) for row in rows)]


@pytest.mark.parametrize(
    ("column", "text", "work", "computed", "reason"),
    [
        (TRITON, "gla", "backward", ["gla"], None),
        (TRITON, "lucid", "forward", ["lucid_solve"], "has no kernels for softmax"),
        (TPU, "gla", "forward", [], "not computed with gate='channel'"),
        (TPU, "gsa", "decode", [], "rule='slots' is not computed"),
        (CUPY, "row_normalized", "decode", ["softmax", "unit_rows"], None),
        (CUPY, "windowed", "decode", [], "it is not causal"),
    ],
)
def test_a_cell_has_what_kernels_compute_and_why_not_the_rest(column, text, work, computed, reason):
    with MAKER.asked():
        answer = MAKER.cell(pa.parse(text), column, work)
    assert [str(piece) for piece in answer.computed] == computed
    assert not answer.reasons if reason is None else reason in "; ".join(answer.reasons)


@pytest.mark.parametrize("column", MAKER.COLUMNS, ids=lambda column: column.title)
def test_no_recurrence_is_in_a_table_of_kernels_that_decline_it(column):
    with MAKER.asked(), MAKER.describing(column) as backend:
        leaves = recurrences_in(backend.table)
        assert leaves
        for leaf in leaves:
            assert MAKER.cell(leaf, column, "forward") == ((leaf,), ())


def test_a_cell_is_marked_where_the_code_of_today_has_run_on_its_device():
    run = LedgerEntry("gla:RecurrenceKernels", "vjp", "bfloat16", 64, "9.0", "x", code_of(CLASS))
    with MAKER.asked():
        answer = MAKER.cell(pa.parse("gla"), TRITON, "backward")
    assert MAKER.ran_on(answer, TRITON, "backward", [run]) == ["9.0"]
    assert MAKER.ran_on(answer, TRITON, "backward", [run._replace(code="earlier")]) == []
    assert MAKER.ran_on(answer, TRITON, "forward", [run]) == []
    with MAKER.asked():
        shown = MAKER._shown(pa.parse("gla"), TRITON, "backward", lambda package: [run], {})
    assert shown == "**✓** 9.0"
