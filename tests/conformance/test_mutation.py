"""Mutants of a small kernel: what is changed, what a suite detects, and what is reported."""

import inspect
import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from precondattn_conformance import oracle
from precondattn_conformance.cases import case_of
from precondattn_conformance.mutation.copied import CopyPlanter
from precondattn_conformance.mutation.cuda_mutants import cuda_mutants
from precondattn_conformance.mutation.equivalents import OURS, equivalents
from precondattn_conformance.mutation.planting import Planter
from precondattn_conformance.mutation.python_mutants import python_mutants
from precondattn_conformance.mutation.target import targets
from precondattn_conformance.mutation.touched import touched
from precondattn_conformance.mutation.trial import KILLED, SURVIVED, MutationTrial

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).parent / "mutants"
MAIN = "from precondattn.command_line.cli import main; main()"
KERNEL = "blocked_kernel.blocked"
WEAK = "outputs-numpy-float64-single_token-random-softmax"
STRONG = "outputs-numpy-float64-plain-random-softmax"
LINE = "one_head: total, out, largest = 0.0, 0.0, np.full((q.shape[0], q.shape[1], 1), -np.inf)"
SURVIVORS = {
    # The first block multiplies both values by e^{-inf}.
    f"{LINE} -> {LINE.removeprefix('one_head: ').replace('0.0, 0.0', '1.0, 0.0')}",
    f"{LINE} -> {LINE.removeprefix('one_head: ').replace('0.0, 0.0', '0.0, 1.0')}",
    # Detecting it requires a number of tokens that is a multiple of four.
    "one_head: while start < k.shape[1]: -> while start <= k.shape[1]:",
}


def changes(text, kind=None):
    return {m.after for m in python_mutants(text) if kind in (None, m.kind)}


@pytest.mark.parametrize(
    ("line", "kind", "expected"),
    [
        ("x = a < b", "comparison", {"x = a <= b"}),
        ("x = a is not None", "comparison", {"x = a is None"}),
        ("x = (a) == (b)", "comparison", {"x = (a) != (b)"}),
        ("x = a and b", "condition", {"x = a or b"}),
        ("x = not a", "condition", {"x =  a"}),
        ("if f(a): b = a", "condition", {"if not (f(a)): b = a"}),
        ("x = where(a, b, c)", "condition", {"x = where(a, c, b)"}),
        ("x = a + 1", "off by one", {"x = a "}),
        ("x = a[b:c]", "off by one", {"x = a[b + 1:c]", "x = a[b:c - 1]"}),
        ("for i in range(a): pass", "off by one", {"for i in range(a - 1): pass"}),
        ("x = a + b * c", "sign", {"x = a - b * c", "x = a + b / c"}),
        ("x = -a", "sign", {"x = a"}),
        ("x = a + 0", "sign", set()),
        ("x = max(a, 0.0)", "extremum", {"x = min(a, 0.0)"}),
        ("x = max(a, 0.0)", "number", {"x = max(a, 1.0)"}),
        ("x = load(p, mask=m, other=0)", "mask", {"x = load(p, other=0)", "x = load(p, mask=m)"}),
        ("x = zeros(dtype=tl.float32)", "dtype", {"x = zeros(dtype=tl.float16)"}),
        ("x = a.to(tl.float32)", "dtype", {"x = a", "x = a.to(tl.float16)"}),
        ("f(x, stride_b, stride_h)", "stride", {"f(x, stride_h, stride_b)"}),
        ("f(i0, i1, low)", "stride", {"f(i1, i0, low)"}),
        ("x += a", "statement", {"pass"}),
        ("x[a] = b", "statement", {"pass"}),
        ("raise ValueError(f'{a < b}' + 'c')", None, set()),
        ("assert a < b", None, set()),
    ],
)
def test_one_token_of_a_line_is_changed(line, kind, expected):
    found = changes(f"def f():\n    {line}\n", kind)
    assert {" ".join(each.split()) for each in found} == {" ".join(e.split()) for e in expected}


def test_texts_annotations_defaults_and_decorators_stay():
    text = 'def f(a: "x < 1" = 2.0 + 3.0) -> "a + b":\n    """1 + 1"""\n    x: "a < b" = a\n'
    assert not changes("@g(1 < 2)\n" + text)


def test_columns_count_bytes_and_other_lines_keep_their_numbers():
    text = "def f(β):\n    δ = 'é'; x = (β <\n        δ)\n    return x\n"
    (mutant,) = python_mutants(text)
    assert mutant.applied(text) == text.replace("<", "<=")
    assert (mutant.line, mutant.lines) == (2, (2, 3))


