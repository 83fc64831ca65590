"""What a call returns may be written to: nothing that is read later shares its memory."""

import itertools
from contextlib import suppress

import numpy as np
import pytest

import precondattn as pa
from precondattn.runner import LeafRunner
from tests.core import cupy_stand_in
from tests.core.test_cupy_stand_in import CACHED, EXPRESSIONS, LENGTHS, make_inputs

SAMPLE = ("softmax", "softmax[window=3]", "lucid", "laser", "lucid(path)", "qk_norm", "linear")
STATES = ("linear", "gated_delta", "ccq(gla)", "atk(kda)")


def arrays_of(library, arrays):
    if library == "cupy_stand_in":
        return {name: cupy_stand_in.namespace.asarray(array) for name, array in arrays.items()}
    convert = {"numpy": "array", "torch": "tensor", "jax.numpy": "array"}[library]
    make = getattr(pytest.importorskip(library), convert)
    return {name: make(array) for name, array in arrays.items()}


def on_host(arrays):
    """Copies, as arrays of NumPy."""
    return {
        name: np.asarray(array.get() if hasattr(array, "get") else array).copy()
        for name, array in arrays.items()
    }


def overwrite(array):
    array[...] = np.nan


def assert_equal(found, expected):
    for name, array in on_host(found).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


# ------------------------------------------------------------------------------- pullbacks


def test_a_backend_that_writes_to_the_output_in_its_gradient_is_an_error():
    """The caller's output is another array, so that nobody would see it."""

    class WritingRunner(LeafRunner):
        def backward(self, inputs, frame, out, residuals, cotangent):
            out *= 0.5
            return super().backward(inputs, frame, out, residuals, cotangent)

    class Writes(pa.Backend):
        name = "writes"

        def prepare(self, piece, request):
            return WritingRunner(piece, piece)

    pa.register_backend(Writes())
    try:
        out, pullback = pa.Softmax().vjp(*np.ones((3, 1, 4, 2, 8)), backend="writes")
        with pytest.raises(ValueError, match="read-only"):
            pullback(out)
    finally:
        pa.unregister_backend("writes")


