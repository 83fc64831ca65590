"""Every mechanism under CuPy's rules: on CuPy where there is a GPU, elsewhere on the stand-in.

The stand-in of `cupy_stand_in.py` enforces CuPy's rules. Results must equal NumPy's to 1e-12.
"""

from __future__ import annotations

import copy
import importlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import library_of
from precondattn.cache import Cache
from precondattn_conformance.inputs import numbers_in_range
from precondattn_portable.arithmetic import IN_PLACE, Arithmetic
from precondattn_portable.backend import Portable
from tests.core import cupy_stand_in

Arrays = dict[str, Any]

SIZES = {"b": 2, "t": 5, "s": 5, "h": 4, "n": 2, "u": 8, "d": 8, "e": 6, "m": 3}
CAPACITY = 7
BLOCKS = ((0, 2), (2, 3), (3, 5))
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}


class DeviceLibrary(NamedTuple):
    """An array library that keeps its arrays on a device."""

    name: str
    namespace: Any

    def on_device(self, value: Any) -> Any:
        """NumPy's arrays, moved to the device; anything else unchanged."""
        return self.namespace.asarray(value) if isinstance(value, np.ndarray) else value

    def all_on_device(self, values: Mapping[str, Any]) -> Arrays:
        return {name: self.on_device(value) for name, value in values.items()}


STAND_IN = DeviceLibrary("cupy_stand_in", cupy_stand_in.namespace)


@pytest.fixture(scope="module")
def library() -> DeviceLibrary:
    if reason_not_to_use_cupy() is not None:
        return STAND_IN
    return DeviceLibrary("cupy", importlib.import_module("array_api_compat.cupy"))


def reason_not_to_use_cupy() -> str | None:
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


def test_a_gpu_with_cupy_is_not_left_for_the_stand_in(library: DeviceLibrary) -> None:
    if Path("/dev/nvidiactl").exists() and find_spec("cupy"):
        assert library.name == "cupy", reason_not_to_use_cupy()


@contextmanager
def named(what: str) -> Iterator[None]:
    """A failure inside says in which case it was."""
    try:
        yield
    except BaseException as error:  # `pytest.raises` fails with one that is no Exception.
        error.add_note(f"in the case {what!r}")
        raise


@pytest.fixture
def stand_in() -> Any:
    return cupy_stand_in.namespace


# ---- Declared mechanisms --------------------------------------------------------------------


def declared_expressions() -> list[str]:
    """Every mechanism and piece of the library, in its variants."""
    expressions = ["lucid(laser)"]
    for name, mechanism in registry.registered().items():
        if mechanism.__module__.startswith("precondattn."):  # Not those of other tests.
            expressions += [name, *mechanism.variants]
    return sorted(set(expressions))


def those(condition: Callable[[Mechanism], bool]) -> list[str]:
    return [text for text in EXPRESSIONS if condition(pa.parse(text))]


def accepts(mechanism: Mechanism, t: int, masks: Arrays) -> bool:
    """Whether no leaf refuses calls of t queries and 5 keys with these masks."""
    try:
        for leaf in mechanism.program.leaves:
            leaf.check_call({"t": t, "s": 5}, frozenset(masks))
    except ValueError:
        return False
    return True


def accepts_fewer_queries(mechanism: Mechanism) -> bool:
    letters = "".join(pattern.letters for pattern in mechanism.inputs.values())
    return accepts(mechanism, 3, {}) and "t" in letters and "s" in letters


def broadcasts(mechanism: Mechanism) -> bool:
    return any(axis.broadcasts for pattern in mechanism.inputs.values() for axis in pattern.axes)


EXPRESSIONS = declared_expressions()
CACHED = those(lambda mechanism: mechanism.offers.causal)


def make_inputs(mechanism: Mechanism, dtype: str = "float64", **sizes: int) -> Arrays:
    rng = np.random.default_rng(0)
    sizes = SIZES | sizes
    return {
        name: numbers_in_range(rng, pattern, pattern.shape(sizes)).astype(dtype)
        for name, pattern in mechanism.inputs.items()
    }


# ---- Full calls -----------------------------------------------------------------------------

LENGTHS = np.asarray([5, 3], dtype=np.int32)
KEY_MASK = np.asarray([[True, False, True, True, True], [True, True, True, False, True]])
SEGMENT_IDS = np.asarray([[0, 0, 0, 1, 1], [3, 7, 7, 7, 7]])

