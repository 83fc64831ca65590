"""Empty arrays: no sequences, no queries or no keys, in every verb, mechanism and library."""

import numpy as np
import pytest

import precondattn as pa
from tests.core.test_cupy_stand_in import CACHED, EXPRESSIONS, SIZES, make_inputs
from tests.core.test_shared_memory import arrays_in, arrays_of, assert_apart, assert_equal, on_host

SAMPLE = ("softmax[bias=true]", "lucid(path)", "laser", "differential", "ccq(gla)", "atk(kda)")
CACHED_SAMPLE = ("softmax[window=3]", "lucid(path)", "ccq(gla)")

EMPTY = {
    "no sequences": {"b": 0},
    "no tokens": {"t": 0, "s": 0},
    "no queries": {"t": 0},
    "no keys": {"s": 0},
}
WITHOUT_KEYS = ("softmax", "path", "lucid", "laser", "differential", "softmax[causal=false]")


def accepts_fewer_queries(text):
    mechanism = pa.parse(text)
    letters = "".join(pattern.letters for pattern in mechanism.inputs.values())
    try:
        for leaf in mechanism.program.leaves:
            leaf.check_call({"t": 3, "s": 5}, frozenset())
    except ValueError:
        return False
    return "t" in letters and "s" in letters


def texts_for(library, which):
    """The expressions that are tried: all of them in NumPy, and few in JAX, which compiles."""
    few = slice(None, None, 2 if library == "jax.numpy" else 1)
    if which == "no keys":  # Others have as many queries as keys, or none more.
        return WITHOUT_KEYS[few]
    texts = EXPRESSIONS if library == "numpy" else SAMPLE[few]
    return filter(accepts_fewer_queries, texts) if which == "no queries" else texts


def masks_of(mechanism, sizes):
    sizes = SIZES | sizes
    b, t, s = (sizes[letter] for letter in "bts")
    masks = {"key_mask": np.ones((b, s), dtype=bool)}
    if mechanism.offers.causal or t == s:
        masks["lengths"] = np.zeros(b, dtype=np.int32)
    return masks


def assert_zeros(found, like):
    for name, array in on_host(found).items():
        np.testing.assert_array_equal(array, np.zeros(like[name].shape), err_msg=name)
        assert array.shape == like[name].shape


@pytest.mark.parametrize(
    ("which", "library"),
    [
        *((which, "numpy") for which in EMPTY),
        *(("no sequences", "torch"), ("no keys", "torch"), ("no tokens", "cupy_stand_in")),
        *(("no queries", "cupy_stand_in"), ("no tokens", "jax.numpy"), ("no keys", "jax.numpy")),
    ],
)
def test_outputs_and_gradients_are_empty_or_zero(which, library):
    for text in texts_for(library, which):
        mechanism, sizes = pa.parse(text), EMPTY[which]
        arrays = make_inputs(mechanism, **sizes)
        inputs = arrays_of(library, arrays)
        for masks in ({}, masks_of(mechanism, sizes)):
            given = arrays_of(library, masks)
            out = mechanism(**inputs, **given)
            again, pullback = mechanism.vjp(**inputs, **given)
            expected = np.zeros(mechanism.program.output.shape(SIZES | sizes))
            assert_zeros({"out": out, "again": again}, {"out": expected, "again": expected})
            assert_zeros(pullback(again), arrays)


