"""Each adapter of a public implementation computes its mechanism, if the project is installed; what
is missing otherwise, and what installs it.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import precondattn as pa
from precondattn.command_line.commands import app
from precondattn.frame import full_frame
from precondattn_conformance import libraries
from precondattn_conformance.checks import CHECKS
from precondattn_conformance.inputs import PLAIN, make_inputs
from precondattn_conformance.peers import everyone
from precondattn_conformance.peers.arrays import equally_wide_by_default
from precondattn_conformance.peers.everyone import all_peers, peer_named
from precondattn_conformance.peers.files import (
    FOLDER,
    Checkout,
    MissingError,
    excerpt_of,
    module_of,
)
from precondattn_conformance.peers.mlstm import before_sigmoid
from precondattn_conformance.peers.project import Project

TOKENS = 64
"""A multiple of every chunk size; with landmarks, it gives segments of equal length."""
ERRORS = {"fla/mesa_cg": 0.02, "lolcats/quadratic_attention": 2e-4}
"""Error bounds of implementations that are less accurate than float32: one is an approximation, as
its adapter declares, and one has a normaliser whose terms of both signs cancel, where ours has an
error of the same size."""
FLOAT32 = 1e-5
EQUAL_HEADS = ("flashinfer/delta_rule", "keras/numpy", "x_transformers/attend_grouped")
"""Implementations that decline grouped heads, or read the key heads in another order."""
DEFECTIVE = ("memory-efficient-attention-pytorch/cosine_sim_flash_attention",)
"""Implementations that are wrong, by a defect that the ecosystem's page describes."""
INSTEAD = {"fla/comba_recurrent": "comba[erases=decayed]"}
"""The mechanism that a defective implementation computes instead of the described one."""


def backend_of(name):
    pytest.importorskip(peer_named(name).library)
    try:
        return peer_named(name).backend()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.mark.filterwarnings("ignore")  # The warnings come from the projects.
@pytest.mark.parametrize("name", all_peers())
def test_a_peer_computes_its_mechanism(name, monkeypatch):
    monkeypatch.setattr("sys.argv", sys.argv[:1])  # A project may parse pytest's arguments.
    backend, peer = backend_of(name), peer_named(name)
    (device,) = peer.devices or ("cpu",)
    if device == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip(peer.lacks_device("cpu"))
    library = libraries.named(peer.library, None if device == "cpu" else device)
    mechanism = backend.mechanism
    landmarks = getattr(mechanism, "landmarks", 1)
    tokens = TOKENS // landmarks * landmarks
    layout = PLAIN._replace(t=tokens, s=tokens, d=8, e=8)
    if name in EQUAL_HEADS:
        layout = layout._replace(n=layout.h, values_per_head=1)
    arrays = make_inputs(mechanism, layout, "random", seed=4)
    x = {each: library.array(array, "float32") for each, array in arrays.items()}
    rounded = {each: library.numpy(array) for each, array in x.items()}
    expected = pa.parse(INSTEAD.get(name, str(mechanism)))(**rounded, backend="reference")
    out = library.numpy(backend.call(mechanism, x, full_frame(tokens, tokens, x["v"]))[0])
    error = np.abs(out - expected).max() / np.abs(expected).max()
    assert (error > ERRORS.get(name, FLOAT32)) == (name in DEFECTIVE), error


def test_a_peer_has_its_name_a_mechanism_and_limits_of_checks():
    for name, peer in all_peers().items():
        assert name == peer.name
        assert set(peer.limits) <= set(CHECKS), peer.name
        assert pa.parse(peer.mechanism)


def test_an_unknown_peer_is_refused_with_its_neighbours():
    with pytest.raises(ValueError, match=r"'pytorch/none' is no peer; there are pytorch/sdpa, "):
        peer_named("pytorch/none")
    result = CliRunner().invoke(app, ["conformance", "--peer", "nobody/none"])
    assert result.exit_code != 0
    assert "pytorch/..." in result.output


def test_a_gate_comes_back_from_its_number_before_the_sigmoid_with_derivative_one():
    torch = pytest.importorskip("torch")
    g = torch.tensor([0.0, -1e-30, -1e-4, -0.47, -19.7, -1e4], requires_grad=True)
    back = torch.nn.functional.logsigmoid(before_sigmoid(g))
    torch.testing.assert_close(back, g, rtol=1e-5, atol=1e-20)
    (gradient,) = torch.autograd.grad(back.sum(), g)
    torch.testing.assert_close(gradient, torch.ones(6), rtol=1e-5, atol=0)


