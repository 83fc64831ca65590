"""Caches of windows: they hold the last tokens only, and obey the laws of every cache."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens

LENGTH, WINDOW = 60, 9
ROWS, SPARE = 12, 2
"""8 tokens that a query reads besides its own, and ⌈9 / 8⌉ more, twice."""
MECHANISMS = [
    f"softmax[window={WINDOW}]",
    f"laser(softmax[window={WINDOW}])",
    f"softmax[window={WINDOW},forget=unscaled]",
    f"qk_norm(softmax[window={WINDOW}])",
    f"ccq(softmax[window={WINDOW}])",  # It also has a state, which has no rows.
]
PLAIN = pa.parse(MECHANISMS[0])


def inputs_of(m, library="numpy", dtype="float64", b=3):
    lib = libraries.named(library)
    x = make_inputs(m, CallLayout("test", b=b, t=LENGTH, s=LENGTH), "random")
    return {name: lib.array(array, dtype) for name, array in x.items()}


def extended(m, cache, x, ends, start=0, **options):
    """The output of extensions that end at these tokens, and the last cache."""
    outs = []
    for stop in ends:
        out, cache = m.extend(cache, **slice_tokens(m, x, start, stop), **options)
        outs.append(np.asarray(out))
        start = stop
    return np.concatenate(outs, axis=1), cache


@pytest.mark.parametrize(
    ("expression", "ends", "donate"),
    [
        *((text, [3, 40, 41, LENGTH], i % 2 == 0) for i, text in enumerate(MECHANISMS)),
        *((MECHANISMS[0], range(1, LENGTH + 1), donate) for donate in (False, True)),
        *((MECHANISMS[0], [LENGTH], False), (MECHANISMS[2], range(5, LENGTH + 1, 5), False)),
        (MECHANISMS[4], range(1, LENGTH + 1), True),
    ],
    ids=str,
)
def test_any_split_equals_the_full_call_in_buffers_of_few_rows(expression, ends, donate):
    m = pa.parse(expression)
    x = inputs_of(m)
    cache = m.init_cache(**x, capacity=1000)
    before = {name: (buffer.shape, buffer.strides) for name, buffer in cache.store.items()}
    out, cache = extended(m, cache, x, ends, donate=donate)
    np.testing.assert_allclose(out, m(**x), rtol=1e-10, atol=1e-12)
    assert cache.length.tolist() == [LENGTH] * 3
    assert cache.store["k" if "qk" not in expression else "v"].shape[1] == ROWS
    assert before == {n: (buffer.shape, buffer.strides) for n, buffer in cache.store.items()}


def test_a_window_is_cropped_within_the_tokens_that_it_holds():
    x = inputs_of(PLAIN)
    expected = PLAIN(**x)
    _, cache = extended(PLAIN, PLAIN.init_cache(**x, capacity=1000), x, range(1, 41))
    assert not cache.can_crop
    first = cache.store["first_token"]
    for back in range(SPARE):
        cropped = cache.crop(40 - back).crop(40 - SPARE)
        out, again = extended(PLAIN, cropped, x, [45, LENGTH], 40 - SPARE)
        np.testing.assert_allclose(out, expected[:, 40 - SPARE :], rtol=1e-10, atol=1e-12)
        assert again.length.tolist() == [LENGTH] * 3
    lowest = int(first[0]) + WINDOW - 1
    cache.crop(lowest)
    with pytest.raises(ValueError, match=rf"lengths must be {lowest} or above.* snapshot\(\)"):
        cache.crop(lowest - 1)


def test_operations_on_a_window():
    x = inputs_of(PLAIN)
    _, cache = extended(PLAIN, PLAIN.init_cache(**x, capacity=1000), x, [30, 40])
    before = cache.snapshot()
    for donate in (True, False):
        _, cache = extended(PLAIN, cache, x, [45, 60], 40, donate=True)
        cache = cache.restore(before, donate=donate)
    assert cache.capacity is None
    assert cache.grow(5000) is cache
    order = [2, 0, 0]
    cache = pa.Cache.from_state_dict(cache.state_dict()).reorder(order)
    cache = pa.Cache.concatenate([cache.select([0]), cache.select(slice(1, None))])
    new = {name: array[order] for name, array in x.items()}
    out, _ = extended(PLAIN, cache, new, [LENGTH], 40)
    np.testing.assert_allclose(out, PLAIN(**x)[order, 40:], rtol=1e-10, atol=1e-12)


def test_other_mechanisms_keep_all_tokens_or_refuse_the_cache_of_a_window():
    x = inputs_of(PLAIN)
    for expression in ("lucid({})", "path[window=9]", "softmax[window=9,bias=true]"):
        assert pa.parse(expression.format(MECHANISMS[0])).program.reach is None, expression
    cache = PLAIN.init_cache(**x, capacity=1000)
    new = slice_tokens(PLAIN, x, 0, 2)
    for other in (pa.Softmax(), pa.Softmax(window=WINDOW - 1)):
        with pytest.raises(ValueError, match="of another mechanism: it holds the last tokens only"):
            other.extend(cache, **new)
    with pytest.raises(ValueError, match="of another mechanism: it has the buffers"):
        pa.Lucid().extend(cache, **new)
    small = PLAIN.init_cache(**x, capacity=ROWS)
    assert "first_token" not in small.store
    with pytest.raises(ValueError, match=f"at most {ROWS} tokens"):
        PLAIN.extend(small, **x)


def test_a_window_under_jit():
    jax = pytest.importorskip("jax")
    x = inputs_of(PLAIN, "jax", "float32", b=2)
    expected = PLAIN(**inputs_of(PLAIN, b=2))
    step = jax.jit(PLAIN.extend, donate_argnums=0)
    cache = PLAIN.init_cache(**x, capacity=1000)
    out, cache = step(cache, **slice_tokens(PLAIN, x, 0, 20))
    outs = [out]
    for token in range(20, 26):
        out, cache = step(cache, **slice_tokens(PLAIN, x, token, token + 1))
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected[:, :26], rtol=1e-4, atol=1e-5)
    cropped = jax.jit(lambda c, n: c.crop(n))(cache, jax.numpy.asarray([25, 3]))
    assert cropped.length.tolist() == [25, -1]


def test_a_window_is_differentiated():
    torch = pytest.importorskip("torch")
    x = {name: array.requires_grad_() for name, array in inputs_of(PLAIN, "torch").items()}
    cache, outs = PLAIN.init_cache(**x, capacity=1000), []
    for start, stop in ((0, 20), (20, 30), (30, 31), (31, LENGTH)):
        out, cache = PLAIN.extend(cache, **slice_tokens(PLAIN, x, start, stop))
        outs.append(out)
    cotangent = torch.randn_like(out := torch.cat(outs, dim=1))
    found, expected = (torch.autograd.grad(o, [*x.values()], cotangent) for o in (out, PLAIN(**x)))
    torch.testing.assert_close(found, expected)
