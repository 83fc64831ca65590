"""Calls and steps of kernels in the simulator, compared with the definition."""

import numpy as np

import precondattn as pa
from precondattn.kernel_backend.kernel_table import kernels_in
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn_cupy.backend import KERNELS
from precondattn_cupy.configurations import Configuration, forced
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends import kernel_problems as problems
from tests.backends.kernel_problems import DTYPES, error, truth_of_row, wide

ORDERS = (None, "reverse", 0)
"""Orders in which blocks and threads run; 0 is the seed of a random order."""

TILES = (
    *("softmax_forward", "softmax_query_gradient", "softmax_key_gradient"),
    *(f"softmax_{kernel}_of_two" for kernel in ("forward", "query_gradient", "key_gradient")),
    *("lucid_update", "lucid_gradient", "lucid_decode"),
)
SMALL = dict.fromkeys(TILES, Configuration(16, 16)) | {"lucid_inverse": Configuration(16, 32)}

BOUNDS = {
    "attention": {"float32": (1e-5, 1e-5), "float16": (5e-3, 5e-3), "bfloat16": (2e-2, 2e-2)},
    "laser": {"float32": (1e-5, 2e-5), "float16": (5e-3, 1e-2), "bfloat16": (2e-2, 4e-2)},
    "lucid": {"float32": (2e-5, 4e-5), "float16": (5e-3, 1e-2), "bfloat16": (2e-2, 4e-2)},
    "recurrence": {"float32": (2e-6, 4e-6), "float16": (2e-3, 4e-3), "bfloat16": (1.5e-2, 3e-2)},
    "rows": {
        **{"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5)},
        # After a division by a small norm, gradients are large.
        **{"float16": (5e-3, 4e-2), "bfloat16": (2e-2, 2e-2)},
    },
}
"""Tolerances of an output and of gradients."""


def family_of(leaf):
    if isinstance(leaf, pa.Softmax):
        return "laser" if leaf.read == LOG_MEAN_EXP else "attention"
    names = {pa.LucidSolve: "lucid", pa.UnitRows: "rows"}
    return names.get(type(leaf), "recurrence")


def kernels_for(leaf):
    return kernels_in(KERNELS, leaf)()


def run(kernels, leaf, truth, tiles=SMALL, order=None):
    with forced(**tiles), checked(order):
        out, residuals = kernels.forward(leaf, truth.x, truth.frame)
        return (
            out,
            residuals,
            kernels.backward(leaf, truth.x, truth.frame, out, residuals, truth.cotangent),
        )


def check(made, truth=None):
    """A row; the result has all that its kernels return."""
    bounds = BOUNDS[family_of(made.leaf)][made.dtype]
    how = {name: of for name, of in made.how.items() if name in ("tiles", "order")}
    return problems.check(
        kernels_for(made.leaf),
        made.leaf,
        truth or truth_of_row(made),
        lambda *given: run(*given, **how),
        made.dtype,
        made.how.get("bound", bounds[0]),
        made.how.get("gradient_bound", made.how.get("bound", 0) * 2 or bounds[1]),
        least=1 if isinstance(made.leaf, pa.Softmax) else 0.1,
    )


def inputs_of(mechanism, t, dtype="float32", **given):
    """The inputs of a mechanism of several pieces."""
    x, _ = problems.problem(mechanism, t, **given)
    return {name: a.astype(DTYPES[dtype]) for name, a in x.items()}


def all_wide(arrays):
    return {name: wide(array) for name, array in arrays.items()}


def check_step(mechanism, x, bound, *, capacity=None, order=None, of_state=2e-6, **masks):
    """The last token, after a cache of those before it; `masks` are those of both calls.

    What is no valid token of the cache is NaN. The definition begins with the same cache.
    """
    held = x["k"].shape[1] - 1
    past, new = (
        {name: a[:, part] for name, a in x.items()} for part in (slice(held), slice(held, None))
    )
    before, now = ({name: mask[i] for name, mask in masks.items()} for i in (0, 1))
    capacity = capacity or held + 3
    cache = mechanism.init_cache(**new, capacity=capacity, key_mask="key_mask" in masks)
    if held:
        _, cache = mechanism.extend(cache, **past, **before, backend="portable")
    exact = cache._replace(
        store=all_wide(cache.store)
        | {name: a for name, a in cache.store.items() if a.dtype == bool}
    )
    hidden = np.arange(capacity)[None] >= np.asarray(cache.length).reshape(-1, 1)
    hidden = hidden.repeat(len(x["k"]) // len(hidden), 0)
    if "key_mask" in before:
        hidden[:, :held] |= ~before["key_mask"]
    for name, buffer in cache.store.items():
        if name != "key_mask" and buffer.shape[1] == capacity:
            buffer[hidden] = np.nan
    expected, last = mechanism.extend(exact, **all_wide(new), **now, backend="reference")
    how = {**now, "backend": ("cupy", "portable")}
    assert mechanism.explain(**new, **how, cache=cache).backends[-1] == "cupy"
    with forced(**SMALL), checked(order):
        out, after = mechanism.extend(cache, **new, **how)
    assert out.dtype == x["v"].dtype
    assert error(out, expected) < bound
    np.testing.assert_array_equal(after.length, last.length)
    for name, buffer in last.store.items():
        found = after.store[name]
        both = np.isfinite(wide(found)) & np.isfinite(wide(buffer))  # Masked entries may be NaN.
        limit = of_state if buffer.shape[1] != capacity else bound
        assert error(np.where(both, found, 0), np.where(both, buffer, 0)) < limit, name
        assert found.dtype == cache.store[name].dtype
    return out
