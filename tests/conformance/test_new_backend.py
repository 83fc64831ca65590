"""`precondattn new-backend`: the generated package conforms, and no file is overwritten."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import precondattn as pa
from precondattn.command_line.commands import app
from precondattn_conformance import plugin
from precondattn_conformance.cases import cases
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.new_backend import LIBRARIES, MECHANISMS, new_backend
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED

ROOT = Path(__file__).parents[2]
CHAPTER = ROOT / "docs" / "write_a_backend.md"


def installed(folder, name, library, mechanism="lucid_solve"):
    """Generate a new backend with the metadata that pip would install, on the path."""
    new_backend(name, library, folder, mechanism)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / "src" / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder / "src"


def run(*command, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def precondattn(*arguments, **environment):
    return run(
        "-c", "from precondattn.command_line.cli import main; main()", *arguments, **environment
    )


def replaced(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


def workflow_commands(folder):
    """The pytest commands of the workflow as lists of words."""
    workflow = (folder / ".github/workflows/conformance.yml").read_text()
    folded = re.findall(r"run: >-\n((?: {10}.*\n)+)", workflow)
    return [shlex.split(text) for text in folded]


def counts(report):
    """The numbers of compared and failed cases in a JUnit file."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    tests, failed, skipped = (int(suite.get(n)) for n in ("tests", "failures", "skipped"))
    assert suite.get("errors") == "0"
    return tests - skipped, failed


@pytest.mark.thorough
def test_a_new_backend_passes_its_own_workflow(tmp_path):
    source = installed(tmp_path, "newcomer", "numpy")
    of_everything, of_its_own = workflow_commands(tmp_path)
    assert of_everything[:4] == of_its_own[:4] == ["python", "-m", "pytest", "--pyargs"]
    done = run(*of_its_own[1:], cwd=tmp_path, PYTHONPATH=str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    compared, failed = counts(tmp_path / "report/full.xml")
    assert compared > 0
    assert failed == 0
    assert "newcomer" in (tmp_path / "report/full.html").read_text()


@pytest.fixture
def report_of(only_the_reference, monkeypatch):
    """A function that runs a mechanism's cases of smoke on the generated backend."""

    def forget():
        for module in [name for name in sys.modules if name.partition(".")[0] == "newcomer"]:
            del sys.modules[module]

    def run(source, mechanism, library="numpy", checks=()):
        monkeypatch.syspath_prepend(str(source))
        pa.register_backend(importlib.import_module("newcomer").Newcomer)
        chosen = {"only_libraries": (library,), "only_mechanisms": (mechanism,)}
        chosen_cases = cases("smoke", **chosen, only_checks=checks)
        report = Report([run_case(case, "newcomer") for case in chosen_cases])
        pa.unregister_backend("newcomer")
        forget()
        return report

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Files may change within a second.
    yield run
    forget()


@pytest.mark.thorough(but=("numpy-lucid_solve", "numpy-gated_delta", "numpy-softmax"))
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_a_new_backend_conforms_in_all_supported_cases(tmp_path, report_of, library, mechanism):
    pytest.importorskip(library)
    new_backend("newcomer", library, tmp_path, mechanism)
    checks = ("outputs", "gradients") if library == "jax" else ()
    report = report_of(tmp_path / "src", mechanism, library, checks)
    assert not [outcome.text for outcome in report.outcomes if outcome.status == FAILED]
    assert report.count(PASSED) > 5


FAULTS = (
    # The file, its text, a faulty text, and the mechanism that fails.
    ("lucid_solve.py", "phi[..., :start] @ y[:, :, :start]",
     "phi[..., :start] @ values[:, :, :start]", "lucid_solve"),
    ("lucid_solve.py", "np.exp(scale * (", "np.exp((", "lucid_solve"),
    ("lucid_solve.py", "        d_u[:, :, rows] += d_scores @ u[:, :, :stop]\n", "", "lucid_solve"),
    ("backend.py", "eps=piece.eps)", "eps=piece.eps, window=piece.window)",
     "lucid_solve[window=3]"),
    ("gated_delta.py", "d_kept = d_state - _outer(k, d_rest)", "d_kept = d_state", "gated_delta"),
    ("backend.py", "self.kernels.forward(*self.arguments(inputs), state)",
     "self.kernels.forward(*self.arguments(inputs), None)", "gated_delta"),
    ("softmax.py", "return start + k.shape[1] - q.shape[1] if causal",
     "return k.shape[1] - q.shape[1] if causal", "softmax"),
    ("softmax.py", "(d_weights - mean)", "d_weights", "softmax"),
)  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "mechanism"), FAULTS)
def test_a_fault_planted_in_a_new_backend_is_detected(
    tmp_path, report_of, file, old, new, mechanism
):
    new_backend("newcomer", "numpy", tmp_path, mechanism.partition("[")[0])
    replaced(tmp_path / "src" / "newcomer" / file, old, new)
    assert report_of(tmp_path / "src", mechanism).count(FAILED) > 0


