"""Each adapter of a public implementation computes its mechanism, if the project is installed."""

import sys

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_conformance import libraries
from precondattn_conformance.checks import CHECKS
from precondattn_conformance.grid import PLAIN
from precondattn_conformance.inputs import make_inputs
from precondattn_conformance.peers.checkout import FOLDER
from precondattn_conformance.peers.everyone import all_peers, peer_named
from precondattn_conformance.peers.files import MissingError
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


def test_a_project_that_is_not_there_says_so(monkeypatch):
    package = Project("none", "None", "", package="precondattn-none")
    with pytest.raises(MissingError, match="precondattn-none is not installed"):
        package.imported("none.py")
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(MissingError, match="no folder with a checkout of someone/none"):
        Project("none", "None", "", repository="someone/none", revision="0").imported("none.py")


def test_a_file_that_a_package_has_not_says_so():
    numpy = Project("numpy", "NumPy", "", package="numpy")
    assert numpy.imported("numpy/version.py").version == np.__version__
    with pytest.raises(MissingError, match=r"there is no file .*numpy/none\.py"):
        numpy.imported("numpy/none.py")


def test_an_unknown_peer_is_refused_with_its_neighbours():
    with pytest.raises(ValueError, match=r"'pytorch/none' is no peer; there are pytorch/sdpa, "):
        peer_named("pytorch/none")


def test_a_limit_names_a_check():
    for peer in all_peers().values():
        assert set(peer.limits) <= set(CHECKS), peer.name
        assert pa.parse(peer.mechanism)
