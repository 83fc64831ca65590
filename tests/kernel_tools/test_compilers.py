"""Compiling CUDA and Triton kernels without a GPU: reports, failures, known variants."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from precondattn_kernel_tools import cuda_compiler, nvrtc
from tests.kernel_tools.toolchain import needs_nvrtc

ROOT = Path(__file__).parents[2]
CUDA, TRITON = (f"tests.kernel_tools.{name}_examples" for name in ("cuda", "triton"))


def python(*arguments, path=ROOT, cwd=ROOT, **environment):
    """A finished process without Triton's interpreter, with a folder on its path."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = os.pathsep.join([str(path), inherited.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, *arguments], env={**inherited, "PYTHONPATH": places, **environment},
        cwd=cwd, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def report_of(tool, saved, *arguments, **options):
    """A finished process that compiled examples, and its report by name and target."""
    if tool != "cuda":
        pytest.importorskip("triton")
    compiler = ("-m", f"precondattn_kernel_tools.{tool}_compiler")
    done = python(*compiler, *arguments, f"--save={saved}", **options)
    assert saved.exists(), done.stderr
    report = json.loads(saved.read_text())
    return done, {(v["name"], v["target"]): v for v in report.pop("variants")}, report


@pytest.fixture(scope="module")
def of_cuda(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "report.json"
    targets = ("--target=sm_80", "--target=sm_90")
    done, variants, rest = report_of("cuda", path, f"{CUDA}.variants", *targets, "--jobs=1")
    assert rest.keys() == {"nvrtc", "python"}
    assert rest["nvrtc"] == nvrtc.version()
    return done, variants


def fits(done, result, shared_bytes):
    assert result["failures"] == []
    assert 0 < result["registers"] <= 255
    assert (result["spilt_bytes"], result["shared_bytes"]) == (0, shared_bytes)
    assert result["seconds"] > 0
    assert result["name"] in done.stdout


@needs_nvrtc
def test_cuda_kernels_that_compile_have_their_resources(of_cuda):
    done, variants = of_cuda
    sizes = {"__half": 2, "__nv_bfloat16": 2, "float": 4, "double": 8}
    for (dtype, size), tile, target in itertools.product(
        sizes.items(), (8, 16), ("sm_80", "sm_90")
    ):
        fits(done, variants[f"product<{dtype}, {tile}>", target], 2 * tile * tile * size)
    fits(done, variants["grid total", "sm_90"], variants["grid total", "sm_90"]["shared_bytes"])
    for name in ("may spill", "few threads", "is given it", "dynamic"):
        assert variants[name, "sm_80"]["failures"] == []
    assert variants["may spill", "sm_80"]["spilt_bytes"] > 0
    assert variants["dynamic", "sm_80"]["shared_bytes"] == 99 << 10


FAILURES = {
    "spills": "bytes (at most 0)",
    "too many registers": "registers for 1024 threads, of 65536",
    "has no such name": 'kernel.cu(2): error: identifier "INFINITY" is undefined',
    "has no such file": "absent.cu",
    "has no such kernel": "product<float, 8, 8>",
    "has no such option": "--absent",
    "static is too large": "65536 bytes of shared memory are declared, of 49152",
    "dynamic": f"needs {228 << 10} bytes of shared memory, of {227 << 10}",
}


@needs_nvrtc
def test_cuda_kernels_that_do_not_compile_or_fit_are_failures(of_cuda):
    done, variants = of_cuda
    assert done.returncode == 1
    for name, failure in FAILURES.items():
        (message,) = variants[name, "sm_90" if name == "dynamic" else "sm_80"]["failures"]
        assert failure in message
        assert failure in done.stdout


BAD = f"""
import os
from types import SimpleNamespace as Function
from precondattn_kernel_tools.triton_compiler import Variant
from {TRITON}.kernels import variants as examples

class Dies:
    @property
    def arg_names(self):
        os._exit(3)

def variants(target):
    yield Variant("lacks", Function(arg_names=["x", "y"]), {{"x": "*fp32"}}, {{}}, {{}})
    yield from examples(target)
    yield Variant("dies", Dies(), {{}}, {{}}, {{}})
    yield Variant("unknown", Function(arg_names=["x"]), {{"x": "*fp32"}}, {{"SIZE": 8}}, {{}})
"""


def test_triton_kernels_have_their_resources_or_are_failures_that_stop_no_others(tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    options = ("--target=sm_80", "--jobs=2")
    done, variants, rest = report_of("triton", tmp_path / "r.json", "bad", *options, path=tmp_path)
    assert rest.keys() == {"triton", "python"}
    for name in ("scale", "shifted", "product 32"):
        result = variants[name, "sm_80"]
        fits(done, result, result["shared_bytes"])
        assert (result["shared_bytes"] > 0) == (name == "product 32")
    assert done.returncode == 1
    for name, failure in (
        ("product 8", "CompilationError"),
        ("spills", "bytes (at most 0)"),
        ("needs too much shared memory", "bytes of shared memory, of 166912"),
        ("lacks", "neither a type nor a value is given for y"),
        ("dies", "the compiler's process died"),
        ("unknown", "the kernel has no argument SIZE"),
    ):
        (message,) = variants[name, "sm_80"]["failures"]
        assert failure in message
        assert failure in done.stdout


@pytest.mark.thorough
def test_two_targets_of_two_vendors_compile_together(tmp_path):
    targets = ("--target=sm_90", "--target=gfx942", "--match=product 32")
    done, variants, _ = report_of("triton", tmp_path / "r.json", f"{TRITON}.kernels", *targets)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [target for _, target in variants] == ["sm_90", "gfx942"]
    assert all(v["registers"] > 0 and v["shared_bytes"] > 0 for v in variants.values())


def test_triton_compiles_nothing_where_kernels_are_interpreted():
    pytest.importorskip("triton")
    command = ("-m", "precondattn_kernel_tools.triton_compiler", f"{TRITON}.kernels")
    done = python(*command, "--target=sm_80", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


TWICE = """
from precondattn_kernel_tools.cuda_compiler import Variant

def variants(target):
    return [Variant("same", "", "k")] * 2
"""


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        ("", ("--target=gfx942",), "invalid choice: 'gfx942'"),
        ("", ("--target=sm_80", "--jobs=0"), "--jobs has to be at least 1, not 0"),
        ("", (), "--target is needed"),
        ("", ("--target=sm_80", "--match=absent"), "no variant with 'absent' in its"),
        ("", ("--target=sm_80", "--known=none.json"), "there is no file none.json"),
        ("twice", ("--target=sm_80",), "twice has more than one variant of the name same"),
        ("", ("--list", "--target=sm_90", "--match=__half"), ""),
    ],
)
def test_arguments_of_the_compilers(tmp_path, monkeypatch, capsys, module, arguments, says):
    (tmp_path / "twice.py").write_text(TWICE)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = [module or f"{CUDA}.variants", *arguments]
    if says:
        with pytest.raises(SystemExit, match="2"):
            cuda_compiler.main(arguments)
        assert says in capsys.readouterr().err
    else:
        assert cuda_compiler.main(arguments) == 0
        assert capsys.readouterr().out == "product<__half, 8>\nproduct<__half, 16>\n"


# ------------------------------------------------------------------------------ known variants

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
def code_of(tmp_path, monkeypatch):
    """A function that returns the code of the kernel in a text, as a module of a new name."""
    pytest.importorskip("triton")
    from precondattn_kernel_tools import triton_code

    monkeypatch.syspath_prepend(str(tmp_path))

    def read(text):
        name = f"kernels_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return triton_code.code_of(importlib.import_module(name).kernel)

    return read


def test_comments_docstrings_names_and_the_module_do_not_change_a_kernels_code(code_of):
    changed = KERNELS
    for old, new in (
        ("Some documentation.", "Others."), ("  # A comment.", ""), ("scaled", "multiplied"),
        ("FACTOR", "TIMES"), ("at = ", "offsets = "), ("+ at", "+ offsets"),
        ("x, y, BLOCK", "a, b, WIDTH"), ("(0, BLOCK)", "(0, WIDTH)"), ("load(x +", "load(a +"),
        ("store(y +", "store(b +"), ("def multiplied(x)", "def multiplied(a)"), ("(x=", "(a="),
        ("return x *", "return a *"),
    ):  # fmt: skip
        changed = changed.replace(old, new)
    assert "x" not in re.findall(r"\b[a-z]+\b", changed.partition("variants")[0])
    assert code_of(KERNELS) == code_of(changed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * FACTOR", "return x + FACTOR"),  # A function that the kernel calls.
        ("constexpr(2.0)", "constexpr(3.0)"),  # A constant that such a function reads.
        ("y, BLOCK: tl.constexpr", "y, BLOCK: tl.constexpr = 16"),
        ("tl.store(y + at,", "tl.store(x + at,"),
    ],
)
def test_a_change_of_meaning_changes_a_kernels_code(code_of, old, new):
    assert code_of(KERNELS) != code_of(KERNELS.replace(old, new))


@pytest.mark.thorough
def test_only_variants_missing_in_the_saved_report_are_compiled(tmp_path):
    (tmp_path / "shipped.py").write_text(KERNELS)
    saved, target = tmp_path / "saved.json", ("shipped", "--target=sm_80")
    _, variants, _ = report_of("triton", saved, *target, "--match=16", path=tmp_path)
    known = variants["kernel 16", "sm_80"]
    assert len(known["key"]) == 32
    # The compiler never reports this number, so it shows whether the compiler ran.
    saved.write_text(json.dumps({"variants": [{**known, "registers": 77}]}))
    options = (f"--known={saved}", "--jobs=1")
    done, again, _ = report_of("triton", tmp_path / "r.json", *target, *options, path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"1 compiled, 1 known from {saved}" in done.stdout
    assert "kernel 32" in done.stdout
    assert "kernel 16" not in done.stdout
    assert (
        again["kernel 16", "sm_80"]["registers"] == 77 != again["kernel 32", "sm_80"]["registers"]
    )
