"""Tiles of a few tokens, so that short sequences have several; comparison with the definition.

In the interpreter, memory that no program writes is NaN; here padding is NaN too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from precondattn.backend import ArraySpec
from precondattn.frame import Frame
from precondattn_pallas.configurations import Configuration, forced

SMALL = {
    "lucid_inverse": Configuration(16, 64),
    "lucid_update": Configuration(16, 16),
    "lucid_gradient": Configuration(16, 16),
    "lucid_decode": Configuration(16, 16),
    "attention_forward": Configuration(16, 32),
    "attention_query_gradient": Configuration(32, 16),
    "attention_key_gradient": Configuration(16, 32),
    "window_forward": Configuration(16, 32),
    "window_query_gradient": Configuration(32, 16),
    "window_key_gradient": Configuration(16, 32),
    "window_table_gradient": Configuration(16, 32),
}

BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 5e-3}

OPTIONS = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # Later versions always use them.
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
quick = partial(jax.jit, compiler_options=OPTIONS)
"""Options for fast compilation, not for fast code."""


def small_tiles(**configurations):
    return forced(**{**SMALL, **configurations})


def rounded(array, dtype):
    """The array in JAX, rounded to the dtype, and the same numbers in float64."""
    result = jnp.asarray(array, dtype=dtype)
    return result, wide(result)


def wide(array):
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def error(result, expected):
    """The largest difference, divided by the largest expected number or by at least 0.1."""
    return np.abs(wide(result) - expected).max() / max(np.abs(expected).max(), 0.1)


def frame_of(t, s, b, lengths=None, key_mask=None, segments=None):
    """A frame of NumPy's arrays for t queries, which are the last of s tokens."""
    key = np.arange(s)[None]
    query = key[:, s - t :]
    k_valid = key_mask
    q_valid = None
    if lengths is not None:
        k_valid = key < np.asarray(lengths)[:, None]
        q_valid = k_valid[:, s - t :]
    segment = None if segments is None else np.stack([key[0] // n for n in segments])
    q_segment = None if segment is None else segment[:, s - t :]
    return Frame(query, key, q_valid, k_valid, q_segment, segment)


def filled(array, valid, filler):
    """The array with `filler` at invalid tokens."""
    if valid is None:
        return array
    shape = (*valid.shape, *[1] * (array.ndim - 2))
    return np.where(valid.reshape(shape), array, filler)


def check(kernels, leaf, x, cotangent, frame, dtype, bound, **tiles):
    """Output and gradients against the definition in float64, whatever the padding contains."""
    sides = {
        name: frame.q_valid if "t" in leaf.inputs[name].letters else frame.k_valid
        for name in x
        if leaf.inputs[name].time_axis is not None
    }
    sides = dict.fromkeys(x) | sides
    of_out = frame.q_valid if "q" in x else frame.k_valid
    exact = {name: filled(rounded(a, dtype)[1], sides[name], 0.0) for name, a in x.items()}
    d_exact = filled(rounded(cotangent, dtype)[1], of_out, 0.0)
    out, residuals = leaf.forward(exact, frame)
    out = filled(out, of_out, 0.0)
    expected = leaf.backward(exact, frame, out, residuals, d_exact)
    given = {
        name: jnp.asarray(filled(a, sides[name], np.nan), dtype=dtype) for name, a in x.items()
    }
    d_given = jnp.asarray(filled(cotangent, of_out, np.nan), dtype=dtype)

    def run(x, masks, d_out):
        result, residuals = kernels.forward(leaf, x, Frame(None, None, *masks))
        masked = Frame(None, None, *masks)
        return result, residuals, kernels.backward(leaf, x, masked, result, residuals, d_out)

    masks = tuple(None if a is None else jnp.asarray(a) for a in frame.arrays[2:])
    with small_tiles(**tiles):
        result, kept, gradients = quick(run)(given, masks, d_given)
    specs = {name: ArraySpec(tuple(a.shape), dtype) for name, a in x.items()}
    wanted = kernels.residual_shapes(leaf, specs)
    assert [(r.shape, str(r.dtype)) for r in kept] == [tuple(w) for w in wanted]
    assert str(result.dtype) == dtype
    result = np.asarray(result.astype(jnp.float32))
    assert error(jnp.asarray(filled(result, of_out, 0.0)), out) < bound
    for name, gradient in expected.items():
        assert str(gradients[name].dtype) == dtype
        gradient = filled(gradient, sides[name], 0.0)
        assert error(gradients[name], gradient) < 2 * bound, name


def check_extension(kernels, leaf, x, cotangent, bound, **tiles):
    """An extension of a state in float32, and its gradient, against the definition in float64."""
    rng = np.random.default_rng(1)
    (b, t), slots = x["k"].shape[:2], leaf.program.slot_keys[0]
    shapes = {name: a.shape for name, a in leaf.zero_state(x).items()}
    arrays = (x, *({name: rng.normal(size=shapes[name]) for name in slots} for _ in range(2)))
    arrays = [{name: rounded(a, "float32") for name, a in of.items()} for of in arrays]
    given, exact = ([{name: a[i] for name, a in of.items()} for of in arrays] for i in (0, 1))
    frame = frame_of(t, t, b)
    out, updates = leaf.step(exact[1], exact[0], frame)
    gradients, d_past = leaf.step_backward(exact[1], exact[0], frame, cotangent, exact[2])

    def run(x, past, d_new, d_out):
        step = kernels.step(leaf, past, x, Frame(None, None))
        return step, kernels.step_backward(leaf, past, x, Frame(None, None), d_out, d_new)

    given[1:] = [{key: of[name] for name, key in slots.items()} for of in given[1:]]
    with small_tiles(**tiles):
        (result, new), (d_x, d_old) = quick(run)(*given, jnp.asarray(cotangent, dtype="float32"))
    assert error(result, out) < bound
    for name, key in slots.items():
        assert error(new[key].value, updates[name].value) < bound, name
        assert error(d_old[key], d_past[name]) < bound, name
    for name, gradient in gradients.items():
        assert error(d_x[name], gradient) < 2 * bound, name
