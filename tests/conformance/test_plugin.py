"""The pytest plugin in its own pytest run and without use; functions and backends of a module."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from precondattn_conformance.cases import case_of
from precondattn_conformance.declines import declared
from precondattn_conformance.enough import shares, too_little
from precondattn_conformance.runner import Outcome, run_case
from precondattn_conformance.session import Session
from precondattn_conformance.source import Source, source_of

BAD_BACKENDS = Path(__file__).parent / "bad_backends"
THIRD_PARTY = Path(__file__).parents[1] / "third_party"

BARE = """
import sys, _pytest.config, pytest
before = set(sys.modules)

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "precondattn_conformance":
            raise ImportError(f"the plugin imports {name}")

sys.meta_path.insert(0, Refuse())
import precondattn_conformance.plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert new <= sys.stdlib_module_names | {"precondattn_conformance"}, new
"""
INERT = """
import sys
def test_other():
    assert 'precondattn_conformance.plugin' in sys.modules
    assert not {'precondattn', 'numpy', 'torch', 'jax'} & set(sys.modules)
"""


def run(folder, *command, path=None):
    environment = {**os.environ}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pytest_run(folder, *arguments, path=None):
    return run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, path=path)


def of_numpy(mechanism, backend):
    return (
        *("--pyargs", "precondattn_conformance", "--precondattn-library=numpy"),
        *(f"--precondattn-mechanism={mechanism}", f"--precondattn-backend={backend}"),
    )


def test_the_plugin_imports_the_standard_library_only():
    done = run(None, "-c", BARE)
    assert done.returncode == 0, done.stderr


def test_without_its_flags_the_plugin_is_inert(tmp_path):
    (tmp_path / "test_other.py").write_text(INERT)
    done = pytest_run(tmp_path, "-p", "no:hypothesispytest", str(tmp_path / "test_other.py"))
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.thorough(but=("declared",))
@pytest.mark.parametrize(
    ("backend", "mechanism", "declared", "code", "says"),
    [
        ("choosy", "softmax", True, 0,
         ("outputs: 1 of 9 compared; a head of its own each, as declared (7)",)),
        ("choosy", "softmax", False, 1,
         ("choosy: 2 cases compared\noutputs: 1 of 9 compared; takes a key head",
          "too little was compared, less than half: outputs 1 of 8, ")),
        ("third_party", "laser", False, 1, ("skipped", "third_party: 0 cases compared")),
    ],
    ids=["declared", "declines", "nothing"],
)  # fmt: skip
def test_a_backend_that_declines_much_fails_unless_it_is_declared(
    tmp_path, backend, mechanism, declared, code, says
):
    options = ["--precondattn-in-process"] if backend == "choosy" else []
    if declared:
        options.append("--precondattn-declines=grouped_heads: a head of its own each")
    path = BAD_BACKENDS if backend == "choosy" else THIRD_PARTY
    done = pytest_run(tmp_path, *of_numpy(mechanism, backend), *options, path=path)
    assert done.returncode == code, done.stdout
    assert not [text for text in says if text not in done.stdout], done.stdout


MODULE = """
import numpy as np
import precondattn as pa
from precondattn_conformance import backend_from_function

def attend(q, k, v):
    s = q.shape[-1] ** -0.5 * np.einsum("bthd,bshd->bhts", q, k)
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhts,bshe->bthe", p / p.sum(-1, keepdims=True), v)

def early(q, k, v):
    return attend(q, k, v)[:, ::-1]

def first_aligned(q, k, v):
    t = q.shape[1]
    return pa.softmax(q, k[:, :t], v[:, :t], backend="reference")

promises = pa.CONVENTIONS - {"bottom_right"}
unaligned = backend_from_function(
    first_aligned, "softmax", library="numpy", gradient=False, promises=promises
)

