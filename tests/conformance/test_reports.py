"""Reports of a conformance run: the record, JUnit, comparisons."""

import json
import math
import os
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from typer.testing import CliRunner

import precondattn_conformance.report.record as record_module
from precondattn.command_line.commands import app
from precondattn_conformance.bench.record import BenchRecord
from precondattn_conformance.cases import cases
from precondattn_conformance.report import environment
from precondattn_conformance.report.compare import compare_records, print_comparison
from precondattn_conformance.report.junit import write_junit
from precondattn_conformance.report.page import page
from precondattn_conformance.report.record import is_record, load
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.report.result import Result
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import STATUSES
from tests.conformance.outcomes import (
    HOSTILE,
    REFUSAL,
    a_failure,
    an_outcome,
    of_every_status,
    printed_by,
    recorded,
    replace_texts,
    writer,
)

ROOT = Path(__file__).parents[2]


SCHEMA = json.loads(
    files("precondattn_conformance.report").joinpath("schema.json").read_text(encoding="utf-8")
)


def closed(schema):
    """The schema without properties that it does not describe."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: closed(each) for name, each in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict):
        schema.setdefault("additionalProperties", False)
    return schema


@pytest.mark.parametrize("of", ["a run", "every status", "hostile text"])
def test_a_record_matches_its_schema_and_round_trips(of, tmp_path):
    outcomes = of_every_status()
    if of == "a run":
        chosen = cases("smoke", only_libraries=("numpy",), only_mechanisms=("lucid",))
        outcomes = [run_case(case, ("reference",)) for case in list(chosen)[:12]]
        assert outcomes
    if of == "hostile text":
        outcomes = [replace_texts(outcome, {"reason": HOSTILE}) for outcome in outcomes]
    path = tmp_path / "deep" / "record.json"
    kept = recorded(outcomes, path, backends=("reference",))
    content = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(content, SCHEMA)
    jsonschema.validate(content, closed(SCHEMA))
    assert (content["complete"], content["running"]) == (True, None)
    if of == "every status":  # NaN is not equal to itself.
        assert [*map(repr, kept.outcomes)] == [repr(Result.of_outcome(each)) for each in outcomes]
        assert math.isnan(kept.outcomes[2].error)
        assert math.isinf(kept.outcomes[3].error)
        assert kept.outcomes[4].error is None
    assert [result.id for result in kept.outcomes] == [outcome.case.id for outcome in outcomes]
    assert [result.status for result in kept.outcomes] == [o.status for o in outcomes]
    assert set(content["layouts"]) == {outcome.case.layout.name for outcome in outcomes}
    assert {path.name} == {each.name for each in path.parent.iterdir()}


def test_coverage_counts_compared_cases_and_reasons_of_the_others():
    (row,) = recorded(of_every_status()).coverage
    assert (row.mechanism, row.check, row.compared, row.total) == ("lucid", "outputs", 6, 8)
    assert row.unsupported == {"takes widths that are powers of two; found 5": 1}
    assert row.skipped == {"too large": 1}


def test_a_refusal_is_shortened_to_its_reason():
    assert in_few_words(REFUSAL, ("mine",)) == "takes widths that are powers of two; found 5"
    assert in_few_words(REFUSAL).endswith("; is for GPUs")
    assert in_few_words("no kernel\nfor that") == "no kernel"


CHILD = """
import sys, time
from tests.conformance.outcomes import an_outcome, writer

with writer(sys.argv[1]) as recording:
    for i in range(10**9):
        outcome = an_outcome(id=f"case-{i}", reason="x" * 99)
        recording.started(outcome.case)
        print(i, flush=True)
        time.sleep(0.001)
        recording.add(outcome)
