"""Tests of the mathematics run on the reference, with which backends are compared."""

import pytest

import precondattn as pa


@pytest.fixture(autouse=True)
def reference():
    with pa.use_backend("reference"):
        yield
