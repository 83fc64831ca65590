"""The experiments of docs/claims run at a small size, and their pages show what is saved."""

import re

import pytest

pytest.importorskip("matplotlib")

from claims.claim import DOCUMENTS
from make_claims import FRONT, NAMES, experiment, front, measured, page, record
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


def test_the_first_page_has_all_verdicts():
    assert FRONT.read_text(encoding="utf-8") == with_measured(FRONT, front())


@pytest.mark.parametrize("name", NAMES)
def test_its_source_names_document_section_and_place(name):
    for source in experiment(name).CLAIM.source.split("; "):
        found = SOURCE.fullmatch(source)
        assert found, source
        assert found["document"] in DOCUMENTS
