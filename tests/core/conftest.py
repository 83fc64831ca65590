"""Fixtures of the core's tests: what a test registers is forgotten after it."""

import pytest

import precondattn as pa
from precondattn.algebra import registry


@pytest.fixture
def unregistered():
    """Unregister the mechanisms that a test defines."""
    before = set(registry.registered())
    yield
    for name in set(registry.registered()) - before:
        registry.unregister(name)


@pytest.fixture
def register():
    """A function that registers a backend for one test."""
    names = []

    def registered(backend):
        pa.register_backend(backend)
        names.append(backend.name)

    yield registered
    for name in names:
        pa.unregister_backend(name)