class Own(pa.Backend):
    name, libraries = "own_of_module", frozenset({"numpy"})
    def prepare(self, piece, request):
        return "never"

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the folder from which the command is called."""
    (tmp_path / "kernels_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "kernels_of_mine", raising=False)
    return "kernels_of_mine"


AS_A_FUNCTION = (
    *("--mechanism", "softmax", "--heads", "equal", "--no-gradient"),
    *("--dtype", "float64"),
)


@pytest.mark.thorough(but=("unaligned",))
@pytest.mark.parametrize(
    ("name", "options", "code", "says"),
    [
        (
            "early",
            AS_A_FUNCTION,
            1,
            (
                "from kernels_of_mine import early",
                "register_backend(backend_from_function(early, 'softmax', heads='equal', "
                "gradient=False))",
                "wrong as declared",
            ),
        ),
        # The call that tells whether a convention is kept runs in a process, too.
        (
            "unaligned",
            (),
            0,
            (
                " passed, 0 failed",
                "has no parameter for lengths",
                "bottom_right: not promised, and not kept; head_order: kept",
            ),
        ),
    ],
    ids=["early", "unaligned"],
)
def test_a_function_or_backend_of_a_module_is_checked_in_other_processes(
    module, tmp_path, name, options, code, says
):
    done = run(
        tmp_path,
        *("-m", "precondattn", "conformance", "--import", f"{module}:{name}", *options),
        *("--check", "outputs", "--jobs", "1"),
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert not [text for text in says if text not in done.stdout], done.stdout


@pytest.mark.parametrize(
    ("text", "mechanism", "message"),
    [
        ("attend", None, "is a function: --mechanism says of what"),
        ("number", "softmax", "must be a function or a backend; found int"),
        ("nothing", "softmax", "kernels_of_mine has no 'nothing'"),
    ],
)
def test_a_function_has_a_mechanism_and_a_backend_needs_none(module, text, mechanism, message):
    source = Source(f"{module}:Own")
    assert (source.backend.name, source.mechanisms) == ("own_of_module", ())
    with pytest.raises(ValueError, match=message):
        Source(f"{module}:{text}", mechanism).backend  # noqa: B018


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peer": "fla/kda", "imported": "a:b"}, "does not go with --import a:b"),
        ({"peer": "fla/kda", "imported": None, "layout": "bhtd"}, "--layout needs --import"),
        ({"peer": None, "imported": "a.b"}, "given as module:name; found 'a.b'"),
        ({"peer": None, "imported": "a:b", "mechanisms": ("kda", "gla")}, "needs one mechanism"),
    ],
)
def test_options_that_do_not_go_together_are_named(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        source_of(**{"mechanisms": (), **given})


def outcomes(check, passed=0, unsupported=0, *, mechanism="softmax", skipped=0, **more):
    case = case_of(f"{check}-numpy-float32-plain-clustered-{mechanism}")
    counts = {"passed": passed, "unsupported": unsupported, "skipped": skipped}
    reason = "not today"
    return [Outcome(case, s, reason=reason, **more) for s, n in counts.items() for _ in range(n)]


def share(found, *texts):
    (only,) = shares(found, declared(texts))
    return only.compared, only.expected, only.total


def test_half_of_a_check_is_enough_and_less_is_not():
    """Skipped cases, and mechanisms of which nothing was compared, are not counted."""
    others = outcomes("outputs", 0, 9, mechanism="lucid")
    assert share([*outcomes("outputs", 1, 1, skipped=9), *others]) == (1, 2, 2)
    half = [*outcomes("outputs", 9), *outcomes("splits", 2, 2)]
    assert not too_little(shares(half, {}))
    said = "\n".join(too_little(shares([*half, *outcomes("splits", 0, 1)], {})))
    assert "less than half: splits 2 of 5\n" in said
    assert "not today (3)" in said


@pytest.mark.parametrize(
    ("text", "applies"),
    [
        ("states: w", True),
        ("numpy: w", True),
        ("grouped_heads: w", True),
        ("vjp: w", True),
        ("extend_vjp: w", True),
        ("kda: w", True),
        ("states float32 kda: w", True),
        ("caching: w", False),
        ("extend gdn2: w", False),
        ("states float64: w", False),
    ],
)
def test_the_words_of_a_part_all_apply_to_its_cases(text, applies):
    found = outcomes("states", 1, 3, mechanism="kda", verb="extend_vjp")
    assert share(found, text) == (1, 1 if applies else 4, 4)


def test_a_step_that_has_no_gradient_is_not_declared_by_other_verbs():
    found = outcomes("states", 1, 3, mechanism="kda", verb="extend")
    assert share(found, "extend_vjp: w", "vjp: w") == (1, 4, 4)


@pytest.mark.parametrize(
    ("texts", "error", "says"),
    [
        (("float64",), ValueError, "\"PART: WHY\" expected, .* found 'float64'"),
        (("float64: ",), ValueError, '"PART: WHY" expected'),
        ((": why",), ValueError, '"PART: WHY" expected'),
        (("gqa: why",), ValueError, "the suite has no part 'gqa'; there are outputs, "),
        (("float64 softmacks: why",), ValueError, "no part 'softmacks'"),
        ("float64: why", TypeError, r"\('float64: why',\); found one"),
    ],
)
def test_a_declaration_that_says_nothing_is_refused(texts, error, says):
    with pytest.raises(error, match=says):
        declared(texts)


def test_a_declaration_is_of_a_named_backend_and_read_before_any_case_runs():
    with pytest.raises(ValueError, match="--declines 'float64: why' needs a backend"):
        Session(declines=("float64: why",)).cases()
    with pytest.raises(ValueError, match="no part 'gqa'"):
        Session(backend=("reference",), declines=("gqa: why",)).cases()


def test_a_check_that_can_not_run_here_is_skipped_and_not_declined():
    outcome = run_case(case_of("memory-numpy-float32-long-random-softmax"), "reference")
    assert outcome.status == "skipped"
    assert outcome.reason == "reference declares no memory class"