MASKS: dict[str, Arrays] = {
    "no_mask": {},
    "lengths": {"lengths": LENGTHS},
    "lengths_in_a_list": {"lengths": LENGTHS.tolist()},
    "key_mask": {"key_mask": KEY_MASK},
    "segment_ids": {"segment_ids": SEGMENT_IDS},
    "all_masks": {"lengths": LENGTHS, "key_mask": KEY_MASK, "segment_ids": SEGMENT_IDS},
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_outputs_and_gradients_equal_numpys(library: DeviceLibrary, expression: str) -> None:
    """With every mask, fewer queries, inputs that broadcast, and narrower dtypes."""
    mechanism = pa.parse(expression)
    inputs, ragged = make_inputs(mechanism), {"lengths": LENGTHS}
    for masks, given in MASKS.items():
        if not accepts(mechanism, 5, given):
            continue
        with named(masks):
            check_full_calls(library, mechanism, inputs, given)
    if accepts_fewer_queries(mechanism):
        with named("fewer queries than keys"):
            check_full_calls(library, mechanism, make_inputs(mechanism, t=3), {})
    if broadcasts(mechanism):
        with named("inputs that broadcast"):
            check_full_calls(library, mechanism, narrowed(mechanism, inputs), {})
    for dtype in ("float32", "float16"):
        with named(dtype):
            check_full_calls(library, mechanism, make_inputs(mechanism, dtype), ragged)


def narrowed(mechanism: Mechanism, inputs: Arrays) -> Arrays:
    """The inputs with size 1 along every axis that broadcasts."""
    narrow = dict(inputs)
    for name, pattern in mechanism.inputs.items():
        index = tuple(slice(0, 1) if axis.broadcasts else slice(None) for axis in pattern.axes)
        narrow[name] = inputs[name][index]
    return narrow


def check_full_calls(
    library: DeviceLibrary, mechanism: Mechanism, inputs: Arrays, masks: Mapping[str, Any]
) -> None:
    before = copy.deepcopy(inputs | dict(masks))
    given, given_masks = library.all_on_device(inputs), library.all_on_device(masks)
    actual = full_calls(mechanism, given, given_masks, library.on_device)
    assert_unchanged(given | given_masks, before)
    expected = full_calls(mechanism, inputs, masks, np.asarray)
    assert_equal_numpys(library, actual, expected)


def full_calls(
    mechanism: Mechanism,
    inputs: Arrays,
    masks: Mapping[str, Any],
    on_device: Callable[[np.ndarray], Any],
) -> Arrays:
    """The output of a call, and of vjp with its gradients."""
    called = mechanism(**inputs, **masks)
    out, pullback = mechanism.vjp(**inputs, **masks)
    cotangent = np.random.default_rng(1).normal(size=out.shape).astype(out.dtype)
    gradients = pullback(on_device(cotangent))
    assert set(gradients) == set(inputs)
    return {"called": called, "out": out} | {f"d_{name}": g for name, g in gradients.items()}


# ---- Caches ---------------------------------------------------------------------------------


class Extension(NamedTuple):
    """How three blocks are appended to a cache."""

    lengths: tuple[tuple[int, int], ...] | None = None
    key_mask: np.ndarray | None = None
    donate: bool = False


RAGGED = ((2, 1), (1, 0), (2, 2))

EXTENSIONS = {
    "plainly": Extension(),
    "with_lengths": Extension(lengths=RAGGED),
    "with_key_mask": Extension(key_mask=KEY_MASK),
    "in_place": Extension(donate=True),
    "ragged_masked_and_in_place": Extension(RAGGED, KEY_MASK, donate=True),
}


@pytest.mark.parametrize("expression", CACHED)
def test_extending_in_three_blocks_equals_numpys(
    library: DeviceLibrary, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library is STAND_IN:
        write_in_place(monkeypatch)
    mechanism = pa.parse(expression)
    inputs = make_extension_inputs(mechanism)
    given = library.all_on_device(inputs)
    for how, extension in EXTENSIONS.items():
        with named(how):
            actual = dict(extend_in_blocks(mechanism, given, extension, library.on_device))
            expected = dict(extend_in_blocks(mechanism, inputs, extension, np.asarray))
            assert_equal_numpys(library, actual, expected)
    assert_unchanged(given, make_extension_inputs(mechanism))


def write_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's arrays are written in place as CuPy's are, which are known by their name."""
    for module in ("cache.updates", "execution.windows"):
        monkeypatch.setattr(f"precondattn.{module}.writes_in_place", lambda *arrays: True)


def make_extension_inputs(mechanism: Mechanism) -> Arrays:
    """Inputs of all tokens; inputs of pairs have the capacity of the cache as their key axis."""
    inputs, wide = make_inputs(mechanism), make_inputs(mechanism, s=CAPACITY)
    pairwise = {name for name, pattern in mechanism.inputs.items() if pattern.is_pairwise}
    return {name: wide[name] if name in pairwise else inputs[name] for name in inputs}


def extend_in_blocks(
    mechanism: Mechanism,
    inputs: Arrays,
    extension: Extension,
    on_device: Callable[[np.ndarray], Any],
) -> Iterator[tuple[str, Any]]:
    """The outputs and the final cache, by name."""
    keeps_mask = extension.key_mask is not None
    cache = mechanism.init_cache(**inputs, capacity=CAPACITY, key_mask=keeps_mask)
    for i, (start, stop) in enumerate(BLOCKS):
        options: Arrays = {"donate": extension.donate}
        if extension.lengths is not None:
            options["lengths"] = on_device(np.asarray(extension.lengths[i]))
        if extension.key_mask is not None:
            options["key_mask"] = on_device(extension.key_mask[:, start:stop])
        old, contents = cache, contents_of(cache)
        out, cache = mechanism.extend(cache, **tokens(mechanism, inputs, start, stop), **options)
        if extension.donate:
            assert all(cache.store[name] is buffer for name, (buffer, _) in contents.items())
            assert not old.store
        else:
            for buffer, content in contents.values():
                np.testing.assert_array_equal(on_host(buffer), content)
        yield f"out {i}", out
    yield "length", cache.length
    yield from cache.store.items()


def contents_of(cache: Cache) -> dict[str, tuple[Any, np.ndarray]]:
    """The buffers by name, and copies of them."""
    return {name: (buffer, on_host(buffer).copy()) for name, buffer in cache.store.items()}


def tokens(mechanism: Mechanism, inputs: Arrays, start: int, stop: int) -> Arrays:
    """The inputs from token `start` to token `stop`."""
    actual = {}
    for name, array in inputs.items():
        letters = mechanism.inputs[name].letters
        time = "t" if "t" in letters else "s"
        block = tuple(slice(start, stop) if letter == time else slice(None) for letter in letters)
        actual[name] = array[block]
    return actual


@pytest.mark.parametrize(
    "expression", ["lucid", "softmax[window=3]", "path", "gated_delta", "lucid(path)"]
)
def test_cache_operations_equal_numpys(library: DeviceLibrary, expression: str) -> None:
    """Tokens, a window, rows that later tokens rewrite, and states."""
    mechanism = pa.parse(expression)
    inputs = make_extension_inputs(mechanism)
    given = library.all_on_device(inputs)
    actual = dict(operations_on_a_cache(mechanism, given, library.on_device))
    expected = dict(operations_on_a_cache(mechanism, inputs, np.asarray))
    assert_equal_numpys(library, actual, expected)
    assert_unchanged(given, make_extension_inputs(mechanism))


def operations_on_a_cache(
    mechanism: Mechanism, inputs: Arrays, on_device: Callable[[np.ndarray], Any]
) -> Iterator[tuple[str, Any]]:
    """The buffers after every operation, and the output of a token after all of them."""
    empty = mechanism.init_cache(**inputs, capacity=CAPACITY)
    _, cache = mechanism.extend(empty, **tokens(mechanism, inputs, 0, 3))
    before = cache.snapshot()
    _, cache = mechanism.extend(cache, **tokens(mechanism, inputs, 3, 5))
    caches = {"restored": cache.restore(before)}
    if cache.can_crop:
        caches["cropped"] = cache.crop(on_device(np.asarray([2, 4])))
        caches["cropped to a number"] = cache.crop(4)
    else:
        with pytest.raises(ValueError, match=r"snapshot\(\)"):
            cache.crop(0)
    caches["reordered"] = cache.reorder(on_device(np.asarray([1, 0])))
    caches["selected by a mask"] = cache.select(on_device(np.asarray([False, True])))
    caches["concatenated"] = Cache.concatenate([cache.select(slice(1, None)), cache.select([0])])
    caches["read back"] = Cache.from_state_dict(cache.state_dict())
    last = caches["read back"]
    if cache.capacity is not None:
        last = caches["grown"] = last.grow(CAPACITY + 2)
    for name, each in caches.items():
        yield from ((f"{name}: {key}", array) for key, array in each.store.items())
        yield f"{name}: length", each.length
    yield "out", mechanism.extend(last, **tokens(mechanism, inputs, 4, 5))[0]


# ---- Comparing ------------------------------------------------------------------------------


def on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def assert_equal_numpys(library: DeviceLibrary, actual: Arrays, expected: Arrays) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        array = actual[name]
        assert library_of(array) == library.name, f"{name} is {type(array)}"
        assert array.dtype == wanted.dtype, name
        assert array.shape == wanted.shape, name
        assert np.isfinite(wanted).all(), f"NumPy's {name} proves nothing"
        tolerance = TOLERANCE.get(str(wanted.dtype), 0)
        largest = max(1.0, float(np.max(np.abs(wanted), initial=0)))
        np.testing.assert_allclose(
            array.get(), wanted, rtol=tolerance, atol=tolerance * largest, err_msg=name
        )


def assert_unchanged(arrays: Arrays, before: Arrays) -> None:
    for name, array in arrays.items():
        if not isinstance(array, list):
            np.testing.assert_array_equal(array.get(), before[name], err_msg=name)


# ---- CuPy's refusals: true of the stand-in, and of CuPy ---------------------------------------

HOST = np.ones((2, 3))


def test_the_library_recognises_the_arrays_by_their_namespace(library: DeviceLibrary) -> None:
    assert library_of(library.on_device(HOST)) == library.name


def test_numpy_arrays_beside_device_arrays_are_refused_by_name(library: DeviceLibrary) -> None:
    inputs = make_inputs(pa.Softmax())
    with pytest.raises(TypeError, match="one library"):
        pa.Softmax()(library.on_device(inputs["q"]), inputs["k"], inputs["v"])


def test_asarray_and_get_cross_and_copy(library: DeviceLibrary) -> None:
    host = HOST.copy()
    x = library.on_device(host)
    host[0, 0] = 5.0
    x.get()[0, 1] = 7.0
    np.testing.assert_array_equal(x.get(), HOST)


def test_numpy_does_not_convert_device_arrays(library: DeviceLibrary) -> None:
    x = library.on_device(HOST)
    for given in (x, [x, x]):
        with pytest.raises(TypeError, match="Implicit conversion"):
            np.asarray(given)


MIXTURES: dict[str, Callable[[Any, Any], Any]] = {
    "x + numpy": lambda xp, x: x + HOST,
    "numpy + x": lambda xp, x: HOST + x,
    "x == numpy": lambda xp, x: x == HOST,
    "numpy < x": lambda xp, x: operator.lt(HOST, x),
    "x @ numpy": lambda xp, x: x @ HOST.T,
    "x += numpy": lambda xp, x: x.__iadd__(HOST),
    "where": lambda xp, x: xp.where(x > 0, HOST, 0.0),
    "concat": lambda xp, x: xp.concat([x, HOST], axis=0),
    "maximum": lambda xp, x: xp.maximum(x, HOST),
    "x * list": lambda xp, x: x * [1.0, 2.0, 3.0],
}


def test_device_arrays_do_not_mix_with_numpys_or_lists(library: DeviceLibrary) -> None:
    for mixture, mix in MIXTURES.items():
        with named(mixture), pytest.raises(TypeError):
            mix(library.namespace, library.on_device(HOST))


def test_scalars_of_python_and_numpy_mix_with_device_arrays(library: DeviceLibrary) -> None:
    xp, x = library.namespace, library.on_device(HOST.astype(np.float32))
    for scalar in (2, 2.0, True, np.float32(2.0)):
        assert (x * scalar).dtype == (scalar * x).dtype == np.float32
    assert (np.float64(2.0) * x).dtype == np.float64
    assert xp.where(x > 0, x, 0.0).dtype == np.float32


def test_zero_dimensional_results_stay_on_the_device(library: DeviceLibrary) -> None:
    xp, x = library.namespace, library.on_device(HOST)
    for result in (xp.sum(x), xp.all(x > 0), xp.max(x), x[0, 0], x[0, 0] + 1, xp.exp(x[0, 0])):
        assert library_of(result) == library.name
        assert result.shape == ()


def test_explicit_conversion_of_zero_dimensional_arrays_is_allowed(library: DeviceLibrary) -> None:
    xp, x = library.namespace, library.on_device(HOST)
    assert bool(xp.all(x > 0)) is True
    assert int(xp.sum(x)) == 6
    assert float(xp.sum(x)) == 6.0
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x > 0)


def test_arrays_and_devices_are_not_hashable(library: DeviceLibrary) -> None:
    x = library.on_device(HOST)
    assert x.device == library.on_device(HOST).device
    for unhashable in (x, x.device):
        with pytest.raises(TypeError, match="unhashable"):
            hash(unhashable)


def test_arrays_are_created_on_the_device_of_another(library: DeviceLibrary) -> None:
    xp, x = library.namespace, library.on_device(HOST)
    assert xp.zeros((2,), dtype=xp.int32, device=x.device).device == x.device
    assert xp.asarray([1, 2], dtype=xp.int32, device=x.device).device == x.device


def test_solve_does_not_broadcast_the_stack(library: DeviceLibrary) -> None:
    xp = library.namespace
    matrices, right = xp.broadcast_to(xp.eye(3), (4, 3, 3)), xp.ones((1, 3, 2))
    with pytest.raises(ValueError, match="a must have"):
        xp.linalg.solve(matrices, right)
    right = xp.broadcast_to(right, (4, 3, 2))
    np.testing.assert_array_equal(xp.linalg.solve(matrices, right).get(), right.get())


def test_assignment_writes_through_to_a_view(library: DeviceLibrary) -> None:
    xp = library.namespace
    x = xp.zeros((2, 3))
    x[0][1] = 5.0
    x[xp.asarray([1, 1]), xp.asarray([0, 2])] = xp.asarray([6.0, 7.0])
    x[x == 0.0] = -1.0
    np.testing.assert_array_equal(x.get(), [[-1.0, 5.0, -1.0], [6.0, -1.0, 7.0]])


def test_in_place_operators_change_the_array_itself(library: DeviceLibrary) -> None:
    x = library.on_device(HOST)
    same = x
    x += 1.0
    assert x is same
    np.testing.assert_array_equal(same.get(), HOST + 1.0)


def test_an_overflow_does_not_warn(library: DeviceLibrary) -> None:
    xp = library.namespace
    assert float(xp.exp(xp.asarray(1e4))) == float("inf")
    assert bool(xp.isnan(xp.asarray(0.0) / 0.0))


def test_indices_broadcast_along_other_axes_as_numpys(library: DeviceLibrary) -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    index = np.asarray([[[3, 0, 0]]])
    actual = library.namespace.take_along_axis(
        library.on_device(x), library.on_device(index), axis=2
    )
    np.testing.assert_array_equal(actual.get(), np.take_along_axis(x, index, axis=2))


# ---- Where the stand-in is stricter than CuPy -------------------------------------------------

STRICTER: dict[str, Callable[[Any, Any], Any]] = {
    "NumPy's functions": lambda xp, x: np.exp(x),
    "NumPy's reductions": lambda xp, x: np.sum(x),
    "NumPy's where": lambda xp, x: np.where(HOST > 0, x, 0.0),
    "a NumPy array alone": lambda xp, x: xp.sum(HOST),
    "a NumPy array by keyword": lambda xp, x: xp.clip(x, max=HOST),
    "NumPy's indices": lambda xp, x: xp.take(x, np.asarray([0]), axis=0),
    "a NumPy array as an index": lambda xp, x: x[np.asarray([0])],
    "a list as an index": lambda xp, x: x[[0]],
    "a list as indices": lambda xp, x: xp.take(x, [0], axis=0),
    "a list as an array": lambda xp, x: xp.add(x, [1.0, 2.0, 3.0]),
    "assigning a NumPy array": lambda xp, x: x.__setitem__(0, HOST[0]),
    "a condition that is no array": lambda xp, x: xp.where(True, x, 0.0),
    "scalars alone": lambda xp, x: xp.exp(1.0),
    "an array as a count": lambda xp, x: range(xp.asarray(2)),
    "an array as a size": lambda xp, x: xp.zeros((xp.asarray(2),)),
    "an array in a shape": lambda xp, x: xp.reshape(x, (xp.asarray(3), 2)),
    "an array of repeats": lambda xp, x: xp.repeat(x, xp.asarray([1, 2]), axis=0),
    "an array as an axis": lambda xp, x: xp.sum(x, axis=xp.asarray(0)),
    "None as an operand": lambda xp, x: x == None,  # noqa: E711
}


def test_the_stand_in_refuses_mistakes_that_cupy_refuses_or_accepts(stand_in: Any) -> None:
    for mistake, make in STRICTER.items():
        with named(mistake), pytest.raises(TypeError):
            make(stand_in, stand_in.asarray(HOST))


def test_the_stand_in_refuses_to_write_an_element_twice(stand_in: Any) -> None:
    x = stand_in.zeros((3,))
    with pytest.raises(ValueError, match="twice"):
        x[stand_in.asarray([0, 0])] = stand_in.asarray([1.0, 2.0])


def test_the_stand_in_refuses_two_masks_in_an_index(stand_in: Any) -> None:
    x = stand_in.zeros((2, 2))
    mask = stand_in.asarray([True, False])
    with pytest.raises(IndexError, match="mask"):
        x[mask, mask]


def test_the_stand_in_refuses_vectors_for_a_stack_of_matrices(stand_in: Any) -> None:
    with pytest.raises(ValueError, match="a must have"):
        stand_in.linalg.solve(stand_in.ones((4, 4, 4)), stand_in.ones((4, 4)))


def test_the_stand_in_refuses_a_device_that_is_not_its_own(stand_in: Any) -> None:
    with pytest.raises(ValueError, match="device"):
        stand_in.zeros((2,), device="cpu")


def test_the_stand_in_solves_a_singular_matrix_without_an_error(stand_in: Any) -> None:
    solved = stand_in.linalg.solve(stand_in.zeros((2, 2)), stand_in.ones((2, 1)))
    assert bool(stand_in.all(stand_in.isnan(solved)))


def test_the_stand_in_has_no_names_beside_the_array_api(stand_in: Any) -> None:
    assert not hasattr(stand_in, "random")
    assert not hasattr(stand_in.asarray(HOST), "sum")


def test_the_repr_of_the_stand_in_shows_its_name_and_elements(stand_in: Any) -> None:
    assert stand_in.__name__ == "cupy_stand_in"
    assert repr(stand_in.asarray([1.0, 2.0])) == "cupy_stand_in.array([1., 2.])"


# ---- The blocked algorithms -----------------------------------------------------------------


class PortableOnStandIn(Portable):
    """The portable backend with the arithmetic that it has on CuPy, which writes in place."""

    name = "portable_on_stand_in"
    libraries = frozenset({"cupy_stand_in"})

    def arithmetic(self, like: Any) -> Arithmetic:
        return IN_PLACE


@pytest.fixture
def blocked(small_blocks: None) -> Iterator[DeviceLibrary]:
    pa.register_backend(PortableOnStandIn)
    yield STAND_IN
    pa.unregister_backend(PortableOnStandIn.name)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_blocked_outputs_and_gradients_equal_numpys(
    blocked: DeviceLibrary, expression: str
) -> None:
    mechanism = pa.parse(expression)
    inputs = make_inputs(mechanism)
    takes_all = accepts(mechanism, 5, MASKS["all_masks"])
    for masks in ("no_mask", "all_masks" if takes_all else "segment_ids"):
        given = blocked.all_on_device(inputs | MASKS[masks])
        with named(masks):
            with pa.use_backend(PortableOnStandIn.name):
                actual = full_calls(mechanism, *split(given, inputs), blocked.on_device)
            assert_unchanged(given, inputs | MASKS[masks])
            with pa.use_backend("reference"):
                expected = full_calls(mechanism, inputs, MASKS[masks], np.asarray)
            assert_equal_numpys(blocked, actual, expected)


@pytest.mark.parametrize("expression", CACHED)
def test_blocked_extensions_equal_numpys(
    blocked: DeviceLibrary, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_in_place(monkeypatch)
    mechanism = pa.parse(expression)
    inputs = make_extension_inputs(mechanism)
    given = blocked.all_on_device(inputs)
    for how in ("plainly", "ragged_masked_and_in_place"):
        with named(how):
            with pa.use_backend(PortableOnStandIn.name):
                actual = dict(
                    extend_in_blocks(mechanism, given, EXTENSIONS[how], blocked.on_device)
                )
            with pa.use_backend("reference"):
                expected = dict(extend_in_blocks(mechanism, inputs, EXTENSIONS[how], np.asarray))
            assert_equal_numpys(blocked, actual, expected)


def split(given: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
    """Arguments, split into inputs and masks."""
    masks = {name: array for name, array in given.items() if name not in inputs}
    return {name: given[name] for name in inputs}, masks
