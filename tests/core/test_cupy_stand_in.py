"""Every mechanism under CuPy's rules, which `cupy_stand_in.py` enforces on NumPy's arithmetic.

The conformance suite runs on the stand-in as on any library. What the stand-in refuses is asked of
CuPy itself where there is a GPU.
"""

import importlib
import operator
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.arrays import library_of
from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.cases import makes_sense
from precondattn_conformance.checks import run
from precondattn_conformance.grid import FEWER, MASKED, PACKED, RAGGED
from precondattn_conformance.inputs import numbers_in_range
from precondattn_portable.arithmetic import IN_PLACE
from precondattn_portable.backend import Portable
from tests.core import cupy_stand_in

SIZES = {"b": 2, "t": 5, "s": 5, "h": 4, "n": 2, "u": 8, "d": 8, "e": 6, "m": 3}


def make_inputs(mechanism, dtype="float64", **sizes):
    rng = np.random.default_rng(0)
    sizes = SIZES | sizes
    return {
        name: numbers_in_range(rng, pattern, pattern.shape(sizes)).astype(dtype)
        for name, pattern in mechanism.inputs.items()
    }


def declared_expressions():
    """Every mechanism and piece of the library, in its variants."""
    found = ["lucid(laser)"]
    for name, mechanism in registry.registered().items():
        if mechanism.__module__.startswith("precondattn."):  # Not those of other tests.
            found += [name, *mechanism.variants]
    return sorted(set(found))


EXPRESSIONS = declared_expressions()
CACHED = [text for text in EXPRESSIONS if pa.parse(text).offers.causal]


class StandInLibrary(libraries.Library):
    """The stand-in as a library of the conformance suite."""

    name, module, dtypes = "cupy_stand_in", "numpy", ("float64", "float32", "float16")

    def array(self, values, dtype=None):
        return cupy_stand_in.namespace.asarray(super().array(values, dtype))

    def numpy(self, array):
        return array.get().astype(np.float64)

    def empty(self, shape, like):
        return cupy_stand_in.namespace.full(shape, np.nan, dtype=like.dtype)

    def permuted(self, array, axes):
        return cupy_stand_in.namespace.permute_dims(array, axes)


@pytest.fixture
def stand_in_library(monkeypatch):
    """The stand-in's arrays are written in place as CuPy's are, which are known by their name."""
    monkeypatch.setattr(libraries, "ALL", (*libraries.ALL, StandInLibrary))
    for module in ("cache.updates", "execution.windows"):
        monkeypatch.setattr(f"precondattn.{module}.writes_in_place", lambda *arrays: True)


def check(expression, chosen, backend=None):
    rows = [Case(c, expression, "cupy_stand_in", *of, "clustered") for c, *of in chosen]
    rows = [case for case in rows if makes_sense(case)]
    for case in rows:
        try:
            run(case, backend)
        except Exception as error:
            error.add_note(f"in the case {case.id}")
            raise
    return rows


