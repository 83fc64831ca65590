"""Docstrings of public callables have the form of numpydoc, which `help()` and editors show."""

import inspect

import pytest

import precondattn as pa
import precondattn.diagnostics

validation = pytest.importorskip("numpydoc.validate")

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
    found = [
        (name, code, message)
        for name in public_callables()
        for code, message in validation.validate(name)["errors"]
        if code in CHECKED and (name, code) != NO_METHOD
    ]
    assert not found, "\n".join(map(str, found))
