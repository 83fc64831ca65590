"""One function in the arrays of every library, beside what it gives in NumPy's."""

import importlib

import numpy as np
import pytest

from precondattn.arrays import library_of

LIBRARIES = ("torch", "jax.numpy", "array_api_strict", "cupy_stand_in")


def asarray_of(library):
    """The library's `asarray`, of NumPy's arrays; a test is skipped without the library."""
    if library == "cupy_stand_in":
        return importlib.import_module("tests.core.cupy_stand_in").namespace.asarray
    return pytest.importorskip(library).asarray


def assert_same_in(library, function, *arrays, **named):
    """The result has the library's type, and NumPy's numbers to 1e-10 of the largest."""
    asarray = asarray_of(library)

    def moved(x):
        return asarray(x) if isinstance(x, np.ndarray) else x

    result = function(*map(moved, arrays), **{name: moved(x) for name, x in named.items()})
    expected = np.asarray(function(*arrays, **named))
    assert library_of(result) == library_of(asarray(np.zeros(1)))
    assert str(result.dtype).rpartition(".")[2] == str(expected.dtype)
    found = result.get() if library == "cupy_stand_in" else np.asarray(result)
    largest = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * largest)
