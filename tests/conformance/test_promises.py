"""Conventions that a backend does not promise are not compared, and the report says so."""

import io
import json
import re
from importlib.resources import files

import jsonschema
import numpy as np
import pytest
from rich.console import Console

import precondattn as pa
from precondattn_conformance import backend_from_function
from precondattn_conformance.case import Case
from precondattn_conformance.command import conformance
from precondattn_conformance.conventions import EMPTY_ROWS, MEANING, PROBES, needed
from precondattn_conformance.functions.diagnosis import diagnosis
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.masks import PATTERNS
from precondattn_conformance.oracle import oracle
from precondattn_conformance.session import Session

torch = pytest.importorskip("torch")

from tests.conformance.plain_functions import attend  # noqa: E402
from tests.conformance.plain_functions import checked as compared  # noqa: E402


def right(q, k, v, key_mask=None):
    return attend(q, k, v, key_mask)


def with_options(**options):
    """Attention that follows another convention."""
    return lambda q, k, v, key_mask=None: attend(q, k, v, key_mask, **options)


def with_hidden(value):
    """Attention whose hidden scores are replaced, also in rows without keys."""
    return with_options(hidden=lambda s, seen: s.masked_fill(~seen, value(s.dtype)))


def smallest(dtype):
    return torch.finfo(dtype).min


def additive(q, k, v):
    def hidden(scores, visible):
        return scores + torch.zeros_like(scores).masked_fill(~visible, -torch.inf)

    return attend(q, k, v, None, hidden=hidden)


tiled = with_options(tiled=True)
top_left = with_options(top_left=True)
mean_of_no_key = with_hidden(smallest)
LACKS = {
    "top_left": (top_left, "bottom_right"),
    "tiled": (tiled, "head_order"),
    "nan_of_no_key": (with_hidden(lambda dtype: -torch.inf), "empty_rows"),
    "mean_of_no_key": (mean_of_no_key, "empty_rows"),
    "additive": (additive, "hidden_nan"),
    "in_float32": (
        with_options(weights=lambda s: s.float().softmax(-1).to(s.dtype)),
        "float64",
    ),
}


def checked(function, *lacking, checks=()):
    promises = pa.CONVENTIONS - set(lacking)
    return compared(function, "softmax", *checks, promises=promises, dtypes={"float64", "float32"})


def verdicts(result):
    return {each.convention: each.verdict for each in result.promises}


@pytest.mark.thorough(but=("nan_of_no_key", "additive", "tiled"))
@pytest.mark.parametrize("name", LACKS)
def test_a_broken_convention_fails_and_without_its_promise_the_rest_is_compared_and_right(name):
    function, lacking = LACKS[name]
    promised = checked(function)
    assert not promised.passed
    broken = [each for each in promised.promises if each.verdict == "broken"]
    assert [each.convention for each in broken] == [lacking]
    assert re.search(
        rf"breaks {lacking} \({re.escape(MEANING[lacking])}\): the output", broken[0].why
    )
    assert f"{lacking}: broken" in str(promised)

    result = checked(function, lacking)
    assert result.passed, str(result)
    told = {each.convention: each for each in result.promises}
    assert str(told[lacking]) == f"{lacking}: not promised, and not kept"
    others = {each.verdict for name, each in told.items() if name != lacking}
    assert others <= {"kept", "not known"}
    assert f"{lacking}: not promised, and not kept" in result._repr_html_()
    assert diagnosis(of(function, lacking)) == []
    # Almost no other case is lost: those that can not be compared decline with the promise as
    # reason.
    lost = len(promised.compared) - len(result.compared)
    assert lost == sum(n for why, n in result.declined.items() if "does not promise" in why)
    assert lost <= 5

    if name == "additive":  # Other promises that are missing excuse nothing.
        assert not checked(function, *(pa.CONVENTIONS - {lacking})).passed


def test_a_function_that_promises_nothing_may_not_read_later_keys():
    result = checked(right, *pa.CONVENTIONS)
    assert result.passed, str(result)
    told = {str(each) for each in result.promises}
    assert told == {f"{name}: not promised, but kept" for name in pa.CONVENTIONS}

    def of_the_future(q, k, v):
        return attend(q, torch.cat([k[:, 1:], k[:, -1:]], 1), v, None)

    result = checked(of_the_future, *pa.CONVENTIONS)
    assert {each.case.check for each in result.failures} >= {"outputs", "gradients", "future"}


