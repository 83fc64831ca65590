"""Every Python block of these pages is a test: `pytest docs`."""

from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

collect_ignore = ["conf.py"]

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE)],
    patterns=["*.md"],
    # The code there is run by `precondattn ecosystem`, where the projects are installed.
    excludes=["_build/*", "ecosystem.md", "ecosystem/reports/*"],
).pytest()
