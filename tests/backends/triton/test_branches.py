"""Each option of each kernel is taken by a test, with each of its values (`branches.py`)."""

import inspect
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime import jit

import precondattn_triton

HERE = Path(__file__).parent
PACKAGE = Path(precondattn_triton.__file__).parent
LISTED = json.loads((HERE / "branches.json").read_text(encoding="utf-8"))
ONE_VALUE = {("finish", "NORMALIZE"), ("read_past", "NORMALIZE"), ("read_cached", "TWO_PARTS")}
"""Options of which no test takes the other value."""


def function_of(kernel):
    module, name = kernel.split(":")
    return getattr(import_module(module), name).fn


@pytest.mark.parametrize("kernel", LISTED)
def test_a_test_takes_each_value_of_each_option(kernel):
    function, options = function_of(kernel), LISTED[kernel]
    parameters = inspect.signature(function).parameters
    constants = {name for name in parameters if "constexpr" in str(parameters[name].annotation)}
    assert {name.partition(".")[0] for name in options} <= parameters.keys()
    compared = re.findall(r"\b([\w.]+) is (?:not )?None", inspect.getsource(function))
    wanted = {name: {"none", "given"} for name in compared if name.partition(".")[0] in parameters}
    wanted |= {
        name: {"True", "False"}
        for name in constants & options.keys()
        if options[name].keys() <= {"True", "False"}
    }
    lacking = {
        (kernel.rpartition(":")[2], name)
        for name, values in wanted.items()
        if not values <= options.get(name, {}).keys()
    }
    assert lacking <= ONE_VALUE


def test_the_list_has_every_kernel_and_names_tests():
    launched: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        launched |= set(re.findall(r"\blaunch\(\s*(?:\w+\.)*(\w+)", path.read_text("utf-8")))
    launched -= {"kernel", "self"}  # The definition of `launch` and its documentation.
    assert launched <= {kernel.rpartition(":")[2] for kernel in LISTED}
    named = {
        test.partition("[")[0] for o in LISTED.values() for v in o.values() for test in v.values()
    }
    for test in named:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (HERE / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("kernel", LISTED)
def test_triton_can_make_the_launcher_of_a_kernel(kernel):
    """Triton's launcher has names of its own, such as `options`, that no argument may have."""
    function = function_of(kernel)
    jit.create_function_from_signature(
        inspect.signature(function), jit.JITFunction(function).params, backend=None
    )
