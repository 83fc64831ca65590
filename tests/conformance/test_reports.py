"""Reports of a conformance run: the record, the matrix, JUnit, the page, comparisons."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from types import SimpleNamespace
from typing import NamedTuple
from xml.etree import ElementTree

import jsonschema
import pytest
from rich.console import Console

import precondattn_conformance.report.record as record_module
from precondattn_conformance.bench.record import BenchRecord
from precondattn_conformance.cases import cases
from precondattn_conformance.checks.check import Measured
from precondattn_conformance.command import _print_pairs, _print_verdict
from precondattn_conformance.design.coverage import Pairs
from precondattn_conformance.report import command, environment
from precondattn_conformance.report.compare import compare_records, print_comparison
from precondattn_conformance.report.failures import IN_FULL
from precondattn_conformance.report.junit import write_junit
from precondattn_conformance.report.matrix import matrix
from precondattn_conformance.report.page import page, write_page
from precondattn_conformance.report.printable import printable
from precondattn_conformance.report.record import RecordWriter, is_record, load
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.report.result import Result, share_text
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.session import Session
from precondattn_conformance.status import STATUSES

SCHEMA = json.loads(
    files("precondattn_conformance.report").joinpath("schema.json").read_text(encoding="utf-8")
)

HOSTILE = (
    "</script><script>alert('&')</script> ]]> \" onmouseover=x \x1b[31mred\x1b[0m \x00\x07 \ud800"
)

REFUSAL = """lucid: the requested backend mine does not support all of it
  y = lucid_solve(k, v)
    mine: takes widths that are powers of two; found 5
  out = softmax(q, k, v=y)
    mine: takes widths that are powers of two; found 5
    other: is for GPUs"""


class CaseLayout(NamedTuple):
    name: str
    t: int = 7
    mask: str | None = None


def an_outcome(status="passed", error=1e-6, bound=2e-5, **changed):
    """An outcome of the runner, in the form that reports read."""
    parts = {"check": "outputs", "mechanism": "lucid", "library": "torch", "dtype": "float32"}
    parts |= {name: changed.pop(name) for name in list(changed) if name in parts}
    layout, kind = CaseLayout(changed.pop("layout", "plain")), "clustered"
    identity = changed.pop("id", "-".join((*parts.values(), layout.name, kind)))
    measured = None
    if error is not None:
        measured = Measured(error, bound, expected_by="reference")
    texts = {"reason": "", "details": "", "snippet": "", "seconds": 0.1, "alone": "", "after": ()}
    texts |= changed
    return SimpleNamespace(
        case=SimpleNamespace(id=identity, layout=layout, kind=kind, **parts),
        status=status,
        measured=measured,
        **texts,
    )


def a_failure(**changed):
    texts = {
        "reason": "the output is off by 0.5 (bound 2e-05)\nworst at (0, 1)",
        "details": "  0 1\n0 . #",
        "snippet": "print('β')",
        "alone": "passed",
        "after": ("outputs-torch-float32-plain-clustered-softmax",),
    }
    return an_outcome("failed", **{"error": 0.5, **texts, **changed})


def of_every_status(**changed):
    """One outcome of each status, some with errors of NaN and infinity."""
    return [
        an_outcome(**changed),
        a_failure(layout="ragged", **changed),
        a_failure(layout="nan", error=math.nan, **changed),
        a_failure(layout="inf", error=math.inf, **changed),
        a_failure(layout="raised", **{**changed, "error": None}),
        an_outcome("xfailed", layout="known", reason="issue 41", **changed),
        an_outcome("unsupported", layout="odd", reason=REFUSAL, **{**changed, "error": None}),
        an_outcome("skipped", layout="big", reason="too large", **{**changed, "error": None}),
    ]


def recorded(outcomes, path=None, *, backends=("mine",), **changed):
    """The record of these outcomes, written to the file and read from it if a path is given."""
    options = {"level": "smoke", "device": None, "filters": {"mechanism": ("lucid",)}, **changed}
    with RecordWriter(path, backends=backends, **options) as recording:
        for outcome in outcomes:
            recording.started(outcome.case)
            recording.add(outcome)
    return recording.record if path is None else load(path)


def undescribed(value, schema, at=""):
    """The parts of a record that the schema does not describe."""
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "oneOf" in schema and isinstance(value, dict):
        schema = next(each for each in schema["oneOf"] if each.get("type") == "object")
    if isinstance(value, list):
        return [x for each in value for x in undescribed(each, schema.get("items", {}), at)]
    if not isinstance(value, dict) or schema == {"type": "object"}:
        return []
    own, others = schema.get("properties", {}), schema.get("additionalProperties")
    actual = []
    for name, each in value.items():
        described = own.get(name, others)
        if described is None:
            actual.append(f"{at}.{name}")
        else:
            actual += undescribed(each, described, f"{at}.{name}")
    return actual


def printed_by(print_it, width=80):
    printed = io.StringIO()
    print_it(Console(file=printed, width=width))
    return printed.getvalue()


# The record.


@pytest.mark.parametrize("of", ["a run", "every status", "hostile text"])
def test_a_record_matches_its_schema(of, tmp_path):
    if of == "a run":
        chosen = cases("smoke", only_libraries=("numpy",), only_mechanisms=("lucid",))
        outcomes = [run_case(case, ("reference",)) for case in list(chosen)[:12]]
        assert outcomes
    else:
        outcomes = of_every_status()
    if of == "hostile text":
        outcomes = [replace_texts(outcome, {"reason": HOSTILE}) for outcome in outcomes]
    path = tmp_path / "deep" / "record.json"
    kept = recorded(outcomes, path, backends=("reference",), level="smoke")
    content = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(content, SCHEMA)
    assert not undescribed(content, SCHEMA)
    assert content["complete"] is True
    assert content["running"] is None
    assert [result.id for result in kept.outcomes] == [outcome.case.id for outcome in outcomes]
    assert [result.status for result in kept.outcomes] == [o.status for o in outcomes]
    assert set(content["layouts"]) == {outcome.case.layout.name for outcome in outcomes}
    assert {path.name} == {each.name for each in path.parent.iterdir()}


def test_a_record_round_trips(tmp_path):
    outcomes = of_every_status()
    actual = recorded(outcomes, tmp_path / "record.json").outcomes
    for result, outcome in zip(actual, outcomes, strict=True):
        assert repr(result) == repr(Result.of_outcome(outcome))  # NaN is not equal to itself.
    assert math.isnan(actual[2].error)
    assert math.isinf(actual[3].error)
    assert actual[4].error is None


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
from types import SimpleNamespace
from typing import NamedTuple
from precondattn_conformance.report.record import RecordWriter

class CaseLayout(NamedTuple):
    name: str

def case(i):
    return SimpleNamespace(id=f"case-{i}", check="outputs", mechanism="lucid", library="numpy",
                           dtype="float64", layout=CaseLayout("plain"), kind="random")

with RecordWriter(sys.argv[1], backends=(), level="full", device=None, filters={}) as recording:
    for i in range(10**9):
        recording.started(case(i))
        print(i, flush=True)
        time.sleep(float(sys.argv[2]))
        recording.add(SimpleNamespace(case=case(i), status="passed", measured=None, reason="x" * 99,
                                      details="", snippet="", seconds=0.0, alone="", after=()))
"""


