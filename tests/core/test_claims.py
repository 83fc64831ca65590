"""The experiments of docs/claims run at a small size, and their pages show what is saved."""

import re

import pytest

pytest.importorskip("matplotlib")

from make_claims import FRONT, NAMES, experiment, measured, page, record
from recorded import load, with_measured

SECTION = r"§\d+(\.\d+)*|Appendix [A-Z](\.\d+)?|“[^”]+”"
PLACE = (
    r"(Table|Figure|Eq\.|Algorithm|Theorem|Lemma) [\d.]+"
    r"|(Tables|Figures|Eqs\.) \d+(, \d+)* (and|to) \d+"
    r"|proof|text|list"
)
SOURCE = re.compile(rf"(?P<document>.+?) (abstract|({SECTION})(, ({PLACE}))+)")


@pytest.mark.thorough(but=("ccq_mesa",))
@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_and_is_drawn(name):
    module = experiment(name)
    results = module.run(**module.SMALL)
    assert module.rows(results).count("\n") >= 2
    assert module.draw(results).axes


@pytest.mark.parametrize("name", NAMES)
def test_its_page_shows_the_saved_results(name):
    text = page(name).read_text(encoding="utf-8")
    assert text == with_measured(page(name), measured(name, load(record(name))))


FIRST = FRONT.read_text(encoding="utf-8")
DOCUMENTS = re.findall(r"^\* \*\*(.+?)\*\*: ", FIRST, re.M)
SOURCES = dict(re.findall(r"^\| \[.*\]\((\w+)\.md\) \| (.+?) \|", FIRST, re.M))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_page_has_its_verdict(name):
    (verdict,) = re.findall(r"^\*\*Verdict: (.+?)\.\*\*", page(name).read_text("utf-8"), re.M)
    assert f"]({name}.md) | {SOURCES[name]} | **{verdict}** |" in FIRST


@pytest.mark.parametrize("name", NAMES)
def test_its_source_names_document_section_and_place(name):
    for source in SOURCES[name].split("; "):
        found = SOURCE.fullmatch(source)
        assert found, source
        assert found["document"] in DOCUMENTS