@pytest.mark.parametrize(
    ("which", "library"),
    [
        *(("no sequences", "numpy"), ("no tokens", "numpy"), ("no sequences", "jax.numpy")),
        *(("no tokens", "torch"), ("no tokens", "cupy_stand_in")),
    ],
)
def test_an_extension_by_nothing_changes_nothing(which, library):
    for text in CACHED if library == "numpy" else CACHED_SAMPLE:
        mechanism = pa.parse(text)
        b = 0 if which == "no sequences" else SIZES["b"]
        some = arrays_of(library, extending(mechanism, b=b, t=2))
        none = arrays_of(library, extending(mechanism, b=b, t=2 if b == 0 else 0))
        cache = mechanism.init_cache(**none, capacity=CAPACITY, key_mask=keeps_tokens(mechanism))
        if b:
            _, cache = mechanism.extend(cache, **some)
        before = on_host(arrays_in(cache))
        out, after = mechanism.extend(cache, **none)
        assert 0 in out.shape
        assert_equal(arrays_in(cache), before)
        if library in ("numpy", "torch"):
            assert_apart(arrays_in(cache), arrays_in(after))
        _, donated = mechanism.extend(after, **none, donate=True)
        if b:
            assert_equal(arrays_in(donated), before)
            expected, _ = mechanism.extend(cache, **some)
            found, _ = mechanism.extend(donated, **some)
            assert_equal({"out": found}, on_host({"out": expected}))
        elif not keeps_tokens(mechanism):
            assert not any(array.size for array in on_host(arrays_in(donated)).values())


CAPACITY = 9


def keeps_tokens(mechanism):
    return any(pattern.keeps_tokens for _, pattern in mechanism.program.slots.values())


def extending(mechanism, b, t):
    """Inputs of `extend`, whose pairs span the capacity."""
    arrays = make_inputs(mechanism, b=b, t=t, s=t)
    for name, pattern in mechanism.inputs.items():
        if pattern.is_pairwise:
            sizes = SIZES | {"b": b, "t": t, "c": CAPACITY}
            arrays[name] = np.zeros(pattern.renamed({"s": "c"}).shape(sizes))
    return arrays


@pytest.mark.parametrize(
    ("text", "library"),
    [*(("linear", "torch"), ("ccq(gla)", "numpy")), ("atk(kda)", "cupy_stand_in")],
)
def test_the_pullback_of_an_extension_by_nothing_returns_the_cotangents_of_the_states(
    text, library
):
    mechanism = pa.parse(text)
    some, none = (arrays_of(library, extending(mechanism, b=2, t=t)) for t in (2, 0))
    _, cache = mechanism.extend(mechanism.init_cache(**some), **some)
    out, after, pullback = mechanism.extend_vjp(cache, **none)
    gradients, d_past = pullback(out, after)
    assert_zeros(gradients, on_host(none))
    assert_equal(d_past, on_host(cache.store))


def test_autograd_has_gradients_of_zero_and_those_of_the_states():
    torch = pytest.importorskip("torch")
    rows = [(text, which) for text in SAMPLE for which in ("no sequences", "no tokens")]
    for text, which in (*rows, *((text, "no keys") for text in WITHOUT_KEYS)):
        mechanism, arrays = pa.parse(text), make_inputs(pa.parse(text), **EMPTY[which])
        inputs = {n: a.requires_grad_() for n, a in arrays_of("torch", arrays).items()}
        mechanism(**inputs).sum().backward()
        assert_zeros({name: tensor.grad for name, tensor in inputs.items()}, arrays)
    linear = pa.parse("linear")
    inputs = arrays_of("torch", extending(linear, b=2, t=0))
    cache = linear.init_cache(**inputs)
    states = {name: torch.ones_like(a).requires_grad_() for name, a in cache.store.items()}
    _, after = linear.extend(cache._replace(store=states), **inputs)
    sum(state.sum() for state in after.store.values()).backward()
    for state in states.values():
        torch.testing.assert_close(state.grad, torch.ones_like(state))


def test_jax_compiles_and_differentiates_empty_calls():
    jax = pytest.importorskip("jax")
    mechanism = pa.parse("gated_delta")
    inputs = arrays_of("jax.numpy", make_inputs(mechanism, t=0, s=0))
    gradients = jax.jit(jax.grad(lambda x: mechanism(**x).sum()))(inputs)
    assert_zeros(gradients, on_host(inputs))
    cache = mechanism.init_cache(**inputs)
    _, after = jax.jit(mechanism.extend)(cache, **inputs)
    assert_equal(arrays_in(after), on_host(arrays_in(cache)))


