"""Calls of Pallas kernels with tiles of a few tokens, interpreted and compared with the definition.

In the interpreter, memory that no program writes is NaN; here padding is NaN too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from precondattn.frame import Frame
from precondattn_pallas.backend import kernels_of
from precondattn_pallas.configurations import REGISTRY, Configuration, forced
from tests.backends import kernel_problems as problems
from tests.backends.kernel_problems import error, frame_of, truth_of, truth_of_row, wide

WIDE, HIGH = Configuration(16, 32), Configuration(32, 16)
KINDS = ("forward", "query_gradient", "key_gradient")
SMALL = {
    "lucid_inverse": Configuration(16, 64),
    **dict.fromkeys(("lucid_update", "lucid_gradient", "lucid_decode"), Configuration(16, 16)),
    **{f"attention_{kind}": HIGH if kind == "query_gradient" else WIDE for kind in KINDS},
}


def chunks_of(tokens):
    """Chunks of that many tokens, and blocks of 16 channels."""
    names = {key.kernel for key in REGISTRY.untuned}
    chunked = (name for name in names if name.startswith(("chunk_", "channel_", "delta_")))
    return dict.fromkeys(chunked, Configuration(tokens, 16))


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


def in_jax(arrays, dtype=None):
    return {name: jnp.asarray(array, dtype=dtype) for name, array in arrays.items()}


def run(kernels, leaf, truth, **tiles):
    """The output, residuals and gradients of compiled kernels."""

    def both(x, masks, d_out):
        frame = Frame(None, None, *masks)
        out, residuals = kernels.forward(leaf, x, frame)
        return out, residuals, kernels.backward(leaf, x, frame, out, residuals, d_out)

    masks = tuple(None if a is None else jnp.asarray(a) for a in truth.frame.arrays[2:])
    with small_tiles(**tiles):
        return quick(both)(in_jax(truth.x), masks, jnp.asarray(truth.cotangent))


def check(kernels, leaf, x, cotangent, frame, dtype, bound, **tiles):
    """Output and gradients against the definition in float64, whatever the padding contains."""
    truth = truth_of(leaf, x, cotangent, frame, dtype)
    return check_truth(kernels, leaf, truth, dtype, bound, **tiles)


def check_truth(kernels, leaf, truth, dtype, bound, **tiles):
    how = partial(run, **tiles)
    return problems.check(kernels, leaf, truth, how, dtype, bound, 2 * bound, pads_with_0=False)


def check_row(made, interpret=True, target="cuda"):
    kernels = kernels_of(made.leaf, interpret=interpret, target=target)
    tiles = {**chunks_of(16), **made.how.get("tiles", {})}
    bound = made.how.get("bound", BOUNDS[made.dtype])
    check_truth(kernels, made.leaf, truth_of_row(made), made.dtype, bound, **tiles)


def check_extension(kernels, leaf, x, cotangent, bound=2e-5, **tiles):
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

    def both(x, past, d_new, d_out):
        step = kernels.step(leaf, past, x, Frame(None, None))
        return step, kernels.step_backward(leaf, past, x, Frame(None, None), d_out, d_new)

    given[1:] = [{key: of[name] for name, key in slots.items()} for of in given[1:]]
    with small_tiles(**tiles):
        (result, new), (d_x, d_old) = quick(both)(*given, jnp.asarray(cotangent, dtype="float32"))
    jax.block_until_ready(d_x)
    assert error(result, out) < bound
    for name, key in slots.items():
        assert error(new[key].value, updates[name].value) < bound, name
        assert error(d_old[key], d_past[name]) < 2 * bound, name
    for name, gradient in gradients.items():
        assert error(d_x[name], gradient) < 2 * bound, name