@pytest.mark.thorough(but=("cupy_stand_in-texts2-None", "numpy-texts0-reference"))
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("library", "texts"),
    [("numpy", EXPRESSIONS), ("torch", EXPRESSIONS), ("cupy_stand_in", SAMPLE)],
)
def test_writing_to_output_and_gradients_changes_no_later_gradient(library, texts, backend):
    for text in texts:
        mechanism = pa.parse(text)
        for masks in ({}, {"lengths": LENGTHS}):
            try:
                inputs = arrays_of(library, make_inputs(mechanism))
                out, pullback = mechanism.vjp(
                    **inputs, **arrays_of(library, masks), backend=backend
                )
            except ValueError:  # A mechanism that is defined for whole sequences only.
                assert masks
                continue
            given = on_host({"of the output": out})
            cotangent = arrays_of(library, given)["of the output"]
            gradients = pullback(cotangent)
            expected = on_host(gradients)
            overwrite(out)
            for array in gradients.values():
                # No library writes to a number, or to an array that shows one number many times.
                with suppress(TypeError, ValueError, RuntimeError):
                    overwrite(array)
            assert_equal({"of the output": cotangent}, given)
            assert_equal(pullback(cotangent), expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_writing_to_the_output_of_with_lse_changes_no_gradient(library):
    inputs = arrays_of(library, make_inputs(pa.Softmax()))
    (out, lse), pullback = pa.with_lse_vjp(pa.Softmax(), **inputs)
    cotangents = out * 1, lse * 1
    expected = on_host(pullback(*cotangents))
    overwrite(out)
    overwrite(lse)
    assert_equal(pullback(*cotangents), expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("text", STATES)
def test_writing_to_output_and_new_cache_changes_no_gradient_of_an_extension(text, library):
    mechanism = pa.parse(text)
    inputs = arrays_of(library, make_inputs(mechanism))
    _, cache = mechanism.extend(mechanism.init_cache(**inputs), **inputs)
    out, extended, pullback = mechanism.extend_vjp(cache, **inputs)
    cotangent, d_store = out * 1, {name: state * 1 for name, state in extended.store.items()}
    expected = [on_host(gradients) for gradients in pullback(cotangent, d_store)]
    overwrite(out)
    mechanism.extend(extended, **inputs, donate=True)
    for found, wanted in zip(pullback(cotangent, d_store), expected, strict=True):
        assert_equal(found, wanted)


def test_in_jax_a_donated_output_changes_no_gradient_and_a_donated_input_is_an_error():
    jax = pytest.importorskip("jax")
    q, k, v = arrays_of("jax.numpy", make_inputs(pa.Softmax())).values()
    out, pullback = pa.Softmax().vjp(q, k, v)
    cotangent = out * 1
    expected = on_host(pullback(cotangent))
    donating = jax.jit(lambda x: x - 1, donate_argnums=0)
    donating(out)
    assert_equal(pullback(cotangent), expected)
    donating(q)
    with pytest.raises((ValueError, RuntimeError), match="deleted"):
        pullback(cotangent)


@pytest.mark.parametrize("text", SAMPLE)
def test_in_pytorch_an_argument_that_is_written_to_before_the_pullback_is_an_error(text):
    mechanism = pa.parse(text)
    arrays = {**make_inputs(mechanism), "lengths": LENGTHS}
    for name in arrays:
        given = arrays_of("torch", arrays)
        out, pullback = mechanism.vjp(**given)
        given[name] += 0
        with pytest.raises(RuntimeError, match=f"{name} was written to in place"):
            pullback(out)


@pytest.mark.parametrize("text", STATES)
def test_in_pytorch_a_cache_that_is_written_to_before_the_pullback_is_an_error(text):
    mechanism = pa.parse(text)
    inputs = arrays_of("torch", make_inputs(mechanism))
    for name in mechanism.program.slots:
        _, cache = mechanism.extend(mechanism.init_cache(**inputs), **inputs)
        out, _, pullback = mechanism.extend_vjp(cache, **inputs)
        cache.store[name] += 0
        with pytest.raises(RuntimeError, match=r"the cache.s .* was written to in place"):
            pullback(out)


@pytest.mark.parametrize("text", SAMPLE)
def test_tensors_of_inference_mode_may_be_written_to_before_the_pullback(text):
    torch = pytest.importorskip("torch")
    mechanism = pa.parse(text)
    arrays = {**make_inputs(mechanism), "lengths": LENGTHS}
    _, pullback = mechanism.vjp(**arrays_of("torch", arrays))
    with torch.inference_mode():
        given = arrays_of("torch", arrays)
        out, late = mechanism.vjp(**given)
        cotangent = out * 1
        for array in (out, *given.values()):
            array.zero_()
        found = on_host(late(cotangent))
    for name, array in on_host(pullback(cotangent.clone())).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.thorough(but=("numpy", "torch"))
@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_a_cache_that_is_donated_before_the_pullback_is_an_error_where_it_is_overwritten(library):
    mechanism = pa.parse("linear")
    inputs = arrays_of(library, make_inputs(mechanism))
    cache = mechanism.init_cache(**inputs)
    out, _, pullback = mechanism.extend_vjp(cache, **inputs)
    expected = [on_host(gradients) for gradients in pullback(out)]
    mechanism.extend(cache, **inputs, donate=True)
    if library == "jax.numpy":  # It does not write in place.
        for found, wanted in zip(pullback(out), expected, strict=True):
            assert_equal(found, wanted)
    else:
        with pytest.raises(ValueError, match="linear: the old cache was donated"):
            pullback(out)


# ---------------------------------------------------------------------------------- caches


def arrays_in(cache):
    return {"length": cache.length, **cache.store}


def assert_apart(*groups):
    """No array of a group shares memory with one of another."""
    for first, second in itertools.combinations(groups, 2):
        for (name, a), (other, b) in itertools.product(first.items(), second.items()):
            assert not np.shares_memory(np.asarray(a), np.asarray(b)), (name, other)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("t", [1, 2])
def test_a_cache_that_is_not_donated_shares_no_memory_with_the_next_one(t, library):
    for text in CACHED:
        mechanism = pa.parse(text)
        if any(pattern.is_pairwise for pattern in mechanism.inputs.values()):
            continue
        inputs = arrays_of(library, make_inputs(mechanism, t=t, s=t))
        cache = mechanism.init_cache(**inputs, capacity=9)
        out, after = mechanism.extend(cache, **inputs)
        assert_apart({"out": out}, arrays_in(after), arrays_in(cache), inputs)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_cache_of_a_window_survives_the_donation_of_the_next_one(library):
    mechanism = pa.Softmax(window=3)
    inputs = arrays_of(library, make_inputs(mechanism, t=1, s=1))
    _, cache = mechanism.extend(mechanism.init_cache(**inputs, capacity=90), **inputs)
    expected = on_host({"out": mechanism.extend(cache, **inputs)[0]})
    _, after = mechanism.extend(cache, **inputs)
    for _ in range(4):  # The last of them moves the rows.
        _, after = mechanism.extend(after, **inputs, donate=True)
    assert_equal({"out": mechanism.extend(cache, **inputs)[0]}, expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("text", ["softmax", "softmax[window=9]", "ccq(gla)", "lucid(path)"])
def test_an_operation_on_a_cache_gives_one_in_memory_of_its_own(text, library):
    mechanism = pa.parse(text)
    inputs = arrays_of(library, make_inputs(mechanism))
    _, cache = mechanism.extend(mechanism.init_cache(**inputs, capacity=20), **inputs)
    snapshot = cache.snapshot()
    results = [
        cache.restore(snapshot),
        cache.to(dtype="float64"),
        cache.to(device="cpu"),
        cache.select([0, 1]),
        pa.Cache.concatenate([cache]),
        pa.Cache.from_state_dict(cache.state_dict()),
    ]
    earlier = {"length": snapshot.length, **snapshot.store}
    assert_apart(arrays_in(cache), earlier, *map(arrays_in, results))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("text", ["softmax", "softmax[window=9]"])
def test_a_cropped_cache_is_in_memory_of_its_own(text, library):
    mechanism = pa.parse(text)
    inputs = arrays_of(library, make_inputs(mechanism))
    _, cache = mechanism.extend(mechanism.init_cache(**inputs, capacity=20), **inputs)
    lengths = arrays_of(library, {"lengths": np.asarray([5, 5], dtype=np.int32)})
    assert_apart(arrays_in(cache), lengths, arrays_in(cache.crop(lengths["lengths"])))
