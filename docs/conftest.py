"""Every Python block of these pages is a test: `pytest docs`."""

from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

collect_ignore = ["conf.py"]

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE)],
    patterns=["*.md"],
    # The code there is run where the projects are installed: by `precondattn ecosystem`, and by
    # tests/core/test_docs.py.
    excludes=["_build/*", "adapters.md", "ecosystem.md"],
).pytest()