@pytest.mark.parametrize("e", [4, 24])
def test_widened_queries_have_the_logits_that_they_had(e):
    torch = pytest.importorskip("torch")
    q, k = torch.randn(2, 1, 3, 2, 16, dtype=torch.float64)
    wide_q, wide_k, wide_v = equally_wide_by_default(q, k, torch.randn(1, 3, 2, e))
    width = max(16, e)
    assert {x.shape[-1] for x in (wide_q, wide_k, wide_v)} == {width}
    logits, wide = ((a * b).sum(-1) for a, b in ((q, k), (wide_q, wide_k)))
    torch.testing.assert_close(wide * width**-0.5, logits * 16**-0.5)


FILE = """
import a_package_that_nobody_has

@a_package_that_nobody_has.compiled
def doubled(x: a_package_that_nobody_has.Array):
    return factor * same(x)

def same(x):
    return x

raise RuntimeError("a statement of the module")
"""


def checked_out(revision="0" * 40, repository="someone/fast"):
    url = f"https://github.com/{repository}"
    return Project("fast", "Fast", url, checkout=Checkout(repository, revision))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "ops.py").write_text(FILE)
    (tmp_path / "fast" / "right.py").write_text("loaded = []")
    return tmp_path / "fast"


def test_an_excerpt_has_definitions_without_their_imports_and_decorators(folder):
    excerpt = checked_out().excerpt("ops.py", "doubled", "same", imported={"factor": 2})
    assert excerpt.doubled(3) == 6
    assert module_of(folder / "right.py") is checked_out().imported("right.py")


def test_a_checkout_has_to_be_at_its_revision(folder):
    def git(*arguments):
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        command = ["git", "-C", folder, *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    assert checked_out(git("rev-parse", "HEAD")).folder == folder
    with pytest.raises(MissingError, match=r"its peers are for 000000000000 .*git -C .* checkout"):
        checked_out().version  # noqa: B018 - It raises the error.


PACKAGE = Project("none", "None", "", package="precondattn-none")
NUMPY = Project("numpy", "NumPy", "", package="numpy")
SLOW = checked_out(repository="someone/slow")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: PACKAGE.imported("none.py"), "precondattn-none is not installed"),
        (lambda folder: PACKAGE.version, "precondattn-none is not installed"),
        (lambda folder: NUMPY.imported("numpy/none.py"), r"there is no file .*numpy/none\.py"),
        (lambda folder: SLOW.imported("rule.py"), "no checkout of someone/slow"),
        (lambda folder: SLOW.version, "no checkout of someone/slow"),
        (lambda folder: checked_out().imported("other.py"), r"there is no file .*other\.py"),
        (
            lambda folder: checked_out().imported("ops.py"),
            r"ops\.py could not be imported: .*a_package_that_nobody_has",
        ),
        (
            lambda folder: excerpt_of(folder / "ops.py", "same", "tripled", imported={}),
            r"ops\.py defines no tripled",
        ),
    ],
)
def test_what_is_missing_is_named(folder, call, message):
    with pytest.raises(MissingError, match=message):
        call(folder)


def test_without_a_folder_of_checkouts_the_variable_and_the_repository_are_named(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(MissingError, match=f"{FOLDER} names no folder with a checkout of .*/slow"):
        SLOW.imported("rule.py")
    assert NUMPY.imported("numpy/version.py").version == np.__version__


def test_the_extra_has_every_package_of_a_peer_with_its_version():
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    listed = extras["optional-dependencies"][everyone.EXTRA]
    assert all("==" in text for text in listed)
    names = {text.partition("==")[0] for text in listed}
    frameworks = {None, "flax", "jax", "torch", "transformers"}
    assert {peer.project.package for peer in all_peers().values()} - frameworks <= names


def test_the_commands_install_packages_alone_and_make_checkouts(monkeypatch):
    found = ["torch>=2; extra == 'torch'", 'keras==3.15.1; extra == "ecosystem"', "numpy>=2"]
    monkeypatch.setattr(everyone, "requires", lambda name: found)
    first, *others = everyone.lines_to_install().splitlines()
    assert first == "pip install --no-deps keras==3.15.1"
    assert any('mamba" checkout --quiet e9594ce1c732' in line for line in others)
