"""The documentation: a short sidebar, pages that need no network, figures of the mechanisms."""

import re
import runpy
from pathlib import Path

import pytest

import precondattn as pa

DOCS = Path(__file__).parents[2] / "docs"
MAKER = runpy.run_path(str(DOCS / "make_pages.py"))
PAGES = sorted(page for page in (DOCS / "mechanisms").glob("*.md") if page.stem != "index")


def toctrees(page):
    """The captions and entries of the toctrees of a page."""
    for body in re.findall(
        r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    ):
        caption = re.search(r"^:caption: (.*)$", body, re.MULTILINE)
        entries = [line for line in body.splitlines() if line and not line.startswith(":")]
        yield caption and caption.group(1), entries


def test_the_sidebar_has_the_tasks_and_few_pages_at_its_first_two_levels():
    parts = dict(toctrees(DOCS / "index.md"))
    assert list(parts) == ["Use", "Train", "Check", "Extend", "Reference", "Experiments"]
    pages = [page for entries in parts.values() for page in entries]
    below = [e for page in pages for _, entries in toctrees(DOCS / f"{page}.md") for e in entries]
    assert len(pages + below) <= 45, (pages, below)


def test_scripts_and_styles_come_from_the_build():
    pytest.importorskip("sphinx-mathjax-offline", reason="the extra `docs` is not installed")
    settings = runpy.run_path(str(DOCS / "conf.py"))
    sources = [settings["mathjax_path"], *settings["html_css_files"]]
    assert not [source for source in sources if "//" in source]
    for folder in settings["html_static_path"]:
        assert (DOCS / folder).exists(), folder
    for style in (DOCS / "_static").glob("*.css"):
        assert "//" not in style.read_text(encoding="utf-8"), style


def test_the_table_of_the_ecosystem_is_up_to_date():
    maker = runpy.run_path(str(DOCS / "make_ecosystem.py"))
    assert maker["PAGE"].read_text(encoding="utf-8") == maker["text"](), (
        "run python docs/make_ecosystem.py"
    )


def test_what_is_written_from_declarations_and_records_is_up_to_date():
    for path, text in MAKER["texts"]():
        assert path.read_text(encoding="utf-8") == text, (path, "run python docs/make_pages.py")


@pytest.mark.parametrize("page", MAKER["LISTS"], ids=lambda page: page.stem)
def test_the_lists_of_mechanisms_lack_none(page):
    text = page.read_text(encoding="utf-8")
    assert not [name for name in MAKER["ours"]() if f"`{name}`" not in text]


def test_the_readme_shows_code_by_its_15th_line():
    lines = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert "```python" in lines[:15]


def test_every_diagnostic_is_shown_and_documented():
    page, api = ((DOCS / name).read_text(encoding="utf-8") for name in ("diagnostics.md", "api.md"))
    for name in pa.diagnostics.__all__:
        assert f"`{name}`" in page, name
        assert re.search(rf"autofunction:: (precondattn\.diagnostics\.)?{name}\n", api), name
    drawn = {path.name for path in (DOCS / "figures").glob("diagnostics_*.svg")}
    assert {*re.findall(r"figures/(\S+)", page)} == drawn


@pytest.mark.parametrize("name", ["tutorial", "conversion", "encoders"])
def test_pages_show_the_saved_runs(name, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(DOCS)
    each = runpy.run_path(str(DOCS / "make_trainings.py"))["TRAININGS"][name]
    assert {*each.saved()["runs"]} == {*each.mechanisms}
    assert (DOCS / each.page).read_text(encoding="utf-8") == each.text(), (
        "run python docs/make_trainings.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_mechanisms_page_begins_with_its_idea_a_figure_and_the_equation(page):
    text = page.read_text(encoding="utf-8")
    figure = text.index(":::{figure} ")
    assert text.startswith("# ")
    assert figure < text.index("$$") < text.index("\n## ")
    assert re.search(r"^:alt: \S", text, re.MULTILINE)
    drawn = re.match(r":::\{figure\} (\S+)", text[figure:]).group(1)
    assert (page.parent / drawn).is_file(), drawn


def figures(text):
    """Pairs of the file and the alternative text of each figure of a page."""
    for alternative, drawn in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text):
        yield drawn, alternative
    for drawn, options in re.findall(
        r"^(?::::|```)\{(?:figure|image)\} (\S+)\n((?:^:.*\n)*)", text, re.MULTILINE
    ):
        yield drawn, "".join(re.findall(r"^:alt: (.*)$", options, re.MULTILINE))


def test_every_figure_exists_and_has_an_alternative_text_that_says_what_it_shows():
    found = [
        (page, *each)
        for page in sorted(DOCS.rglob("*.md"))
        if "_build" not in page.parts
        for each in figures(page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 60
    short = [(page.stem, alt) for page, _, alt in found if len(alt.split()) < 9]
    assert not short
    lost = [(page.stem, drawn) for page, drawn, _ in found if not (page.parent / drawn).is_file()]
    assert not lost


def test_functions_that_the_readme_names_have_import_lines_that_run():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `(from precondattn\S* import [^`]+)`", text, re.MULTILINE)
    assert len(lines) == 6
    named = {name for line in lines for name in re.split(r", ", line.split(" import ")[1])}
    assert {"replace_attention", "context_parallel", "check", "Decoder"} <= named
    for module in ("torch", "jax", "flax.nnx", "transformers"):
        pytest.importorskip(module)
    for line in lines:
        exec(line, {})
