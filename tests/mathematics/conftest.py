"""Tests of the mathematics run on the reference, the oracle that backends are compared with."""

import pytest

import precondattn as pa


@pytest.fixture(autouse=True)
def reference():
    with pa.use_backend("reference"):
        yield