def blocks_between(marker):
    """The text of the page's code blocks between `<!-- MARKER: begin -->` and the end marker."""
    text = CHAPTER.read_text()
    return re.findall(
        rf"<!-- {marker}: begin -->\n```\w+\n(.*?)```\n<!-- {marker}: end -->", text, re.S
    )


def plain(text):
    """Lines without alignment and without numbers, whose last digits may differ."""
    lines = (" ".join(re.sub(r"[-+\d][\d.e+-]*", "#", line).split()) for line in text.splitlines())
    return [line for line in lines if line]


@pytest.mark.thorough
def test_the_report_in_the_documentation_is_the_printed_one(tmp_path):
    """The documented diff plants the fault, and the report contains the documented lines."""
    source = installed(tmp_path, "mykernel", "torch")
    old, new = re.search(r"```diff\n-(.*)\n\+(.*)\n```", CHAPTER.read_text()).groups()
    replaced(source / "mykernel" / "lucid_solve.py", old, new)
    (shown,) = blocks_between("printed")
    command, _, expected = shown.replace("\\\n", " ").partition("\n")
    done = precondattn(*command.split()[2:], PYTHONPATH=str(source))
    assert done.returncode == 1
    printed = plain(done.stdout)
    assert [line for line in plain(expected) if line not in printed] == [], done.stdout


