"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`."""

import importlib.util
import re
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import precondattn

project = "precondattn"
author = "The precondattn authors"
copyright = author
version = release = precondattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"precondattn {version}"

# One file from the package, which has its glyphs, so that formulas need no network.
_mathjax = importlib.util.find_spec("sphinx-mathjax-offline")
assert _mathjax is not None, "needs the extra: pip install '.[docs]'"
assert _mathjax.origin is not None
html_static_path = [
    "_static",
    str(Path(_mathjax.origin).parent / "static" / "mathjax" / "tex-svg.js"),
]
mathjax_path = "tex-svg.js"
html_css_files = ["page.css"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_type_aliases = {"Array": "Array", "BackendNames": "BackendNames"}
napoleon_google_docstring = False
napoleon_custom_sections = ["Source"]


def _as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings contain `code` and |x|, which have another meaning in reStructuredText."""
    if what in ("attribute", "property") and lines:
        # Otherwise napoleon reads the text before the colon as a type.
        lines[0] = lines[0].replace(": ", " – ")
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            code = re.sub(r"(?<![`:\w])`([^`]+)`(?!`)", r"``\1``", line)
            spans = code.split("``")  # Text and code alternate.
            spans[::2] = [text.replace("|", r"\|") for text in spans[::2]]
            lines[i] = "``".join(spans)


def _without_forward_references(app, what, name, obj, options, signature, annotation):
    def plain(text):
        return text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)

    return plain(signature), plain(annotation)


class Mechanisms(SphinxDirective):
    """`.. mechanisms::` documents every base and preconditioner, or their shorthands."""

    option_spec: ClassVar = {"shorthands": directives.flag}

    def run(self):
        classes = sorted(precondattn.mechanisms().items(), key=lambda item: item[1].role)
        ours = {n: c for n, c in classes if c.__module__.startswith("precondattn.")}
        if "shorthands" in self.options:
            lines = [f".. autofunction:: precondattn.{name}" for name in ours]
        else:
            lines = [f".. autoclass:: precondattn.{cls.__name__}" for cls in ours.values()]
        return self.parse_text_to_nodes("\n".join(lines))


class Captions(SphinxTransform):
    """A figure without a caption shows its alternative text."""

    default_priority = 200  # Before figures get their ids.

    def apply(self):
        for figure in self.document.findall(nodes.figure):
            if not any(isinstance(child, nodes.caption) for child in figure):
                figure += nodes.caption("", figure.next_node(nodes.image)["alt"])


def setup(app):
    app.add_transform(Captions)
    app.add_directive("mechanisms", Mechanisms)
    app.connect("autodoc-process-signature", _without_forward_references)
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)
