"""The Python blocks of the README are tests."""

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md"],
    excludes=["*/README.md"],
).pytest()