def test_the_package_conforms_for_another_recurrence_after_the_documented_changes(
    tmp_path, report_of, monkeypatch
):
    """The documented changes of the mechanisms page give a class whose queries share a state."""
    page = (ROOT / "docs" / "write_a_mechanism.md").read_text()
    named = {"dataclass": dataclass, "ClassVar": ClassVar, "pa": pa, "af": pa.array_functions}
    exec(re.search(r"@dataclass\(frozen=True\)\nclass LeakyDelta.*?(?=```)", page, re.S)[0], named)
    monkeypatch.setitem(sys.modules, "mypackage", ModuleType("mypackage"))
    monkeypatch.setitem(sys.modules, "mypackage.leaky_delta", SimpleNamespace(**named))
    new_backend("newcomer", "numpy", tmp_path, "gated_delta")
    source = tmp_path / "src"
    for file, diff in re.findall(r"<!-- (\w+\.py) -->\n```diff\n(.*?)```", page, re.S):
        text = (source / "newcomer" / file).read_text()
        for hunk in diff.strip().split("\n\n"):
            old, new = (
                "\n".join(line[1:] for line in hunk.splitlines() if line.startswith(sign))
                for sign in "-+"
            )
            assert old in text, old
            text = re.sub(rf"^{re.escape(old)}$", lambda _, new=new: new, text, flags=re.MULTILINE)
        (source / "newcomer" / file).write_text(text)
    try:
        assert report_of(source, "leaky_delta").count(FAILED) == 0
    finally:
        pa.unregister_mechanism("leaky_delta")


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_python_of_a_new_backend_passes_its_linters(tmp_path, library):
    for mechanism in MECHANISMS:
        new_backend("newcomer", library, tmp_path / mechanism, mechanism)
    for command in (
        ("check", "--isolated"),
        ("check", "--config", "pyproject.toml"),
        ("format", "--isolated", "--check"),
    ):
        done = run("-m", "ruff", *command, "--no-cache", tmp_path, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_functions_for_cupy_are_correct_on_numpy_arrays(tmp_path, monkeypatch, mechanism):
    module = f"of_cupy_{mechanism}"
    new_backend(module, "cupy", tmp_path, mechanism)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.setitem(sys.modules, "cupy", np)
    plain = importlib.import_module(f"{module}.{mechanism}")
    attn = pa.parse(mechanism)
    tokens = 37 if mechanism == "lucid_solve" else 5  # Several blocks.
    inputs = make_inputs(attn, CallLayout("test", t=tokens, s=tokens), "random")
    out, pullback = attn.vjp(**inputs, backend="reference")
    d_out = np.random.default_rng(0).normal(size=out.shape)
    arrays, scale = [*inputs.values()], inputs["k"].shape[-1] ** -0.5
    if mechanism == "softmax":
        found = plain.forward(*arrays, scale, True)
        gradients = plain.backward(*arrays, scale, True, d_out)
    elif mechanism == "lucid_solve":
        found = plain.forward(*arrays, scale, 1e-6)
        gradients = plain.backward(inputs["k"], out, d_out, scale, 1e-6)
    else:
        found, _ = plain.forward(*arrays, scale)
        *gradients, _ = plain.backward(*arrays, scale, None, d_out, None)
    np.testing.assert_allclose(found, out, atol=1e-12)
    for name, gradient in zip(inputs, gradients, strict=True):
        np.testing.assert_allclose(gradient, pullback(d_out)[name], atol=1e-12)


def test_a_new_backend_imports_no_framework_before_a_call(tmp_path):
    names = [f"newcomer-{mechanism.replace('_', '-')}" for mechanism in MECHANISMS]
    sources = [
        str(installed(tmp_path / name, name, "torch", mechanism))
        for name, mechanism in zip(names, MECHANISMS, strict=True)
    ]
    program = (
        "import sys, precondattn\n"
        "from precondattn.dispatch.discovery import discover\n"
        f"for name in {names}:\n"
        "    assert discover().named(name).libraries == {'torch'}, name\n"
        "assert not {'torch', 'jax', 'cupy'} & set(sys.modules)\n"
    )
    paths = [*sources, os.environ.get("PYTHONPATH", "")]
    done = run("-c", program, PYTHONPATH=os.pathsep.join(paths))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_workflow_of_a_new_backend_uses_existing_options_and_empty_lists(tmp_path, library):
    new_backend("newcomer", library, tmp_path)
    workflow = (tmp_path / ".github/workflows/conformance.yml").read_text()
    known = []
    group = SimpleNamespace(addoption=lambda flag, **options: known.append(flag))
    plugin.pytest_addoption(SimpleNamespace(getgroup=lambda *names: group))
    flags = set(re.findall(r"--precondattn-[\w-]+", workflow))
    assert len(flags) == 7
    assert flags <= set(known)
    lists = set(re.findall(r"conformance/\w+\.txt", workflow))
    assert lists
    for file in lists:
        lines = (tmp_path / file).read_text().splitlines()
        assert lines
        assert all(line.startswith("#") for line in lines)
    assert f"--precondattn-library {library}" in workflow
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    assert sum("pytest" in step.get("run", "") for step in job["steps"]) == 2


@pytest.mark.parametrize(
    ("name", "library", "mechanism", "reason"),
    [
        ("My Kernel", "torch", "softmax", "lower-case letters and digits"),
        ("../kernel", "torch", "softmax", "lower-case letters and digits"),
        ("2d", "torch", "softmax", "beginning with a letter"),
        ("lambda", "torch", "softmax", "a Python keyword"),
        ("triton", "torch", "softmax", "the backend name 'triton' is taken"),
        ("numpy", "torch", "softmax", "would hide the module 'numpy'"),
        ("array-api-compat", "torch", "softmax", "would hide the module 'array_api_compat'"),
        ("broken", "torch", "softmax", "the backend name 'broken' is taken"),
        ("newcomer", "tinygrad", "softmax", "one of torch, jax, numpy, cupy; found 'tinygrad'"),
        ("newcomer", "torch", "lucid", "one of lucid_solve, gated_delta, softmax; found 'lucid'"),
    ],
)
def test_an_invalid_choice_is_refused(request, tmp_path, name, library, mechanism, reason):
    if name == "broken":
        request.getfixturevalue("third_party")
    with pytest.raises(ValueError, match=reason):
        new_backend(name, library, tmp_path / "new", mechanism)
    assert not (tmp_path / "new").exists()


def test_without_jinja_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2, .* with its extra 'conformance'"):
        new_backend("newcomer", "torch", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command_prints_the_files_and_the_next_steps_and_overwrites_nothing(tmp_path):
    def command(*options):
        done = CliRunner().invoke(app, ["new-backend", "newcomer", *options])
        return done.exit_code, "".join(done.output.split())

    folder, mine = tmp_path / "new", tmp_path / "mine.py"
    options = ("--library", "numpy", "--mechanism", "softmax", "--directory", str(folder))
    code, printed = command(*options)
    assert code == 0, printed
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(files) == 9
    assert not [path for path in files if str(path) not in printed]
    assert f"pipinstall-e{folder}" in printed
    assert "--backendnewcomer--librarynumpy--mechanismsoftmax" in printed
    code, printed = command("--directory", str(folder))
    assert code == 2
    assert "nothingisoverwritten" in printed
    mine.write_text("mine")
    with pytest.raises(ValueError, match="exists and is no directory"):
        new_backend("newcomer", "torch", mine)
    with pytest.raises(ValueError, match="is not empty, and nothing is overwritten"):
        new_backend("newcomer", "torch", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "mine.py"}
    assert mine.read_text() == "mine"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
