"""Backends that are not installed: from a module, or public implementations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import precondattn as pa
from precondattn.command_line.commands import app
from precondattn_conformance.peers.everyone import all_peers, peer_named
from precondattn_conformance.peers.files import MissingError
from precondattn_conformance.peers.project import Project
from precondattn_conformance.source import Source, source_of

MODULE = """
import numpy as np
import precondattn as pa

def attend(q, k, v, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * np.einsum("bthd,bshd->bhts", q, k)
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhts,bshe->bthe", p / p.sum(-1, keepdims=True), v)

def early(q, k, v):
    return attend(q, k, v)[:, ::-1]

class Own(pa.Backend):
    name, libraries = "own_of_module", frozenset({"numpy"})
    def prepare(self, piece, request):
        return "never"

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the folder from which the command is called."""
    (tmp_path / "kernels_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "kernels_of_mine", raising=False)
    return "kernels_of_mine"


def test_a_function_of_a_module_is_checked_in_other_processes(module: str, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "precondattn", "conformance", "--import", f"{module}:attend"),
        *("--mechanism", "softmax", "--heads", "equal", "--no-gradient", "--check", "outputs"),
        *("--dtype", "float64", "--jobs", "1"),
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert " passed, 0 failed" in run.stdout, run.stdout + run.stderr
    assert "has no parameter for lengths" in run.stdout
    command[5] = f"{module}:early"
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stdout
    assert f"from {module} import early" in run.stdout
    assert (
        "register_backend(backend_from_function(early, 'softmax', heads='equal', gradient=False))"
        in run.stdout
    )
    assert "wrong as declared" in run.stdout


def test_a_backend_of_a_module_needs_no_mechanism(module: str) -> None:
    source = Source(f"{module}:Own")
    assert source.backend.name == "own_of_module"
    assert source.mechanisms == ()


@pytest.mark.parametrize(
    ("text", "mechanism", "message"),
    [
        ("attend", None, "is a function: --mechanism says of what"),
        ("number", "softmax", "must be a function or a backend; found int"),
        ("nothing", "softmax", "kernels_of_mine has no 'nothing'"),
    ],
)
def test_what_is_no_function_or_backend_is_named(
    module: str, text: str, mechanism: str | None, message: str
) -> None:
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
def test_options_that_do_not_go_together_are_named(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source_of(**{"mechanisms": (), **given})


def test_an_unknown_peer_is_answered_with_those_of_its_project() -> None:
    with pytest.raises(ValueError, match="'pytorch/none' is no peer; there are pytorch/sdpa"):
        peer_named("pytorch/none")
    result = CliRunner().invoke(app, ["conformance", "--peer", "nobody/none"])
    assert result.exit_code != 0
    assert "pytorch/..." in result.output


def test_a_missing_project_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Project("absent", "Absent", "https://example.org", package="no-such-package-1")
    with pytest.raises(MissingError, match="no-such-package-1 is not installed"):
        absent.version  # noqa: B018
    checkout = Project("c", "C", "https://example.org", repository="owner/thing", revision="ab")
    monkeypatch.delenv("PRECONDATTN_CHECKOUTS", raising=False)
    with pytest.raises(MissingError, match="PRECONDATTN_CHECKOUTS names no folder"):
        checkout.version  # noqa: B018
    monkeypatch.setenv("PRECONDATTN_CHECKOUTS", str(tmp_path))
    with pytest.raises(MissingError, match="no checkout of owner/thing in"):
        checkout.imported("rule.py")
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "rule.py").write_text("import no_such_module_1\n")
    with pytest.raises(MissingError, match=r"rule.py could not be imported: .*no_such_module_1"):
        checkout.imported("rule.py")


def test_every_peer_names_a_mechanism_and_its_parameters() -> None:
    for name, peer in all_peers().items():
        assert name == peer.name
        assert pa.parse(peer.mechanism)
