"""What a call returns may be written to: nothing that is read later shares its memory."""

import itertools
from contextlib import suppress

import numpy as np
import pytest

import precondattn as pa
from precondattn.runner import LeafRunner
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.inputs import make_inputs as made
from tests.core.in_every_library import asarray_of
from tests.representatives import CACHED, CALLED

SAMPLE = ("softmax", "softmax[window=3]", "lucid", "laser", "lucid(path)", "qk_norm", "linear")
STATES = ("linear", "gated_delta", "ccq(gla)", "atk(kda)")
LENGTHS = np.asarray([5, 3], dtype=np.int32)
both_libraries = pytest.mark.parametrize("library", ["numpy", "torch"])


def make_inputs(mechanism, t=6):
    return made(mechanism, CallLayout("test", b=2, t=t, s=t), "random")


def arrays_of(library, arrays):
    asarray = asarray_of(library)
    return {name: asarray(array.copy()) for name, array in arrays.items()}


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


def extended(mechanism, inputs, **named):
    return mechanism.extend(mechanism.init_cache(**inputs, **named), **inputs)[1]


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
    ("library", "texts"), [("numpy", CALLED), ("torch", CALLED), ("cupy_stand_in", SAMPLE)]
)
def test_writing_to_output_and_gradients_changes_no_later_gradient(library, texts, backend):
    for mechanism, masks in itertools.product(map(pa.parse, texts), ({}, {"lengths": LENGTHS})):
        try:
            inputs = arrays_of(library, make_inputs(mechanism))
            out, pullback = mechanism.vjp(**inputs, **arrays_of(library, masks), backend=backend)
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


@both_libraries
def test_writing_to_the_output_of_with_lse_changes_no_gradient(library):
    inputs = arrays_of(library, make_inputs(pa.Softmax()))
    (out, lse), pullback = pa.with_lse_vjp(pa.Softmax(), **inputs)
    cotangents = out * 1, lse * 1
    expected = on_host(pullback(*cotangents))
    overwrite(out)
    overwrite(lse)
    assert_equal(pullback(*cotangents), expected)


@both_libraries
@pytest.mark.parametrize("text", STATES)
def test_writing_to_output_and_new_cache_changes_no_gradient_of_an_extension(text, library):
    mechanism = pa.parse(text)
    inputs = arrays_of(library, make_inputs(mechanism))
    out, after, pullback = mechanism.extend_vjp(extended(mechanism, inputs), **inputs)
    cotangent, d_store = out * 1, {name: state * 1 for name, state in after.store.items()}
    expected = [on_host(gradients) for gradients in pullback(cotangent, d_store)]
    overwrite(out)
    mechanism.extend(after, **inputs, donate=True)
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
    torch, mechanism = pytest.importorskip("torch"), pa.parse(text)
    arrays = {**make_inputs(mechanism), "lengths": LENGTHS}
    _, expected = mechanism.vjp(**arrays)
    for name in arrays:
        given = arrays_of("torch", arrays)
        out, pullback = mechanism.vjp(**given)
        given[name] += 0
        with pytest.raises(RuntimeError, match=f"{name} was written to in place"):
            pullback(out)
    with torch.inference_mode():  # Its tensors count no writes, and copies are kept.
        given = arrays_of("torch", arrays)
        out, pullback = mechanism.vjp(**given)
        cotangent = out * 1
        for array in (out, *given.values()):
            array.zero_()
        gradients = on_host(pullback(cotangent))
    for name, array in expected(cotangent.numpy()).items():
        np.testing.assert_allclose(gradients[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("text", STATES)
def test_in_pytorch_a_cache_that_is_written_to_before_the_pullback_is_an_error(text):
    mechanism = pa.parse(text)
    inputs = arrays_of("torch", make_inputs(mechanism))
    for name in mechanism.program.slots:
        cache = extended(mechanism, inputs)
        out, _, pullback = mechanism.extend_vjp(cache, **inputs)
        cache.store[name] += 0
        with pytest.raises(RuntimeError, match=r"the cache.s .* was written to in place"):
            pullback(out)


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


@both_libraries
@pytest.mark.parametrize("t", [1, 2])
def test_a_cache_that_is_not_donated_shares_no_memory_with_the_next_one(t, library):
    for mechanism in map(pa.parse, CACHED):
        if not any(pattern.is_pairwise for pattern in mechanism.inputs.values()):
            inputs = arrays_of(library, make_inputs(mechanism, t))
            cache = mechanism.init_cache(**inputs, capacity=9)
            out, after = mechanism.extend(cache, **inputs)
            assert_apart({"out": out}, arrays_in(after), arrays_in(cache), inputs)


@both_libraries
def test_the_cache_of_a_window_survives_the_donation_of_the_next_one(library):
    mechanism = pa.Softmax(window=3)
    inputs = arrays_of(library, make_inputs(mechanism, 1))
    cache = extended(mechanism, inputs, capacity=90)
    expected = on_host({"out": mechanism.extend(cache, **inputs)[0]})
    _, after = mechanism.extend(cache, **inputs)
    for _ in range(4):  # The last of them moves the rows.
        _, after = mechanism.extend(after, **inputs, donate=True)
    assert_equal({"out": mechanism.extend(cache, **inputs)[0]}, expected)


@both_libraries
@pytest.mark.parametrize("text", ["softmax", "softmax[window=9]", "ccq(gla)", "lucid(path)"])
def test_an_operation_on_a_cache_gives_one_in_memory_of_its_own(text, library):
    mechanism = pa.parse(text)
    inputs = arrays_of(library, make_inputs(mechanism))
    cache = extended(mechanism, inputs, capacity=20)
    snapshot = cache.snapshot()
    results = [
        cache.restore(snapshot),
        cache.to(dtype="float64"),
        cache.to(device="cpu"),
        cache.select([0, 1]),
        pa.Cache.concatenate([cache]),
        pa.Cache.from_state_dict(cache.state_dict()),
    ]
    lengths = arrays_of(library, {"lengths": LENGTHS})
    results += [cache.crop(lengths["lengths"])] if text.startswith("softmax") else []
    earlier = {"length": snapshot.length, **snapshot.store}
    assert_apart(arrays_in(cache), lengths, earlier, *map(arrays_in, results))