def test_float64_that_is_computed_in_float32_is_declined_or_compared_as_such():
    def narrow(q, k, v):
        return right(q.float(), k.float(), v.float()).to(v.dtype)

    def dtypes(*lacking):
        result = checked(narrow, *lacking, checks=["outputs", "gradients"])
        assert result.passed, str(result)
        return {each.case.dtype for each in result.compared}

    assert dtypes() == {"float32"}
    assert dtypes("float64") == {"float64", "float32"}


def test_a_function_that_is_wrong_either_way_breaks_no_convention():
    def unscaled(q, k, v, key_mask=None):
        return attend(q * q.shape[-1] ** 0.5, k, v, key_mask)

    result = checked(unscaled)
    assert len(result.failures) > 10
    assert "broken" not in verdicts(result).values()


@pytest.mark.parametrize("mask", [*PATTERNS, "key_mask+segment_ids", "lengths_edge+key_start"])
@pytest.mark.parametrize("mechanism", ["softmax", "softmax[window=3]", "softmax[causal=false]"])
def test_rows_without_keys_are_foreseen(mask, mechanism):
    layout = CallLayout("", b=3, t=9, s=9, mask=mask, block=4)
    case = Case("outputs", mechanism, "numpy", "float32", layout, "random")
    rows = (oracle(mechanism, layout, "random", "float32").out == 0).all(axis=3)
    if layout.has("lengths"):  # Padding is 0 too, even if a padded query sees keys.
        lengths = layout.masks()["lengths"]
        is_padding = np.arange(9) >= lengths[:, None]
        rows = rows & ~(is_padding & (lengths > 0)[:, None])[..., None]
    assert (EMPTY_ROWS in needed(case)) >= bool(rows.any())
    if not layout.has("lengths"):
        assert (EMPTY_ROWS in needed(case)) == bool(rows.any())


def test_a_call_that_tells_needs_its_convention_and_no_other():
    for name, layout in PROBES.items():
        dtype = "float64" if name == "float64" else "float32"
        assert needed(Case("conventions", "softmax", "numpy", dtype, layout, "random")) == {name}
    assert PROBES.keys() == MEANING.keys() == pa.CONVENTIONS


def of(function, *lacking):
    """The function as a backend without some promises."""
    promises = pa.CONVENTIONS - set(lacking)
    return backend_from_function(function, "softmax", library="torch", promises=promises)


@pytest.fixture
def run(tmp_path):
    """Run the command on a function; returns the exit code, record, printed text and page."""
    names = []

    def run(function, *lacking, **options):
        backend = of(function, *lacking)
        pa.register_backend(backend)
        names.append(backend.name)
        record, page, printed = tmp_path / "record.json", tmp_path / "page.html", io.StringIO()
        given = {"libraries": ("torch",), "mechanisms": ("softmax",), "jobs": 0, **options}
        session = Session(backend=(backend.name,), **given)
        console = Console(file=printed, width=200)
        code = conformance(session, console, record=record, html=page)
        return code, json.loads(record.read_text()), printed.getvalue(), page.read_text()

    yield run
    for name in names:
        pa.unregister_backend(name)


def test_a_report_has_a_column_for_promises(run):
    code, record, printed, page = run(tiled, "head_order", checks=("outputs", "future"))
    assert code == 0, printed
    schema = files("precondattn_conformance.report").joinpath("schema.json").read_text()
    jsonschema.validate(record, json.loads(schema))
    told = {each["convention"]: each["verdict"] for each in record["promises"]}
    assert told["head_order"] == "not promised"
    assert told["bottom_right"] == told["hidden_nan"] == "kept"
    assert "head_order: not promised, and not kept" in printed
    assert ">not promised</td>" in page
    code, _, printed, page = run(top_left, checks=("outputs",))
    assert code == 1
    assert "breaks bottom_right" in printed
    assert 'class="failed">broken</td>' in page


def test_a_case_of_an_unpromised_convention_is_declined_by_its_id(run):
    ids = tuple(
        f"outputs-torch-float32-{name}-clustered-softmax" for name in ("plain", "fewer_masked")
    )
    code, record, *_ = run(right, "bottom_right", "head_order", ids=ids)
    assert code == 1  # Nothing was compared.
    reasons = [each["reason"] for each in record["outcomes"]]
    assert reasons[0].startswith("right does not promise head_order (of h query heads")
    assert reasons[1].startswith("right does not promise bottom_right (with fewer queries")