def test_a_killed_run_leaves_a_valid_record_that_names_its_last_case(tmp_path):
    path = tmp_path / "record.json"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), "0.001"], stdout=subprocess.PIPE, text=True
    )
    saved_count, last = 0, -1
    with child:
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


def test_a_record_names_the_first_case_before_it_ends(tmp_path):
    path = tmp_path / "record.json"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), "60"], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline().strip() == "0"
        os.kill(child.pid, signal.SIGKILL)
    assert (load(path).running, load(path).outcomes) == ("case-0", [])


def test_an_interrupted_run_keeps_all_outcomes_so_far(tmp_path):
    path = tmp_path / "record.json"

    def run():
        with RecordWriter(path, backends=(), level="full", device=None, filters={}) as recording:
            for outcome in of_every_status()[:3]:
                recording.started(outcome.case)
                recording.add(outcome)
            recording.started(SimpleNamespace(id="slow" * 1000))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    kept = load(path)
    assert not kept.complete
    assert len(kept.outcomes) == 3
    assert kept.running.startswith("slowslow")


def test_the_file_is_replaced_about_once_a_second(tmp_path):
    now, written = 0.0, []
    recording = RecordWriter(
        tmp_path / "record.json",
        backends=(), level="full", device=None, filters={}, clock=lambda: now,
    )  # fmt: skip
    whole = recording._bytes
    recording._bytes = lambda: written.append(now) or whole()
    with recording:
        for i in range(100):
            now = i / 10
            recording.add(an_outcome(layout=f"{i}"))
    assert written == [0.0, *(float(second) for second in range(1, 10)), now]


