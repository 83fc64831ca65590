"""The suite on faulty backends reports each fault, and the other cases still run.

Tests in which no process dies, hangs or is replaced run the suite in this process.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from precondattn_conformance.cases import cases
from precondattn_conformance.command import conformance as run_suite
from precondattn_conformance.report.record import load
from precondattn_conformance.session import Session

FOLDER = Path(__file__).parent / "bad_backends"
MAIN = "from precondattn.command_line.cli import main; main()"
COMMAND = (sys.executable, "-c", MAIN, "conformance", "--jobs", "1", "--backend")
SUITE = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "precondattn_conformance")


def environment():
    return {**os.environ, "PYTHONPATH": str(FOLDER)}


def recorded(tmp_path, backend, *arguments):
    """Run the command; returns the exit code, the record and the printed text."""
    path = tmp_path / "record.json"
    chosen = ("--mechanism", "softmax", "--library", "numpy", "--record", str(path))
    done = subprocess.run(
        [*COMMAND, backend, *chosen, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert path.exists(), done.stderr
    return done.returncode, load(path), done.stdout + done.stderr


@pytest.fixture
def here(tmp_path, only_the_reference, monkeypatch):
    """A function like `recorded` that runs the cases in this process."""
    monkeypatch.syspath_prepend(str(FOLDER))
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # Memory is measured in a process.

    def run(backend, **chosen):
        path, printed = tmp_path / "record.json", io.StringIO()
        chosen = {"mechanisms": ("softmax",), "libraries": ("numpy",), **chosen}
        session = Session(backend=(backend,), jobs=0, **chosen)
        junit, page = tmp_path / "junit.xml", tmp_path / "page.html"
        files = {"record": path, "junit": junit, "html": page}
        code = run_suite(session, Console(file=printed, width=80), **files)
        return code, load(path), printed.getvalue()

    return run


OUTPUTS = {"dtypes": ("float64",), "checks": ("outputs",)}


FAULTY = [
    # The backend, what is run, the checks and dtypes that fail, and words of what is printed.
    ("zeros", OUTPUTS, "outputs", "float64", "the output is off by 1 "),
    ("pretends", OUTPUTS, "outputs", "float64", "the output is off by"),
    ("raises", OUTPUTS, "outputs", "float64", "launch failed"),
    # Backends without float64 have the same checks in float32.
    ("varies", {}, "determinism", "float32", "is not deterministic"),
]


@pytest.mark.parametrize(("backend", "chosen", "check", "dtype", "says"), FAULTY)
def test_a_faulty_backend_fails_in_the_check_of_its_fault(
    here, backend, chosen, check, dtype, says
):
    code, record, printed = here(backend, **chosen)
    assert code == 1
    failed = [outcome for outcome in record.outcomes if outcome.status == "failed"]
    assert {(outcome.check, outcome.dtype) for outcome in failed} == {(check, dtype)}
    assert len(failed) >= (3 if chosen else 1)
    assert f"{backend}: " in printed
    assert says in " ".join(printed.split())


def test_smoke_runs_the_same_checks_in_the_widest_dtype_of_a_backend(here):
    code, record, _ = here("narrow")
    assert code == 0
    assert {outcome.dtype for outcome in record.outcomes} == {"float32"}
    wide = cases("smoke", only_mechanisms=("softmax",), only_libraries=("numpy",))
    assert {outcome.check for outcome in record.outcomes} == {case.check for case in wide}


def test_a_failure_shows_its_position_its_size_and_code_that_reproduces_it(here):
    _, record, printed = here("shuffles", **OUTPUTS)
    (plain,) = [o for o in record.outcomes if o.layout == "plain"]
    assert "first wrong element: b=0, t=0, h=0, e=0:" in plain.details
    assert "b=1 h=3" in plain.details
    assert "the output is off by" in plain.reason
    assert plain.id in plain.snippet
    assert (plain.alone, plain.after) == ("", ())
    shown = run_snippet(plain)
    assert shown.returncode == 1
    assert shown.stdout.startswith("failed: the output is off by")
    found, expected = re.search(r": (\S+) found, (\S+) expected", plain.reason).groups()
    worst = [float(number) for number in shown.stdout.splitlines()[-1].split()]
    np.testing.assert_allclose(worst, [float(found), float(expected)], rtol=1e-6)
    assert "first wrong element" in printed


def run_snippet(outcome):
    """Run the code of a failure as a script."""
    return subprocess.run(
        [sys.executable, "-c", outcome.snippet],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


ZERO = "outputs-numpy-float64-packed-zero-softmax"
NARROW, WIDE = (f"outputs-numpy-float64-plain-random-softmax[scale={s}]" for s in (0.3, 0.7))
OTHERS = tuple(
    f"outputs-numpy-float64-{layout}-random-softmax"
    for layout in ("fewer_queries", "own_kv_heads", "block_less_one")
)


@pytest.mark.thorough
def test_a_failure_that_needs_an_earlier_call_is_reported_with_that_call(tmp_path):
    given = [word for name in (OTHERS[0], NARROW, *OTHERS[1:], WIDE) for word in ("--case", name)]
    junit, page = tmp_path / "junit.xml", tmp_path / "page.html"
    written = ("--junit", str(junit), "--html", str(page))
    code, record, printed = recorded(tmp_path, "keyed", *given, *written)
    assert code == 1
    (failed,) = [outcome for outcome in record.outcomes if outcome.status == "failed"]
    assert failed.id == WIDE
    assert failed.reason.startswith(
        "failed in the run, passes alone: it depends on an earlier call"
    )
    assert "the output is off by" in failed.reason
    assert failed.alone == "passed"
    assert failed.after == (NARROW,)
    assert f"It fails after {NARROW}" in failed.details
    assert f"--case '{NARROW}' \\\n    --case '{WIDE}'" in failed.details
    assert "passes alone: it depends on an earlier call" in printed
    for file in (junit, page):
        assert "passes alone: it depends on an earlier call" in file.read_text()
    shown = run_snippet(failed)
    assert shown.returncode == 1
    assert shown.stdout.startswith("failed: the output is off by")


@pytest.mark.thorough
def test_a_failure_that_never_comes_back_depends_on_chance(tmp_path, monkeypatch):
    monkeypatch.setenv("WAS_WRONG", str(tmp_path / "wrong"))
    code, record, _ = recorded(tmp_path, "sometimes", "--case", OTHERS[0], "--case", ZERO)
    assert code == 1
    (failed,) = [outcome for outcome in record.outcomes if outcome.status == "failed"]
    assert "and after the same 1 cases: it depends on chance" in failed.reason
    assert failed.alone == "passed"
    assert failed.after == ()


def test_a_backend_that_refuses_all_has_no_coverage_and_fails(here):
    code, record, printed = here("refuses")
    assert code == 1
    assert record.count("unsupported") == len(record.outcomes) > 10
    assert "not today" in printed
    assert "nothing was compared" in printed


def rows_of_design(folder):
    """A file with a pattern for the rows of the design, whose layouts have no given names."""
    path = folder / "rows_of_design.txt"
    path.write_text("*block*  # rows of the design\n")
    return str(path)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """The exit code, the record and the printed text of a backend that kills its process."""
    folder = tmp_path_factory.mktemp("crashed")
    return recorded(folder, "crashes", "--dtype", "float64", "--jobs", "2")


@pytest.mark.thorough
def test_a_crash_of_one_of_two_processes_is_one_failure_and_the_rest_runs(crashed):
    code, record, printed = crashed
    assert code == 1
    failed = [outcome for outcome in record.outcomes if outcome.status == "failed"]
    layouts = {outcome.layout for outcome in failed}
    assert "packed" in layouts
    assert all(layout == "packed" or "segment" in layout for layout in layouts)
    assert all("the process died of SIGSEGV" in outcome.reason for outcome in failed)
    assert all("Segmentation fault" in outcome.details for outcome in failed)
    assert f"failed {ZERO}" in printed
    assert record.complete
    assert record.count("passed") > 5


@pytest.mark.thorough
def test_a_hang_is_one_failure_with_its_position_and_the_rest_runs(tmp_path):
    given = ("--dtype", "float64", "--check", "outputs", "--timeout", "4")
    code, record, _ = recorded(tmp_path, "hangs", *given, "--skip", rows_of_design(tmp_path))
    assert code == 1
    (failed,) = [outcome for outcome in record.outcomes if outcome.status == "failed"]
    assert failed.layout == "packed"
    assert "no result after 4 s" in failed.reason
    assert "bad_backends.py" in failed.details
    assert record.count("passed") == 3


LEAK, LONG = "leaks-torch-float32-leak-random-softmax", "memory-torch-float32-long-random-softmax"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "case", "says"),
    [
        ("leaks", LEAK, "each call keeps"),
        ("quadratic", LONG, "declares linear memory"),
    ],
)
def test_memory_that_is_kept_or_exceeds_what_is_declared_is_a_failure(here, backend, case, says):
    pytest.importorskip("torch")
    code, record, _ = here(backend, mechanisms=(), libraries=(), ids=(case,))
    (outcome,) = record.outcomes
    assert code == 1, outcome.reason
    assert says in outcome.reason


@pytest.mark.thorough
def test_processes_end_without_leaving_locks_of_the_backend(tmp_path):
    case = "outputs-numpy-float64-plain-random-softmax"
    code, _, printed = recorded(tmp_path, "locks", "--case", case)
    assert code == 0, printed
    assert "resource_tracker" not in printed


def test_a_backend_below_its_declared_minimum_fails(here):
    code, record, printed = here("late", mechanisms=("softmax", "lucid_solve"), **OUTPUTS)
    assert code == 1
    assert record.count("failed") == 0
    assert "late promises lucid_solve, but no case of it was compared" in printed
    code, _, printed = here("late", **OUTPUTS)
    assert code == 0, printed


def test_a_backend_that_declines_most_of_a_check_fails_with_what_why_and_how_to_declare(
    here, tmp_path
):
    code, record, printed = here("choosy")
    assert (record.count("failed"), record.count("passed")) == (0, 2)
    assert {outcome.dtype for outcome in record.outcomes} == {"float32"}
    assert code == 1
    assert "too little was compared, less than half: outputs 1 of 8, gradients 1 of 12" in printed
    assert "stability 0 of 5" in printed
    assert "caching" not in printed.split("too little")[1]
    assert "most often because: takes a key head for each query head (32)" in printed
    assert '--declines "outputs: why"' in printed
    assert "agrees with the definitions" not in printed
    page = (tmp_path / "page.html").read_text()
    assert "Too little was compared" in page
    assert "choosy: fewer than half of a check" in page

    # What is declared is shown with its reason, and not counted.
    code, record, printed = here("choosy", declines=("grouped_heads: a head of its own each",))
    assert code == 0, printed
    assert record.count("passed") == 2
    assert re.search(r"stability +0 of 5 +a head of its own each, as declared \(5\)", printed)
    rows = {row["check"]: row for row in record.checks}
    assert rows["stability"]["declared"] == {"a head of its own each": 5}
    assert (rows["outputs"]["compared"], rows["outputs"]["of"]) == (1, 9)
    assert all(row["is_enough"] for row in rows.values())
    assert "a head of its own each: 5" in (tmp_path / "page.html").read_text()
    junit = (tmp_path / "junit.xml").read_text()
    assert '"compared of stability" value="0 of 5"' in junit


def test_cases_by_their_ids_are_not_counted(here):
    cases = ("outputs-numpy-float32-own_kv_heads-random-softmax", f"outputs-{PACKED}", STABLE)
    code, record, printed = here("choosy", mechanisms=(), libraries=(), ids=cases)
    assert (record.count("passed"), record.count("unsupported")) == (1, 2)
    assert code == 0, printed
    assert record.checks == []


PACKED = "numpy-float32-packed-zero-softmax"
STABLE = "stability-numpy-float32-plain-huge_logits-softmax"


def children_of(process):
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.thorough
def test_an_interrupted_run_leaves_a_partial_record_and_no_process(tmp_path):
    path = tmp_path / "record.json"
    # Tests in the background ignore interrupts, and a child process inherits this.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*COMMAND, "hangs", "--mechanism", "softmax", "--library", "numpy", "--record", path],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, ignored)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if path.exists() and "packed" in str(json.loads(path.read_text())["running"]):
            break
    children = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert children
    deadline = time.monotonic() + 20  # Python's resource tracker ends after its parent.
    while children and time.monotonic() < deadline:
        time.sleep(0.05)
        children = [child for child in children if Path(f"/proc/{child}").exists()]
    assert not children
    record = load(path)
    assert not record.complete
    assert record.count("passed") > 0
    assert "interrupted" in printed


@pytest.mark.thorough(but=("raises",))
@pytest.mark.parametrize("backend", ["raises", "crashes"])
def test_lists_of_expected_failures_and_skipped_cases(tmp_path, here, backend):
    xfail, skip = tmp_path / "xfail.txt", tmp_path / "skip.txt"
    # Of the cases that are not skipped, one of these backends fails in all.
    failing = "packed" if backend == "crashes" else "*"
    xfail.write_text(f"# Known.\noutputs-*-{failing}-*-softmax   # not written yet\n")
    skip.write_text("outputs-*-ragged-*  # issue 3\n*block*  # rows of the design\n")
    if backend == "raises":
        code, record, printed = here("raises", xfail=xfail, skip=skip, **OUTPUTS)
        assert code == 1  # Nothing was compared.
    else:
        files = ("--xfail", str(xfail), "--skip", str(skip))
        code, record, printed = recorded(
            tmp_path, "crashes", *files, "--check", "outputs", "--dtype", "float64"
        )
        assert code == 0, printed
    by_layout = {outcome.layout: outcome.status for outcome in record.outcomes}
    assert by_layout["packed"] == "xfailed"
    assert by_layout["ragged"] == "skipped"
    code, record, _ = here("quadratic", xfail=xfail, skip=skip, **OUTPUTS)
    assert code == 1
    failed = [outcome for outcome in record.outcomes if outcome.status == "failed"]
    assert "packed" in {outcome.layout for outcome in failed}
    assert all("it passed, though" in outcome.reason for outcome in failed)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("outputs-numpy-float64-plain-clustered-softmacks  # a slip", "matches no case"),
        ("outputs-*", "no reason given"),
    ],
)
def test_an_invalid_line_of_a_list_is_an_error(tmp_path, here, line, says):
    path = tmp_path / "xfail.txt"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=says):
        here("zeros", xfail=path)


@pytest.mark.thorough
def test_pytest_reports_the_same_as_the_command(tmp_path, crashed):
    path = tmp_path / "record.json"
    done = subprocess.run(
        [
            *(sys.executable, *SUITE, "--precondattn-backend=crashes"),
            *("--precondattn-mechanism=softmax", "--precondattn-library=numpy"),
            *("--precondattn-dtype=float64", f"--precondattn-record={path}"),
        ],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the process died of SIGSEGV" in done.stdout
    assert "from precondattn_conformance import call_of, replay" in done.stdout
    of_pytest = {outcome.id: outcome.status for outcome in load(path).outcomes}
    assert of_pytest == {outcome.id: outcome.status for outcome in crashed[1].outcomes}
