"""Inputs of a mechanism in the arrays of a library, and one function in those of every library."""

import importlib

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import library_of
from precondattn_conformance.inputs import CallLayout, make_inputs


def inputs_of(mechanism, library="numpy", kind="random", *, requires_grad=False, seed=0, **sizes):
    """In float64, for a mechanism or an expression; `t` tokens are also `s` tokens."""
    m = pa.parse(mechanism) if isinstance(mechanism, str) else mechanism
    sizes = {"s": sizes.get("t", 7), **sizes}
    made = make_inputs(m, CallLayout("test", **sizes), kind, seed)
    if library == "torch":
        torch = pytest.importorskip("torch")
        return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}
    if library == "numpy":
        return made
    xp = pytest.importorskip("jax.numpy" if library == "jax" else library)
    return {name: xp.asarray(array) for name, array in made.items()}


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