"""


def test_a_killed_run_leaves_a_valid_record_that_names_its_last_case(tmp_path):
    path = tmp_path / "record.json"
    command = [sys.executable, "-c", CHILD, str(path)]
    saved_count, last = 0, -1
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        for line in child.stdout:
            last = int(line)
            if last % 50 == 0:  # The file is valid at any time of the run.
                saved_count = len(load(path).outcomes)
            if saved_count > 100:
                break
        os.kill(child.pid, signal.SIGKILL)
        for line in child.stdout:
            last = int(line)
    assert child.returncode == -signal.SIGKILL
    kept = load(path)
    assert not kept.complete
    assert kept.running in (f"case-{last}", f"case-{last + 1}")
    assert len(kept.outcomes) >= saved_count
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), SCHEMA)
    assert "the run stopped while it ran case-" in page(kept)


def test_a_record_that_can_not_be_written_is_an_error_before_any_case_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="no record can be written to"),
        writer(tmp_path / "file" / "r"),
    ):
        pass


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "there is no file"),
        ("{", "is no record of a conformance run"),
        ("[]", "its schema is not 'precondattn-conformance/1'"),
        ('{"format": 1, "rows": []}', "its schema is not 'precondattn-conformance/1'"),
        ('{"schema": "precondattn-conformance/2"}', "version 2 of the schema.* reads version 1"),
        ('{"schema": "precondattn-conformance/1"}', "no whole record: 'date' is missing"),
        ("strange status", "'broken' is no status"),
        ("strange outcomes", "is no record of a conformance run"),
    ],
)
def test_a_file_that_is_not_a_record_is_refused_with_the_reason(content, complaint, tmp_path):
    path = tmp_path / "record.json"
    if content is not None:
        recorded([an_outcome()], path)
        strange = {"strange status": ('"passed"', '"broken"'), "strange outcomes": ("[", "4, [")}
        if content in strange:
            content = path.read_text(encoding="utf-8").replace(*strange[content])
        path.write_text(content)
    else:
        assert not is_record(path)
    with pytest.raises(ValueError, match=complaint):
        load(path)


def test_a_record_contains_the_commit_and_the_environment(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert environment.revision(tmp_path) is None
    (tmp_path / "kernel.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    assert environment.revision(tmp_path)["modified"] is False
    (tmp_path / "kernel.py").write_text("2")
    monkeypatch.chdir(tmp_path)
    kept = recorded([], backends=("torch", "nobody"), device="cpu")
    assert kept.environment["revision"]["modified"] is True
    assert len(kept.environment["revision"]["commit"]) == 40
    assert kept.backends[0]["package"] == "precondattn"
    assert kept.backends[1] == {"name": "nobody"}
    assert kept.environment["versions"]["numpy"]
    assert kept.environment["settings"]["TRITON_INTERPRET"] == "1"
    assert str(tmp_path) not in json.dumps(kept.head())


def test_writing_a_record_imports_no_package_except_numpy():
    program = (
        "import sys\n"
        "from precondattn_conformance.report.record import RecordWriter\n"
        "chosen = dict(backends=(), level='', device=None, filters={})\n"
        "with RecordWriter(None, **chosen) as recording: pass\n"
        "assert recording.record.complete\n"
        "packages = {'torch', 'jax', 'cupy', 'rich', 'jinja2', 'jsonschema'}\n"
        "print(*packages & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()


def test_junit_contains_every_outcome(tmp_path):
    path = tmp_path / "junit.xml"
    write_junit(recorded(of_every_status(mechanism="softmax[scale=0.3]"), device="cpu"), path)
    root = ElementTree.parse(path).getroot()
    suite = root.find("testsuite")
    for element in (root, suite):
        status_counts = [int(element.get(n)) for n in ("tests", "failures", "errors", "skipped")]
        assert status_counts == [8, 4, 0, 3]
    actual = suite.findall("testcase")
    assert len(actual) == 8
    assert all(case.get("classname") == "conformance.softmax[scale=0_3]" for case in actual)
    assert len({case.get("name") for case in actual}) == 8
    properties = {p.get("name"): p.get("value") for p in actual[0].iter("property")}
    assert properties == {"error": "1e-06", "bound": "2e-05"}
    assert actual[0].find("failure") is actual[0].find("skipped") is None
    failure = actual[1].find("failure")
    assert failure.get("message") == "the output is off by 0.5 (bound 2e-05)"
    for text in ("worst at (0, 1)", "0 . #", "print('β')", "(2e4x)"):
        assert text in failure.text
    skipped = [case.find("skipped") for case in actual[5:]]
    assert [each.get("type") for each in skipped] == [
        "pytest.xfail", "precondattn.unsupported", "pytest.skip",
    ]  # fmt: skip
    assert skipped[0].get("message") == "issue 41"
    assert "powers of two" in skipped[1].text


def kinds(old, new, factor=3.0):
    """The kinds of change between two outcomes of a case, and whether they are worse."""
    before, after = ([] if each is None else [each] for each in (old, new))
    actual = compare_records(recorded(before), recorded(after), factor)
    return list(actual.by_kind), actual.is_worse


GOOD, BAD = an_outcome(), a_failure()


KNOWN = an_outcome("xfailed", reason="issue 41")


REFUSED, LEFT = an_outcome("unsupported", None, reason="no"), an_outcome("skipped", None)


@pytest.mark.parametrize(
    ("old", "new", "kind", "worse"),
    [
        (GOOD, BAD, "began_to_fail", True),
        (REFUSED, BAD, "began_to_fail", True),
        (KNOWN, BAD, "began_to_fail", True),
        (None, BAD, "began_to_fail", True),
        (BAD, GOOD, "fixed", False),
        (KNOWN, GOOD, "fixed", False),
        (GOOD, REFUSED, "lost", True),
        (BAD, REFUSED, "lost", True),
        (GOOD, LEFT, "lost", True),
        (REFUSED, GOOD, "gained", False),
        (GOOD, KNOWN, "excused", False),
        (REFUSED, KNOWN, "excused", False),
        (GOOD, None, "only_old", False),
        (None, GOOD, "only_new", False),
        (an_outcome(error=1e-6), an_outcome(error=4e-6), "grew", True),
        (an_outcome(error=0.0), an_outcome(error=1e-5), "grew", True),
        (an_outcome(error=1e-6), an_outcome(error=2.9e-6), None, False),
        (an_outcome(error=1e-9), an_outcome(error=1e-6), None, False),
        (REFUSED, LEFT, None, False),
        (BAD, a_failure(error=0.9), None, False),
    ],
)
def test_a_comparison_classifies_changes_of_an_outcome(old, new, kind, worse):
    assert kinds(old, new) == ([kind] if kind else [], worse)


def test_a_printed_comparison_lists_other_differences_of_the_records():
    old = recorded([GOOD, an_outcome(layout="ragged"), an_outcome(layout="odd")])
    new = recorded([BAD, an_outcome(layout="ragged", error=8e-6)], level="full", device="cuda")
    new.environment = {**new.environment, "versions": {"numpy": "[bold]9"}}
    new.complete, new.running = False, "some-case"
    printed = printed_by(lambda console: print_comparison(compare_records(old, new), console), 200)
    for text in (
        "1 began to fail",
        "failed: the output is off by 0.5",
        "1 have a larger error",
        "1e-06 before, 8e-06 now (8x), 40% of its bound 2e-05",
        "1 are only in the old record",
        "level: smoke before, full now",
        "versions numpy:",
        "[bold]9 now",
        "the new record is not complete; it was running some-case",
        "0 as before",
    ):
        assert text in printed


@pytest.fixture
def saved(tmp_path):
    """The files of a good and a bad run, and of a benchmark."""
    paths = {name: tmp_path / f"{name}.json" for name in ("good", "bad", "timed", "nothing")}
    recorded([GOOD], paths["good"])
    recorded([BAD], paths["bad"])
    BenchRecord("", {}).save(paths["timed"])
    return paths


@pytest.mark.parametrize(
    ("old", "new", "options", "code", "says"),
    [
        ("good", "good", (), 0, ""),
        ("good", "bad", (), 1, "1 began to fail"),
        ("bad", "good", (), 0, ""),
        ("timed", "timed", (), 0, ""),
        ("good", "timed", (), 2, "only two of the same kind can be compared"),
        ("timed", "good", (), 2, "only two of the same kind can be compared"),
        ("good", "nothing", (), 2, "there is no file"),
        ("good", "bad", ("--growth", "0.5"), 2, "growth must be 1 or above"),
    ],
)
def test_compare_accepts_two_records_of_one_kind_only(saved, old, new, options, code, says):
    done = CliRunner().invoke(app, ["compare", str(saved[old]), str(saved[new]), *options])
    assert done.exit_code == code, done.output
    assert says in " ".join(done.output.split())


def test_the_schema_contains_every_status():
    assert SCHEMA["properties"]["schema"]["const"] == record_module.SCHEMA
    assert set(STATUSES) == set(SCHEMA["$defs"]["outcome"]["properties"]["status"]["enum"])