def test_a_key_survives_changes_above_and_counts_equal_lines():
    line = "    x = x + 1\n"
    keys = [m.key for m in python_mutants("def f(x):\n" + 2 * line)]
    assert keys == ["f: x = x + 1 -> x = x", "f: x = x + 1 -> x = x #2"]
    assert keys == [m.key for m in python_mutants("import a\n\n\ndef f(x):\n" + 2 * line)]


def lines(text):
    return {(m.kind, m.before) for m in cuda_mutants(text) if m.kind in ("comparison", "sign")}


def test_cuda_is_changed_outside_of_comments_strings_and_the_preprocessor():
    text = (MUTANTS / "blocked_kernel/scale.cu").read_text()
    found = {(m.function, m.kind, m.after) for m in cuda_mutants(text)}
    body = {
        ("larger", "comparison", "return a <= b ? b : max(a, b);"),
        ("larger", "extremum", "return a < b ? b : min(a, b);"),
        ("larger", "stride", "return a < b ? b : max(b, a);"),
        ("scale", "number", "float total = 1.0f;"),
        ("scale", "comparison", "for (int i = threadIdx.x; i <= stride_h; i += 32) {"),
        ("scale", "stride", "tile[i] = x[offset(stride_h, stride_b) + i]; /* a < b */"),
        ("scale", "statement", "; /* a < b */"),
        ("scale", "statement", ";"),
        ("scale", "barrier", "void();"),
    }
    assert body <= found
    assert not any("printf" in before or "#" in before for _, before in lines(text))
    for mutant in cuda_mutants(text):
        assert mutant.applied(text).count("\n") == text.count("\n")


@pytest.fixture
def kernel(monkeypatch):
    """The package of the kernel on the path, before its backend is registered."""
    monkeypatch.syspath_prepend(str(MUTANTS))
    yield import_module(KERNEL)
    for name in [name for name in sys.modules if name.partition(".")[0] == "blocked_kernel"]:
        del sys.modules[name]


def mutant_of(after):
    return next(m for m in targets(KERNEL)[0].mutants() if m.after == after)


def test_a_planted_mutant_is_called_by_whoever_imported_the_function(kernel):
    (target,) = targets(KERNEL)
    imported, x = kernel.attention, np.ones((1, 5, 1, 2))
    with Planter(target, kernel).planted(mutant_of("return out * total")):
        assert not np.allclose(imported(x, x, x), x)
        assert "out * total" in inspect.getsource(kernel.one_head)
    np.testing.assert_allclose(imported(x, x, x), x)
    assert "out / total" in inspect.getsource(kernel.one_head)


def test_the_lines_that_a_call_executes(kernel):
    with touched({kernel.__file__}) as lines:
        kernel.one_head(*np.ones((3, 1, 2, 2)))
    text, first = inspect.getsourcelines(kernel.one_head)
    assert {number for _, number in lines} == set(range(first, first + len(text)))


