"""What the tests share: an out-of-tree backend, and JAX in double precision."""

import sys
from pathlib import Path

import jax
import pytest

import precondattn as pa
from precondattn import discovery

STRANGER = Path(__file__).parent / "stranger"
"""A folder as pip leaves one: a module, and the metadata with its entry points."""

collect_ignore = ["stranger"]
"""Collecting it would import it, and make its mechanism known to every test."""

jax.config.update("jax_enable_x64", True)


OF_THE_ORACLE = ("identities", "peers", "recurrence_forms", "state_gradients", "mamba2")
"""In the names of files that hold the oracle to something else; conformance holds the rest to it."""


@pytest.fixture(autouse=True)
def oracle(request):
    """The reference, in tests of the mathematics."""
    if any(part in request.path.stem for part in OF_THE_ORACLE):
        with pa.use_backend("reference"):
            yield
    else:
        yield


@pytest.fixture
def afresh(monkeypatch):
    """The backends as a new process would find them; what a test registers is forgotten."""
    monkeypatch.setattr(discovery, "_registered", {})
    monkeypatch.setattr(discovery, "_broken", {})
    monkeypatch.setattr(discovery, "_discovered", None)
    monkeypatch.setattr(discovery, "_entry_points_loaded", False)


@pytest.fixture
def stranger(afresh, monkeypatch):
    """The out-of-tree backend's module, installed for one test."""
    monkeypatch.syspath_prepend(str(STRANGER))
    discovery.discover()
    module = sys.modules["stranger_backend"]
    module.calls.clear()
    return module
