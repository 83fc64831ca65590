"""A variant in a saved report is not compiled again unless its code may have changed."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

from precondattn_kernel_tools.ahead_of_time import CompileTask, compiled_in_processes
from precondattn_kernel_tools.cuda_compiler import without_comments
from precondattn_kernel_tools.resources import Resources
from precondattn_kernel_tools.triton_code import code_of

KERNELS = '''
import triton
import triton.language as tl

from precondattn_kernel_tools.triton_compiler import Variant

FACTOR = tl.constexpr(2.0)


@triton.jit
def scaled(x):
    """Some documentation."""
    return x * FACTOR


@triton.jit
def kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, scaled(x=tl.load(x + at)))  # A comment.


def variants(target):
    for block in (16, 32):
        signature = {"x": "*fp32", "y": "*fp32"}
        yield Variant(f"kernel {block}", kernel, signature, {"BLOCK": block}, {"num_warps": 1})
'''

NUMBERS = itertools.count()
"""Numbers that give every module a new name."""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that makes a module from a text, under a new name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        name = f"kernels_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return write


def test_comments_docstrings_names_and_the_module_do_not_change_a_kernels_code(module):
    changed = KERNELS.replace("Some documentation.", "Others.").replace("  # A comment.", "")
    changed = changed.replace("scaled", "multiplied").replace("FACTOR", "TIMES")
    changed = changed.replace("at = ", "offsets = ").replace("+ at", "+ offsets")
    changed = changed.replace("x, y, BLOCK", "a, b, WIDTH").replace("(0, BLOCK)", "(0, WIDTH)")
    changed = changed.replace("load(x +", "load(a +").replace("store(y +", "store(b +")
    changed = changed.replace("def multiplied(x)", "def multiplied(a)").replace("(x=", "(a=")
    changed = changed.replace("return x *", "return a *")
    assert "x" not in re.findall(r"\b[a-z]+\b", changed.partition("variants")[0])
    assert code_of(module(KERNELS).kernel) == code_of(module(changed).kernel)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * FACTOR", "return x + FACTOR"),  # A function that the kernel calls.
        ("constexpr(2.0)", "constexpr(3.0)"),  # A constant that such a function reads.
        ("scaled(x=tl.load(x + at))", "tl.load(x + at)"),
        ("y, BLOCK: tl.constexpr", "y, BLOCK: tl.constexpr = 16"),
        ("tl.store(y + at,", "tl.store(x + at,"),
    ],
)
def test_a_change_of_meaning_changes_a_kernels_code(module, old, new):
    assert code_of(module(KERNELS).kernel) != code_of(module(KERNELS.replace(old, new)).kernel)


def test_a_global_that_is_not_a_constant_is_an_error(module):
    text = KERNELS.replace("tl.constexpr(2.0)", "[2.0]")
    with pytest.raises(ValueError, match="FACTOR is a list, and no constant of a kernel"):
        code_of(module(text).kernel)


def compiler(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "precondattn_kernel_tools.triton_compiler", *arguments],
        env={**environment, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.thorough
def test_only_variants_missing_in_the_saved_report_are_compiled(tmp_path):
    (tmp_path / "shipped.py").write_text(KERNELS)
    saved, again = tmp_path / "saved.json", tmp_path / "again.json"
    first = compiler(tmp_path, "shipped", "--target=sm_80", "--match=16", f"--save={saved}")
    assert first.returncode == 0, first.stdout + first.stderr
    (known,) = json.loads(saved.read_text())["variants"]
    assert len(known["key"]) == 32

    known["registers"] = (
        77  # The compiler never reports this number, so it shows whether the compiler ran.
    )
    saved.write_text(json.dumps({"variants": [known]}))
    second = compiler(
        tmp_path, "shipped", "--target=sm_80", f"--known={saved}", f"--save={again}", "--jobs=1"
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"1 compiled, 1 known from {saved}" in second.stdout
    assert "kernel 32" in second.stdout
    assert "kernel 16" not in second.stdout
    registers = {v["name"]: v["registers"] for v in json.loads(again.read_text())["variants"]}
    assert registers["kernel 16"] == 77
    assert registers["kernel 32"] != 77


def test_a_missing_report_is_an_error(tmp_path):
    done = compiler(tmp_path, "shipped", "--target=sm_80", "--known=absent.json")
    assert done.returncode == 2
    assert "--known: there is no file absent.json" in done.stderr


def failing(name, target):
    return Resources(name, target, failures=["does not compile"])


def test_a_variant_without_a_key_is_always_compiled():
    tasks = [CompileTask("first", "sm_80", "", ("first", "sm_80"))]
    (compiled,) = compiled_in_processes(failing, tasks, 1, {"other": Resources("other", "sm_80")})
    assert compiled.failures == ["does not compile"]


def test_variants_of_one_key_keep_their_names():
    known = {"same": Resources("saved", "sm_80", registers=7, key="same")}
    tasks = [CompileTask(name, "sm_80", "same", (name, "sm_80")) for name in ("first", "second")]
    reported = list(compiled_in_processes(failing, tasks, 1, known))
    assert [(r.name, r.registers, r.failures) for r in reported] == [
        ("first", 7, []),
        ("second", 7, []),
    ]
    assert known["same"].name == "saved"


def test_comments_of_cuda_do_not_change_its_text():
    code = "int a; // one\n\n/* two\nlines */ const char *b = \"// kept\"; char c = '/';  \n"
    assert without_comments(code) == "int a;\nconst char *b = \"// kept\"; char c = '/';"
