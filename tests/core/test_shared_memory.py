"""What a call returns may be written to: nothing that is read later shares its memory."""

import itertools
from contextlib import suppress

import numpy as np
import pytest

import precondattn as pa
from precondattn.runner import LeafRunner
from tests.core.inputs import asarray_of, inputs_of
from tests.representatives import CACHED, CALLED

SAMPLE = ("softmax", "softmax[window=3]", "lucid", "laser", "lucid(path)", "qk_norm", "linear")
STATES = ("linear", "gated_delta", "ccq(gla)", "atk(kda)")
LENGTHS = np.asarray([5, 3], dtype=np.int32)
both_libraries = pytest.mark.parametrize("library", ["numpy", "torch"])


def arrays_of(library, arrays):
    asarray = asarray_of(library)
    return {name: asarray(array.copy()) for name, array in arrays.items()}


def given_to(mechanism, library, t=6):
    return arrays_of(library, inputs_of(mechanism, t=t))


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


def test_a_backend_that_writes_to_the_output_in_its_gradient_is_an_error(register):
    """The caller's output is another array, so that nobody would see it."""

    class WritingRunner(LeafRunner):
        def backward(self, inputs, frame, out, residuals, cotangent):
            out *= 0.5
            return super().backward(inputs, frame, out, residuals, cotangent)

    class Writes(pa.Backend):
        name = "writes"

        def prepare(self, piece, request):
            return WritingRunner(piece, piece)

    register(Writes())
    out, pullback = pa.Softmax().vjp(*np.ones((3, 1, 4, 2, 8)), backend="writes")
    with pytest.raises(ValueError, match="read-only"):
        pullback(out)


@pytest.mark.thorough(but=("cupy_stand_in-texts2-None", "numpy-texts0-reference"))
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("library", "texts"), [("numpy", CALLED), ("torch", CALLED), ("cupy_stand_in", SAMPLE)]
)
def test_writing_to_output_and_gradients_changes_no_later_gradient(library, texts, backend):
    for mechanism, masks in itertools.product(map(pa.parse, texts), ({}, {"lengths": LENGTHS})):
        try:
            inputs = given_to(mechanism, library)
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
@pytest.mark.parametrize("text", ["with_lse", *STATES])
def test_writing_to_output_and_new_cache_changes_no_gradient_of_an_extension(text, library):
    """So it is of a log-sum-exp, which a call returns beside its output."""
    if text == "with_lse":
        inputs = given_to("softmax", library)
        (out, lse), pull = pa.with_lse_vjp(pa.Softmax(), **inputs)
        cotangents = out * 1, lse * 1
        expected = [on_host(pull(*cotangents))]
        overwrite(lse)
    else:
        m, inputs = pa.parse(text), given_to(text, library)
        cache = m.extend(m.init_cache(**inputs), **inputs)[1]
        out, after, pull = m.extend_vjp(cache, **inputs)
        cotangents = out * 1, {name: state * 1 for name, state in after.store.items()}
        expected = [on_host(gradients) for gradients in pull(*cotangents)]
        m.extend(after, **inputs, donate=True)
    overwrite(out)
    found = pull(*cotangents)
    for gradients, wanted in zip([found] if text == "with_lse" else found, expected, strict=True):
        assert_equal(gradients, wanted)


def test_in_jax_a_donated_output_changes_no_gradient_and_a_donated_input_is_an_error():
    jax = pytest.importorskip("jax")
    q, k, v = given_to("softmax", "jax.numpy").values()
    out, pullback = pa.Softmax().vjp(q, k, v)
    cotangent = out * 1
    expected = on_host(pullback(cotangent))
    donating = jax.jit(lambda x: x - 1, donate_argnums=0)
    donating(out)
    assert_equal(pullback(cotangent), expected)
    donating(q)
    with pytest.raises((ValueError, RuntimeError), match="deleted"):
        pullback(cotangent)


@pytest.mark.parametrize("text", [*SAMPLE, *STATES[1:]])
def test_in_pytorch_what_is_written_to_before_the_pullback_is_an_error(text):
    torch, m = pytest.importorskip("torch"), pa.parse(text)
    arrays = {**inputs_of(m, t=6), "lengths": LENGTHS}
    _, expected = m.vjp(**arrays)
    for name in arrays:
        given = arrays_of("torch", arrays)
        out, pullback = m.vjp(**given)
        given[name] += 0
        with pytest.raises(RuntimeError, match=f"{name} was written to in place"):
            pullback(out)
    if text in STATES:
        given = given_to(m, "torch")
        for name in m.program.slots:
            cache = m.extend(m.init_cache(**given), **given)[1]
            out, _, pullback = m.extend_vjp(cache, **given)
            cache.store[name] += 0
            with pytest.raises(RuntimeError, match=r"the cache.s .* was written to in place"):
                pullback(out)
    with torch.inference_mode():  # Its tensors count no writes, and copies are kept.
        given = arrays_of("torch", arrays)
        out, pullback = m.vjp(**given)
        cotangent = out * 1
        for array in (out, *given.values()):
            array.zero_()
        gradients = on_host(pullback(cotangent))
    for name, array in expected(cotangent.numpy()).items():
        np.testing.assert_allclose(gradients[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.thorough(but=("numpy", "torch"))
@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_a_cache_that_is_donated_before_the_pullback_is_an_error_where_it_is_overwritten(library):
    m, inputs = pa.Linear(), given_to("linear", library)
    cache = m.init_cache(**inputs)
    out, _, pullback = m.extend_vjp(cache, **inputs)
    expected = [on_host(gradients) for gradients in pullback(out)]
    m.extend(cache, **inputs, donate=True)
    if library == "jax.numpy":  # It does not write in place.
        for found, wanted in zip(pullback(out), expected, strict=True):
            assert_equal(found, wanted)
    else:
        with pytest.raises(ValueError, match="linear: the old cache was donated"):
            pullback(out)


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
    for m in map(pa.parse, CACHED):
        if not any(pattern.is_pairwise for pattern in m.inputs.values()):
            inputs = given_to(m, library, t)
            cache = m.init_cache(**inputs, capacity=9)
            out, after = m.extend(cache, **inputs)
            assert_apart({"out": out}, arrays_in(after), arrays_in(cache), inputs)


@both_libraries
@pytest.mark.parametrize("text", ["softmax", "softmax[window=9]", "ccq(gla)", "lucid(path)"])
def test_an_operation_on_a_cache_gives_one_in_memory_of_its_own(text, library):
    m, inputs = pa.parse(text), given_to(text, library)
    cache = m.extend(m.init_cache(**inputs, capacity=20), **inputs)[1]
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
