"""The experiments of docs/claims run at a small size, and their pages show what is saved."""

import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("myst_parser")

from make_claims import NAMES, SECTIONS, experiment, page
from myst_parser.slugs import github_slugify
from recorded import DOCS

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


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: path.stem)
def test_a_page_shows_the_saved_results(path):
    assert path.read_text(encoding="utf-8") == page(path)


FIRST = (DOCS / "claims" / "index.md").read_text(encoding="utf-8")
DOCUMENTS = re.findall(r"^\* \*\*(.+?)\*\*: ", FIRST, re.M)
ROWS = re.findall(r"^\| \[.*\]\((\w+\.md)#(.+)\) \| (.+?) \| \*\*(.+?)\*\* \|$", FIRST, re.M)


def test_the_first_page_has_every_verdict():
    verdicts = {}
    for path in SECTIONS:
        for section in path.read_text("utf-8").split("\n## ")[1:]:
            anchor = github_slugify(section.partition("\n")[0])
            for verdict in re.findall(r"^\*\*Verdict: (.+?)\.\*\*", section, re.M):
                verdicts[path.name, anchor] = verdict
    assert verdicts == {(name, anchor): verdict for name, anchor, _, verdict in ROWS}
    assert len(ROWS) == len(NAMES)


@pytest.mark.parametrize(("anchor", "sources"), [(row[1], row[2]) for row in ROWS])
def test_its_source_names_document_section_and_place(anchor, sources):
    for source in sources.split("; "):
        found = SOURCE.fullmatch(source)
        assert found, source
        assert found["document"] in DOCUMENTS
