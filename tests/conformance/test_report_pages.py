"""The printed matrix of a conformance run, and its page."""

import math
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from precondattn_conformance.report.failures import IN_FULL
from precondattn_conformance.report.junit import write_junit
from precondattn_conformance.report.matrix import matrix
from precondattn_conformance.report.page import page, write_page
from precondattn_conformance.report.printable import printable
from precondattn_conformance.report.record import load
from precondattn_conformance.report.result import Result, share_text
from tests.conformance.outcomes import (
    HOSTILE,
    a_failure,
    an_outcome,
    of_every_status,
    printed_by,
    recorded,
    replace_texts,
)

MECHANISMS = [f"{outer}(base{i})" for outer in ("lucid", "laser", "ccq") for i in range(24)]
CHECKS = ["outputs", "gradients", "caching", "splits", *(f"check_{i:02}" for i in range(14))]


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
    outcomes = [an_outcome(check=check) for check in CHECKS]
    outcomes += [an_outcome("unsupported", None, check="refusals_of_all", reason="no")]
    printed = printed_by(lambda console: matrix(outcomes, console))
    assert {*printed.split()} >= {*CHECKS}
    assert "refusals_of_all" not in printed


def test_shares_are_short():
    shares = (0.0, 1e-9, 0.124, 1.0, 1.04, 41.4, 999, 1234, 3e12, math.inf, math.nan)
    texts = ["0", "<1%", "12%", "100%", "1.04x", "41x", "999x", "1e3x", "3e12x", "inf", "NaN"]
    assert [share_text(share) for share in shares] == texts


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
    write_page(recorded(outcomes), path)
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
    assert not read.values("src")
    assert not {"link", "img", "iframe", "object", "base"} & set(read.tags)
    local = read.values("href")
    assert all(link.startswith("#") for link in local)
    ids = read.values("id")
    assert {link[1:] for link in local} <= set(ids)
    assert len(ids) == len(set(ids))
    style = path.read_text(encoding="utf-8").partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "://" not in page(recorded(outcomes))


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
        a_failure(mechanism=m, check=check, layout=f"bad{i}", details="x" * 1500)
        for m in MECHANISMS
        for check in CHECKS[:2]
        for i in range(14)
    ]
    text = page(recorded(outcomes))
    read = Reader(text)
    assert len(text.encode()) < 1_000_000
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


def test_a_page_without_jinja_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match="its extra 'conformance'"):
        page(recorded([]))