def test_cuda_text_is_mutated_in_a_copy_of_its_package(kernel, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("blocked_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("XDG_CACHE_HOME", "CUPY_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # `CopyPlanter` sets them for its process.
    (target,) = targets(str(MUTANTS / "blocked_kernel/scale.cu"))
    assert target.name == "blocked_kernel/scale.cu"
    planter = CopyPlanter(target, tmp_path)
    assert Path(import_module(KERNEL).__file__).is_relative_to(tmp_path)
    mutant = target.mutants()[0]
    with planter.planted(mutant):
        assert (tmp_path / target.name).read_text() == mutant.applied(target.text)
    assert (tmp_path / target.name).read_text() == target.text


def test_a_package_stands_for_all_its_modules(kernel):
    assert [t.name for t in targets("blocked_kernel")] == ["blocked_kernel", KERNEL]


@pytest.mark.parametrize("module", ["no_such.module", "no_such.cu", "math", str(__file__)])
def test_what_is_no_module_of_a_package_is_refused(module):
    with pytest.raises(ValueError, match="expected the name of a module"):
        targets(module)


@pytest.fixture
def trial(kernel, only_the_reference, tmp_path, monkeypatch):
    """A trial of the kernel's mutants in this process."""
    monkeypatch.setattr(oracle, "keep_all", lambda: None)
    return MutationTrial(targets(KERNEL), "blocked_kernel", None, None, tmp_path)


def test_a_mutant_that_a_weak_case_leaves_is_killed_by_a_better_one(trial):
    """A case with one token has only one block."""
    weak, strong = (trial.baseline(case_of(name), 60) for name in (WEAK, STRONG))
    assert weak.status == strong.status == "passed"
    assert weak.lines <= strong.lines
    assert (KERNEL, 0) not in strong.lines
    mutant = mutant_of("return out * total")
    assert trial.verdict(mutant, [(weak.case, 60)]).status == SURVIVED
    verdict = trial.verdict(mutant, [(weak.case, 60), (strong.case, 60)])
    assert (verdict.status, verdict.case, verdict.cases) == (KILLED, STRONG, 2)
    assert "the output is off by" in verdict.reason


def mutate(*arguments):
    return subprocess.run(
        [sys.executable, "-c", MAIN, "conformance", "--backend", "blocked_kernel", *arguments],
        env={**os.environ, "PYTHONPATH": str(MUTANTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.thorough
def test_a_weak_suite_leaves_survivors_and_a_better_one_kills_them(tmp_path):
    """A case with one token has only one block, and no masked key."""
    record, listed = tmp_path / "mutants.json", tmp_path / "equivalents.toml"
    options = ("--mutate", KERNEL, "--record", str(record))
    weak = mutate(*options, "--case", WEAK)
    assert weak.returncode == 1, weak.stderr
    entries = json.loads(record.read_text())[KERNEL]["mutants"]
    status = {entry["key"]: entry["status"] for entry in entries}
    of_blocks = "one_head: scores = np.where(column <= row, scores, -np.inf) -> scores = np."
    assert status[of_blocks + "where(column < row, scores, -np.inf)"] == "killed"
    assert status[of_blocks + "where(column <= row, scores, np.inf)"] == "survived"
    assert status["one_head: return out / total -> return out * total"] == "survived"
    assert status["one_head: start += BLOCK -> pass"] == "timeout"
    assert "- return out / total" in weak.stdout

    before = record.read_text()
    again = mutate(*options, "--case", WEAK)
    assert (again.returncode, record.read_text()) == (1, before)

    strong = mutate(*options, "--case", STRONG)
    entries = json.loads(record.read_text())[KERNEL]["mutants"]
    survivors = {entry["key"]: entry for entry in entries if entry["status"] == "survived"}
    assert set(survivors) == SURVIVORS
    assert strong.returncode == 1
    assert {tuple(e["tried"]) for e in survivors.values()} == {
        tuple(f"--level smoke --backend blocked_kernel --case {case}" for case in (WEAK, STRONG))
    }
    keys = ", ".join(map(json.dumps, SURVIVORS))
    text = f'[[group]]\ntarget = "{KERNEL}"\nreason = "the same"\nmutants = [{keys}]\n'
    listed.write_text(text)
    assert mutate(*options, "--equivalent", str(listed)).returncode == 0
    listed.write_text(
        text.replace(
            "[[",
            "[[group]]\ntarget = '" + KERNEL + "'\nreason = 'x'\n"
            "mutants = ['one_head: start += BLOCK -> pass', 'gone']\n[[",
        )
    )
    wrong = mutate(*options, "--equivalent", str(listed))
    assert wrong.returncode == 1
    assert "killed by" in wrong.stdout
    assert "no such mutant: gone" in wrong.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mutate", "no_such"), "no Python module 'no_such'"),
        (("--mutate", KERNEL, "--html", "page.html"), "--html does not go with --mutate"),
        (("--mutate", KERNEL, "--declines", "vjp: no"), "--declines does not go with --mutate"),
        (("--inside", "a:b"), "--inside needs --mutate"),
        (("--mutate", KERNEL, "--case", STRONG, "--inside", "math:gone"), "context manager"),
        (("--mutate", KERNEL, "--case", STRONG.replace("softmax", "laser")), "none of 1 cases"),
    ],
)
def test_arguments_that_can_not_be_meant_are_refused(arguments, says):
    done = mutate(*arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_our_list_of_equivalents_names_mutants_that_exist():
    names = {group["target"] for group in tomllib.loads(OURS.read_text()).get("group", [])}
    for name in names:
        module = str(ROOT / "backends" / name) if name.endswith((".cu", ".cuh")) else name
        (target,) = targets(module)
        keys = {mutant.key for mutant in target.mutants()}
        assert {key for _, key in equivalents([name], None)} <= keys
