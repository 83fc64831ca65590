"""A plugin of pytest that lists the options of kernels, and the first test that takes each value.

    python -m pytest -p tests.backends.triton.branches -m "not slow" tests/backends/triton

writes `branches.json`: for each kernel its constants that are no sizes, and its optional arguments,
which are "none" or "given".
"""

import inspect
import json
import os
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton has to be imported after this.

import pytest
from triton.runtime import interpreter

LIST = Path(__file__).with_name("branches.json")
SIZES = (int, float)

_test = ""
_taken = defaultdict(lambda: defaultdict(dict))
_launch = interpreter.GridExecutor.__call__


def _noted_launch(self, *args, **kwargs):
    parameters = inspect.signature(self.fn).parameters
    given = inspect.signature(self.fn).bind(
        *args, **{name: value for name, value in kwargs.items() if name in parameters}
    )
    given.apply_defaults()
    options = _taken[f"{self.fn.__module__}:{self.fn.__name__}"]
    entries = {
        f"{name}.{field}": entry
        for name, value in given.arguments.items()
        if hasattr(value, "_fields")
        for field, entry in value._asdict().items()
    }
    for name, value in (given.arguments | entries).items():
        if name in self.constexprs and not (isinstance(value, SIZES) and value is not bool(value)):
            options[name].setdefault(str(value), _test)
        elif name not in self.constexprs:
            options[name].setdefault("none" if value is None else "given", _test)
    return _launch(self, *args, **kwargs)


def pytest_configure():
    """As a plugin only: doctests import this module, too."""
    interpreter.GridExecutor.__call__ = _noted_launch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    global _test
    _test = item.nodeid.rpartition("/")[2]


def pytest_sessionfinish(session):
    listed = {
        kernel: {
            name: values
            for name, values in sorted(options.items())
            if [*values] != ["given"]  # An argument that is always given is no option.
        }
        for kernel, options in sorted(_taken.items())
        if kernel.startswith("precondattn_triton")
    }
    LIST.write_text(json.dumps(listed, indent=1) + "\n")