WIDE, NARROW = "float64", "float32"
CHECKS = [
    ("gradients", WIDE, RAGGED),
    ("outputs", NARROW, PACKED),
    ("outputs", "float16", MASKED),
    ("outputs", WIDE, FEWER),
    ("caching", WIDE, RAGGED),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.usefixtures("stand_in_library")
def test_the_stand_in_conforms(expression):
    assert check(expression, CHECKS)


@pytest.mark.parametrize("expression", ["lucid", "softmax[window=3]", "path", "gated_delta"])
@pytest.mark.usefixtures("stand_in_library")
def test_operations_on_caches_conform(expression):
    """Tokens, a window, rows that later tokens rewrite, and states."""
    operations = "cache_operations", WIDE
    assert check(expression, [(*operations, RAGGED), (*operations, MASKED)])


class PortableOnStandIn(Portable):
    """The portable backend with the arithmetic that it has on CuPy, which writes in place."""

    name = "portable_on_stand_in"
    libraries = frozenset({"cupy_stand_in"})

    def arithmetic(self, library, device):
        return IN_PLACE


@pytest.fixture
def blocked(small_blocks, stand_in_library):
    pa.register_backend(PortableOnStandIn)
    yield PortableOnStandIn.name
    pa.unregister_backend(PortableOnStandIn.name)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_blocked_algorithms_conform_on_the_stand_in(blocked, expression):
    chosen = [("gradients", WIDE, PACKED), ("caching", WIDE, RAGGED)]
    assert check(expression, chosen, (blocked, "reference"))


# ---- CuPy's refusals: true of the stand-in, and of CuPy ---------------------------------------


def reason_not_to_use_cupy():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns at import where it finds no CUDA.
            cupy = importlib.import_module("cupy")
            count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"no CuPy: {error}"
    except Exception as error:  # CUDARuntimeError, from a module that may be missing.
        return f"CuPy finds no GPU: {error}"
    return None if count else "CuPy finds no GPU"


@pytest.fixture(scope="module")
def xp():
    if reason_not_to_use_cupy() is not None:
        return cupy_stand_in.namespace
    return importlib.import_module("array_api_compat.cupy")


def test_a_gpu_with_cupy_is_not_left_for_the_stand_in():
    if Path("/dev/nvidiactl").exists() and find_spec("cupy"):
        assert reason_not_to_use_cupy() is None


HOST = np.ones((2, 3))
REFUSED = {
    "np.asarray": lambda xp, x: np.asarray(x),
    "np.asarray of a list": lambda xp, x: np.asarray([x, x]),
    "x + numpy": lambda xp, x: x + HOST,
    "numpy < x": lambda xp, x: operator.lt(HOST, x),
    "x += numpy": lambda xp, x: x.__iadd__(HOST),
    "where": lambda xp, x: xp.where(x > 0, HOST, 0.0),
    "concat": lambda xp, x: xp.concat([x, HOST], axis=0),
    "x * list": lambda xp, x: x * [1.0, 2.0, 3.0],
    "hash(x)": lambda xp, x: hash(x),
    "hash(device)": lambda xp, x: hash(x.device),
    "of two libraries": lambda xp, x: pa.softmax(x[None, None], *np.ones((2, 1, 1, 2, 3))),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_device_arrays_are_not_converted_do_not_mix_and_are_not_hashable(refused, xp):
    with pytest.raises(TypeError):
        REFUSED[refused](xp, xp.asarray(HOST))


def test_arrays_cross_by_asarray_and_get_and_results_stay_on_the_device(xp):
    host = HOST.astype(np.float32)
    x = xp.asarray(host)
    host[0, 0] = x.get()[0, 1] = 5.0
    np.testing.assert_array_equal(x.get(), HOST)
    assert xp.zeros((2,), dtype=xp.int32, device=x.device).device == x.device
    for scalar in (2, 2.0, True, np.float32(2.0)):
        assert (x * scalar).dtype == (scalar * x).dtype == np.float32
    assert xp.where(x > 0, x, 0.0).dtype == np.float32
    for result in (xp.sum(x), xp.all(x > 0), xp.max(x), x[0, 0], x[0, 0] + 1, xp.exp(x[0, 0])):
        assert (library_of(result), result.shape) == (library_of(x), ())
    assert (bool(xp.all(x > 0)), int(xp.sum(x)), float(xp.sum(x))) == (True, 6, 6.0)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x > 0)
    assert float(xp.exp(xp.asarray(1e4))) == float("inf")  # Nothing warns.
    assert bool(xp.isnan(xp.asarray(0.0) / 0.0))


def test_solve_does_not_broadcast_the_stack(xp):
    matrices, right = xp.broadcast_to(xp.eye(3), (4, 3, 3)), xp.ones((1, 3, 2))
    with pytest.raises(ValueError, match="a must have"):
        xp.linalg.solve(matrices, right)
    right = xp.broadcast_to(right, (4, 3, 2))
    np.testing.assert_array_equal(xp.linalg.solve(matrices, right).get(), right.get())


def test_assignment_and_in_place_operators_write_through(xp):
    same = x = xp.zeros((2, 3))
    x[0][1] = 5.0
    x[xp.asarray([1, 1]), xp.asarray([0, 2])] = xp.asarray([6.0, 7.0])
    x[x == 0.0] = -1.0
    x += 1.0
    assert x is same
    np.testing.assert_array_equal(x.get(), [[0.0, 6.0, 0.0], [7.0, 0.0, 8.0]])


# ---- Where the stand-in is stricter than CuPy -------------------------------------------------

MASK = [True, False]
STRICTER = {
    "NumPy's functions": lambda xp, x: np.exp(x),
    "a NumPy array alone": lambda xp, x: xp.sum(HOST),
    "a NumPy array as an index": lambda xp, x: x[np.asarray([0])],
    "a list as indices": lambda xp, x: xp.take(x, [0], axis=0),
    "assigning a NumPy array": lambda xp, x: x.__setitem__(0, HOST[0]),
    "an array as a size": lambda xp, x: xp.zeros((xp.asarray(2),)),
    "an array as an axis": lambda xp, x: xp.sum(x, axis=xp.asarray(0)),
    "an element written twice": lambda xp, x: x.__setitem__((0, xp.asarray([0, 0])), 1.0),
    "two masks": lambda xp, x: x[:, :2][xp.asarray(MASK), xp.asarray(MASK)],
    "vectors for matrices": lambda xp, x: xp.linalg.solve(xp.ones((4, 4, 4)), xp.ones((4, 4))),
    "a device of another": lambda xp, x: xp.zeros((2,), device="cpu"),
}


@pytest.mark.parametrize("mistake", STRICTER)
def test_the_stand_in_refuses_mistakes_that_cupy_refuses_or_accepts(mistake):
    xp = cupy_stand_in.namespace
    with pytest.raises((TypeError, ValueError, IndexError)):
        STRICTER[mistake](xp, xp.asarray(HOST))