def test_a_record_that_can_not_be_written_is_an_error_before_any_case_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="no record can be written to"),
        RecordWriter(tmp_path / "file" / "r", backends=(), level="", device=None, filters={}),
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
    program = """
        import sys
        from precondattn_conformance.report.record import RecordWriter
        with RecordWriter(None, backends=(), level="", device=None, filters={}) as recording:
            pass
        assert recording.record.complete
        imported = {"torch", "jax", "cupy", "rich", "jinja2", "jsonschema"} & set(sys.modules)
        assert not imported, imported
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_control_characters_in_text_are_removed_or_escaped():
    assert printable("a\x1b[31mred\x1b[0m\tb\r\nc") == "ared\tb\nc"
    assert printable("\x00\x07\x1b \ud800 \u202e") == "\\x00\\x07\\x1b \\ud800 \\u202e"
    assert printable("β ≤ 1 – 日本") == "β ≤ 1 – 日本"


# The matrix.


MECHANISMS = [f"{outer}(base{i})" for outer in ("lucid", "laser", "ccq") for i in range(24)]
CHECKS = [
    "outputs", "gradients", "caching", "splits", "alternation", "states", "packing", "stability",
    "determinism", "purity", "refusals", "memory", "strides", "padding", "transforms", "dtypes",
    "autocast", "sharding",
]  # fmt: skip


@pytest.mark.parametrize("count", [4, len(CHECKS)])
def test_the_matrix_of_many_mechanisms_fits_80_columns(count):
    outcomes = [
        an_outcome(mechanism=m, check=check, library=library, dtype=dtype)
        for m in MECHANISMS
        for check in CHECKS[:count]
        for library, dtype in (("numpy", "float64"), ("torch", "bfloat16"))
    ]
    outcomes += [a_failure(mechanism="laser(base7)", check="caching", layout="odd")]
    outcomes += [
        an_outcome("unsupported", None, mechanism=f"gla[scale={i}]", reason="no") for i in range(3)
    ]
    printed = printed_by(lambda console: matrix(outcomes, console))
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 40
    assert "24 of lucid" in printed
    assert "23 more of laser" in printed
    assert "\nlaser(base7)" in printed
    assert "  torch float32" in printed
    assert "✗1" in printed
    assert "nothing compared of gla (3)" in printed
    assert "..." not in printed


def test_the_matrix_shows_the_worst_error_and_every_status():
    outcomes = [an_outcome(error=1e-6), an_outcome(error=1.5e-5, layout="ragged")]
    outcomes += [an_outcome("xfailed", layout="x"), an_outcome("unsupported", None, layout="y")]
    outcomes += [a_failure(mechanism="path", error=math.nan), a_failure(mechanism="[red]odd[/red]")]
    printed = printed_by(lambda console: matrix(map(Result.of_outcome, outcomes), console))
    assert "75% x1 ○1" in printed
    assert "✗1 NaN" in printed
    assert "[red]odd[/red]" in printed
    assert printed_by(lambda console: matrix([], console)) == "no cases were run\n"


def test_names_of_checks_are_whole_and_one_without_comparisons_has_no_column():
    outcomes = [an_outcome(check=check) for check in CHECKS]
    outcomes += [an_outcome("unsupported", None, check="refusals_of_all", reason="no")]
    printed = printed_by(lambda console: matrix(outcomes, console))
    heads = {word for line in printed.splitlines() for word in line.split()}
    assert heads >= {*CHECKS}
    assert "refusals_of_all" not in printed


def test_a_run_says_what_it_tried_and_what_to_do_next():
    pairs = [Pairs("lucid", 21, 100), Pairs("laser", 0, 0)]
    printed = printed_by(lambda console: _print_pairs(pairs, "smoke", console))
    assert "21 % of all pairs of sizes, masks and options were tried (--level full" in printed
    printed = printed_by(lambda console: _print_pairs(pairs, "stress", console))
    assert "tries more" not in printed
    good, bad = Report([an_outcome()]), Report([a_failure()])
    for report, is_good in ((good, True), (bad, False)):
        printed = printed_by(
            lambda console, report=report: _print_verdict(report, [], Session(), 1, console)
        )
        assert ("precondattn explain" in printed) is is_good


def test_shares_are_short():
    shares = (0.0, 1e-9, 0.124, 1.0, 1.04, 41.4, 999, 1234, 3e12, math.inf, math.nan)
    texts = ["0", "<1%", "12%", "100%", "1.04x", "41x", "999x", "1e3x", "3e12x", "inf", "NaN"]
    assert [share_text(share) for share in shares] == texts


# JUnit.


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


# The page.


class Reader(HTMLParser):
    """The text of a page, its tags and attributes; tags that are not closed are an error."""

    VOID = frozenset({"meta", "input", "wbr", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def values(self, name):
        return [value for _, attribute, value in self.attributes if attribute == name]


def test_the_page_shows_all_outcomes_and_loads_no_other_file(tmp_path):
    path = tmp_path / "page.html"
    outcomes = of_every_status() + of_every_status(mechanism="lucid(path)", library="numpy")
    write_page(recorded(outcomes), path, docs_link=lambda check: f"https://example.org/#{check}")
    read = Reader(path.read_text(encoding="utf-8"))
    for text in (
        "✗ Failed",
        "8 cases: the output is off by ... (bound ...)",
        "mine: 8 of 12 cases that were compared with the oracle failed, in 2 mechanisms.",
        "the output is off by 0.5",
        "0 . #",
        "print('β')",
        "issue 41",
        "takes widths that are powers of two; found 5",
        "too large: 2",
    ):
        assert text in read.text
    for outcome in outcomes[1:6]:
        assert outcome.case.id in read.text
    summary = "lucid, outputs, float32: 1 passed, 4 failed, 1 failed as expected, 1 unsupported"
    assert any(label.startswith(summary) for label in read.values("aria-label"))
    assert "https://example.org/#outputs" in read.values("href")
    assert not read.values("src")
    assert not {"link", "img", "iframe", "object", "base"} & set(read.tags)
    local = [link for link in read.values("href") if not link.startswith("https://example.org")]
    assert all(link.startswith("#") for link in local)
    ids = read.values("id")
    assert {link[1:] for link in local} <= set(ids)
    assert len(ids) == len(set(ids))
    style = path.read_text(encoding="utf-8").partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_tables_of_the_page_are_sorted_by_their_headings_without_a_network():
    """Every table has headings that the script makes into buttons; no address is in the page."""
    text = page(recorded(of_every_status() + of_every_status(mechanism="lucid(path)")))
    read = Reader(text)
    tables = read.tags.count("table")
    assert tables >= 4
    assert ("table", "class", "grid") in read.attributes
    assert ("table", "class", "plain") in read.attributes
    assert [scope for tag, _, scope in read.attributes if tag == "th"].count("col") >= 2 * tables
    script = text.partition("<script>")[2].partition("</script>")[0]
    for part in ('document.querySelectorAll("table")', 'createElement("button")', "aria-sort"):
        assert part in script
    for address in ("http:", "https:", "fetch(", "XMLHttpRequest", "import(", "import "):
        assert address not in script
    assert "://" not in text


def test_the_page_states_the_verdict():
    good, refused = an_outcome(), an_outcome("unsupported", None, layout="odd")
    assert "✓ Passed" in Reader(page(recorded([good, refused]))).text
    assert "All 1 compared case agree" in Reader(page(recorded([good]))).text
    for nothing in ([], [refused]):
        assert "✗ Nothing was compared" in Reader(page(recorded(nothing))).text
    stopped = replace(recorded([good]), complete=False)
    assert "✗ Not complete" in Reader(page(stopped)).text


def test_a_large_page_is_small_enough():
    """If there are many failures, some of each kind are shown in full, and the others by name."""
    outcomes = [
        an_outcome(mechanism=m, check=check, layout=f"layout{i}")
        for m in MECHANISMS
        for check in CHECKS[:4]
        for i in range(7)
    ]
    outcomes += [
        a_failure(mechanism=m, check=check, layout=f"bad{i}", details="x" * 1500)
        for m in MECHANISMS
        for check in CHECKS[:2]
        for i in range(14)
    ]
    text = page(recorded(outcomes))
    read = Reader(text)
    assert len(outcomes) > 4000
    assert len(text.encode()) < 2_000_000
    assert sum(name.startswith("failure-") for name in read.values("id")) == IN_FULL
    assert f"And {72 * 28 - IN_FULL} more" in read.text
    for m in MECHANISMS:
        assert f"{m}, outputs, torch float32, layout bad0" in read.text


def test_hostile_text_is_escaped(tmp_path):
    changed = dict.fromkeys(("mechanism", "reason", "details", "snippet", "library"), HOSTILE)
    outcomes = [replace_texts(outcome, changed) for outcome in of_every_status()]
    path = tmp_path / "record.json"
    kept = recorded(outcomes, path, backends=(HOSTILE,), filters={HOSTILE: (HOSTILE,)})
    path.write_text(path.read_text(encoding="utf-8").replace('"Linux', '"<b>\\u001b[1mLinux'))
    kept = load(path)
    read = Reader(page(kept))
    assert read.tags.count("script") == 1
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert printable(HOSTILE) in read.text
    write_junit(kept, tmp_path / "junit.xml")
    failure = next(ElementTree.parse(tmp_path / "junit.xml").getroot().iter("failure"))
    assert printable(HOSTILE) in failure.text
    for text in (printed_by(lambda console: matrix(kept.outcomes, console)), page(kept)):
        assert not {"\x1b", "\x00", "\x07"} & set(text)


def replace_texts(outcome, changed):
    case = SimpleNamespace(**{**vars(outcome.case), **changed})
    return SimpleNamespace(**{**vars(outcome), **changed, "case": case})


def test_a_page_without_jinja_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match="its extra 'conformance'"):
        page(recorded([]))


# Comparisons.


def kinds(old, new, factor=3.0):
    """The kinds of change between two outcomes of a case, and whether they are worse."""
    before, after = ([] if each is None else [each] for each in (old, new))
    actual = compare_records(recorded(before), recorded(after), factor)
    names = [n for n, each in vars(actual).items() if isinstance(each, list) and each]
    return names, actual.is_worse


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


def test_compare_accepts_two_records_of_one_kind_only(tmp_path):
    good, bad, timed = (tmp_path / f"{name}.json" for name in ("good", "bad", "timed"))
    recorded([GOOD], good)
    recorded([BAD], bad)
    BenchRecord("", {}).save(timed)
    console = Console(file=io.StringIO(), width=200)

    def compare(old, new):
        return command.compare(old, new, threshold=0.1, growth=3.0, console=console)

    assert compare(good, good) == 0
    assert compare(good, bad) == 1
    assert compare(bad, good) == 0
    assert compare(timed, timed) == 0
    for pair in ((good, timed), (timed, good)):
        with pytest.raises(ValueError, match=r"good.json is a record .* and .*timed.json is not"):
            compare(*pair)
    with pytest.raises(ValueError, match="there is no file"):
        compare(good, tmp_path / "nothing.json")
    with pytest.raises(ValueError, match="growth must be 1 or above"):
        command.compare(good, bad, threshold=0.1, growth=0.5, console=console)


def test_compare_on_the_command_line(tmp_path):
    good, bad, timed = (tmp_path / f"{name}.json" for name in ("good", "bad", "timed"))
    recorded([GOOD], good)
    recorded([BAD], bad)
    BenchRecord("", {}).save(timed)

    def compare(*files):
        program = "from precondattn.command_line.cli import main; main()"
        arguments = [sys.executable, "-c", program, "compare", *map(str, files)]
        return subprocess.run(arguments, capture_output=True, text=True, check=False)

    done = compare(good, bad)
    assert done.returncode == 1, done.stderr
    assert "1 began to fail" in done.stdout
    done = compare(good, timed)
    assert done.returncode == 2
    assert "only two of the same kind can be compared" in done.stderr


def test_the_schema_contains_every_status():
    assert SCHEMA["properties"]["schema"]["const"] == record_module.SCHEMA
    assert set(STATUSES) == set(SCHEMA["$defs"]["outcome"]["properties"]["status"]["enum"])