def test_torchs_compiler_autocast_and_flop_counters_take_empty_calls():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    arrays = make_inputs(pa.Lucid(), "float32", t=0, s=0)
    inputs = {n: a.requires_grad_() for n, a in arrays_of("torch", arrays).items()}
    with torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False) as counter:
        out = pa.Lucid()(**inputs)
        out.sum().backward()
    assert (out.dtype, counter.get_total_flops()) == (torch.bfloat16, 0)
    assert_zeros({name: tensor.grad for name, tensor in inputs.items()}, arrays)
    compiled = torch.compile(lambda x: pa.Lucid()(**x), fullgraph=True, backend="aot_eager")
    assert tuple(compiled(inputs).shape) == (2, 0, 4, 6)


def test_a_backend_by_name_is_not_needed_for_an_empty_call():
    inputs = make_inputs(pa.Lucid(), b=0)
    for backend in ("portable", "reference"):
        assert pa.Lucid()(**inputs, backend=backend).shape == (0, 5, 4, 6)
    assert pa.Lucid().explain(**inputs).backends == ("none (the arrays are empty)",)


@pytest.mark.parametrize(
    ("sink", "library"), [(False, "torch"), (True, "jax.numpy"), (False, "numpy")]
)
def test_without_keys_the_log_sum_exp_is_that_of_the_sink_or_of_nothing(sink, library):
    mechanism = pa.Softmax(sink=sink)
    arrays = make_inputs(mechanism, s=0)
    inputs = arrays_of(library, arrays)
    (out, lse), pullback = pa.with_lse_vjp(mechanism, **inputs)
    expected = np.broadcast_to(arrays["sink"] if sink else -np.inf, (2, 5, 4))
    assert_equal({"out": out, "lse": lse}, {"out": np.zeros((2, 5, 4, 6)), "lse": expected})
    gradients = on_host(pullback(out, 0 * out[..., 0] + 1))
    if sink:
        np.testing.assert_array_equal(gradients.pop("sink"), np.full(4, 10.0))
    assert_zeros(gradients, arrays)


def test_part_of_no_keys_leaves_a_merge_as_it_is():
    q, k, v = make_inputs(pa.Softmax(causal=False)).values()
    whole = pa.with_lse(pa.Softmax(causal=False), q, k, v)
    nothing = pa.with_lse(pa.Softmax(causal=False), q, k[:, :0], v[:, :0])
    for found, expected in zip(pa.merge(*zip(whole, nothing, strict=True)), whole, strict=True):
        np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize(
    ("text", "library"), [("softmax[window=9]", "numpy"), ("ccq(gla)", "torch")]
)
def test_the_last_sequence_of_a_cache_may_be_taken_away(text, library):
    mechanism = pa.parse(text)
    inputs = arrays_of(library, make_inputs(mechanism))
    _, cache = mechanism.extend(mechanism.init_cache(**inputs, capacity=20), **inputs)
    without = cache.select([False, False])
    assert tuple(without.length.shape) == (0,)
    out, after = mechanism.extend(without, **{name: array[:0] for name, array in inputs.items()})
    assert tuple(out.shape[:2]) == (0, 5)
    assert pa.Cache.concatenate([after, cache]).length.shape == cache.length.shape


@pytest.mark.parametrize(
    ("mask", "library"),
    [
        ({"segment_ids": np.zeros((1, 0), int)}, "numpy"),
        ({"cu_seqlens": np.zeros(2, int)}, "torch"),
    ],
)
def test_packed_calls_may_have_no_tokens(mask, library):
    inputs = arrays_of(library, make_inputs(pa.Lucid(), b=1, t=0, s=0))
    assert tuple(pa.Lucid()(**inputs, **arrays_of(library, mask)).shape) == (1, 0, 4, 6)


def test_shapes_that_disagree_and_axes_of_no_width_are_refused_as_ever():
    q, k, v = make_inputs(pa.Softmax(), t=0, s=0).values()
    with pytest.raises(pa.ShapeError, match=r"v is declared .* axis 1 \(s\) is 3, but 0 in k"):
        pa.Softmax()(q, k, np.ones((2, 3, 2, 6)))
    with pytest.raises(pa.ShapeError, match=r"axis 3 \(d\) is empty"):
        pa.Softmax()(q[..., :0], k[..., :0], v)
