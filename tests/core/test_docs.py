"""The documentation: generated pages, pages that need no network, figures, docstrings."""

import inspect
import re
import runpy
from pathlib import Path

import pytest

import precondattn as pa
import precondattn.diagnostics

DOCS = Path(__file__).parents[2] / "docs"
MAKER = runpy.run_path(str(DOCS / "make_pages.py"))
PAGES = sorted(page for page in (DOCS / "mechanisms").glob("*.md") if page.stem != "index")


def test_scripts_and_styles_come_from_the_build():
    pytest.importorskip("sphinx-mathjax-offline", reason="the extra `docs` is not installed")
    settings = runpy.run_path(str(DOCS / "conf.py"))
    sources = [settings["mathjax_path"], *settings["html_css_files"]]
    assert not [source for source in sources if "//" in source]
    for folder in settings["html_static_path"]:
        assert (DOCS / folder).exists(), folder
    for style in (DOCS / "_static").glob("*.css"):
        assert "//" not in style.read_text(encoding="utf-8"), style


def test_what_is_written_from_declarations_and_records_is_up_to_date():
    for path, text in MAKER["texts"]():
        assert path.read_text(encoding="utf-8") == text, (path, "run python docs/make_pages.py")


@pytest.mark.parametrize("page", MAKER["LISTS"], ids=lambda page: page.stem)
def test_the_lists_of_mechanisms_lack_none(page):
    text = page.read_text(encoding="utf-8")
    assert not [name for name in MAKER["ours"]() if f"`{name}`" not in text]


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
    assert text.startswith("# ")
    assert text.index(":::{figure} ") < text.index("$$") < text.index("\n## ")


IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
FIGURE = re.compile(r"^(?::::|```)\{(?:figure|image)\} (\S+)\n((?:^:.*\n)*)", re.MULTILINE)


def figures(text):
    """Pairs of the file and the alternative text of each figure of a page."""
    yield from ((drawn, alternative) for alternative, drawn in IMAGE.findall(text))
    for drawn, options in FIGURE.findall(text):
        yield drawn, "".join(re.findall(r"^:alt: (.*)$", options, re.MULTILINE))


def test_every_figure_exists_and_has_an_alternative_text_that_says_what_it_shows():
    found = [
        (page, *each)
        for page in sorted(DOCS.rglob("*.md"))
        if "_build" not in page.parts
        for each in figures(page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 60
    for page, drawn, alternative in found:
        assert len(alternative.split()) > 8, (page, alternative)
        assert (page.parent / drawn).is_file(), (page, drawn)


def test_the_readme_shows_code_early_and_functions_with_import_lines_that_run():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert "```python" in text.splitlines()[:15]
    lines = re.findall(r"^\| `(from precondattn\S* import [^`]+)`", text, re.MULTILINE)
    assert len(lines) == 6
    named = {name for line in lines for name in re.split(r", ", line.split(" import ")[1])}
    assert {"replace_attention", "context_parallel", "check", "Decoder"} <= named
    for module in ("torch", "jax", "flax.nnx", "transformers"):
        pytest.importorskip(module)
    for line in lines:
        exec(line, {})


MODULES = (pa, pa.diagnostics)
CHECKED = {"PR02", "PR05", "PR07", "PR09", "PR10", "RT03", "RT05"}
"""Every parameter exists and has sentences, and so has what is returned."""
NO_METHOD = ("precondattn.shorthand", "PR02")
"""numpydoc takes the parameter `cls` for that of a class method."""


def public_callables():
    """The names of callables, with each module's name."""
    for module in MODULES:
        for name in module.__all__:
            if inspect.isroutine(getattr(module, name)) or inspect.isclass(getattr(module, name)):
                yield f"{module.__name__}.{name}"


@pytest.mark.filterwarnings("ignore:Unknown section Source:UserWarning")
def test_public_docstrings_are_those_of_numpydoc():
    validation = pytest.importorskip("numpydoc.validate")
    found = [
        (name, code, message)
        for name in public_callables()
        for code, message in validation.validate(name)["errors"]
        if code in CHECKED and (name, code) != NO_METHOD
    ]
    assert not found, "\n".join(map(str, found))


PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
SECTIONS = dict(
    re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
PACKAGES = {
    "PEFT on a decoder": ("torch", "peft"),
    "PEFT on a model of Transformers": ("transformers", "peft"),
    "torchao": ("torch", "torchao"),
    "Flax": ("flax",),
    "Qwix": ("flax", "qwix"),
}


def test_every_section_has_its_packages():
    with_code = {name for name, text in SECTIONS.items() if "```python" in text}
    assert with_code == PACKAGES.keys()


@pytest.mark.thorough
# The tools call functions that Transformers and Flax have renamed.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("section", PACKAGES)
def test_a_section_runs(section, tmp_path, monkeypatch):
    for package in PACKAGES[section]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)
    exec(compile(code, f"{PAGE.name}: {section}", "exec"), {})
