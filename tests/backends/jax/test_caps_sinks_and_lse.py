"""`jax.grad` under `jax.jit` through soft caps, sinks, log-sum-exps and merges, against the formula
of `tests/mathematics/test_caps_sinks_and_lse.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precondattn as pa

pytest.importorskip("torch")  # Its autograd of the formula is the expected gradient.

from tests.mathematics.test_caps_sinks_and_lse import (
    by_autograd,
    by_loops,
    masks_of,
    problem,
    visible,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
ALL = {"softcap": 1.5, "sink": True}
CASES = [
    ({"sink": True}, "key_mask"),
    (ALL | {"window": 4}, "segment_ids"),
    (ALL | {"causal": False}, "segment_ids"),
    (ALL | {"bias": True}, "none"),
    (ALL | {"forget": "unscaled"}, "lengths"),
]


def arrays(x):
    return {name: jnp.asarray(array) for name, array in x.items()}


@pytest.mark.parametrize(("options", "mask"), CASES, ids=str)
def test_gradients_of_output_and_lse(options, mask, small_blocks):
    """Gradients by `jax.grad` under `jit` and by `with_lse_vjp` are those of the formula."""
    m, x, masks = pa.Softmax(**options), problem(options), masks_of(mask, 2, 9)
    seen, real = visible(options, masks, 2, 9, 9)
    out, lse = by_loops(x, options, seen)
    rng = np.random.default_rng(3)
    d_out = rng.normal(size=out.shape) * real[:, :, None, None]
    d_lse = np.where(real[:, :, None] & np.isfinite(lse), rng.normal(size=lse.shape), 0.0)
    expected = by_autograd(x, options, seen, d_out, d_lse)

    @jax.jit
    def both(x, masks):
        def loss(x):
            out, lse = pa.with_lse(m, **x, **masks, backend="jax")
            return jnp.sum(out * d_out) + jnp.sum(jnp.where(d_lse == 0, 0.0, lse) * d_lse)

        results, pullback = pa.with_lse_vjp(m, **x, **masks, backend="jax")
        return results, jax.grad(loss)(x), pullback(jnp.asarray(d_out), jnp.asarray(d_lse))

    (o, log_sum), *gradients = both(arrays(x), arrays(masks))
    np.testing.assert_allclose(o, out * real[:, :, None, None], **CLOSE)
    np.testing.assert_allclose(np.where(real[:, :, None], log_sum - lse, 0.0), 0.0, **CLOSE)
    for given in gradients:
        for name, gradient in given.items():
            np.testing.assert_allclose(gradient, expected[name], err_msg=name, **CLOSE)


def test_gradients_through_a_merge_of_parts_are_those_of_the_whole(small_blocks):
    """The first part has the sink; the second one's first queries see no key."""
    x = arrays(problem({"sink": True}))
    d_out = np.random.default_rng(4).normal(size=(2, 9, 4, 3))
    hidden = jnp.arange(9) >= jnp.asarray([[3], [5]])

    def of_part(m, x, own):
        return pa.with_lse(m, **x, key_mask=own, backend="jax")

    def merged(x):
        rows = {name: x[name] for name in "qkv"}
        parts = [of_part(pa.Softmax(sink=True), x, ~hidden), of_part(pa.Softmax(), rows, hidden)]
        out, lse = pa.merge(*zip(*parts, strict=True))
        return jnp.sum(out * d_out) + jnp.sum(lse)

    def whole(x):
        out, lse = pa.with_lse(pa.Softmax(sink=True), **x, backend="jax")
        return jnp.sum(out * d_out) + jnp.sum(lse)

    result, expected = (jax.jit(jax.value_and_grad(f))(x) for f in (merged, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), result, expected)
