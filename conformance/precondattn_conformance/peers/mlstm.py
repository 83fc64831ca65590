"""mLSTM of mLSTM kernels, in plain PyTorch and JAX without Triton, and of xLSTM.

The forget gates here are values before a sigmoid; precondattn's are logarithms after it. In half
precision that value would be rounded, so it is at least in float32. The chunkwise and the recurrent
form begin with a running maximum of 0, the definition with −∞; with ε = 0, the result does not
depend on it. JAX's recurrent form can not be imported without Triton.

Their hand-written backward passes (`own_backward`) leave out the denominator, "as it cancels out in
the forward in the groupnorm". They are compared with a norm of each row after the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

from precondattn.arrays import Array, namespace, stop_gradient, upcast
from precondattn_conformance.peers.arrays import (
    Foreign,
    equally_wide_by_default,
    only_self_attention,
)
from precondattn_conformance.peers.project import Project, on_github

MLSTM_KERNELS = Project(
    "mlstm_kernels",
    "mLSTM kernels",
    "https://github.com/NX-AI/mlstm_kernels",
    package="mlstm_kernels",
)
EPS = 1.2e-38
"""The ε of the chunkwise form, in place of 0. The tokens that fill a chunk have queries of 0, for
which ε = 0 would give 0 / 0 where e^{−m} is 0 too. It is a normal number of float32, the dtype in
which the backward pass gets it."""
ALMOST_OPEN = -1e-26
"""The logarithm for a gate of 1: its value before the sigmoid is 60 instead of infinite."""
WITHOUT_EPS = "mlstm[eps=0]"
NORMALIZED = "row_normalized[eps=0,detach=false](mlstm[eps=0])"


def before_sigmoid(g: Array) -> Array:
    """f with log σ(f) = g. The derivative through both is 1, also for gates of 1."""
    g = upcast(g)
    xp = namespace(g)
    g = xp.where(g < ALMOST_OPEN, g, ALMOST_OPEN + (g - stop_gradient(g)))
    return g - xp.log(-xp.expm1(g))


def _normalized(rows: Array) -> Array:
    """Rows scaled to length 1, however short they were; rows of 0 stay 0."""
    xp = namespace(rows)
    largest = stop_gradient(xp.max(xp.abs(rows), axis=-1, keepdims=True))
    rows = rows / xp.where(largest > 0, largest, 1.0)
    squares = xp.sum(rows * rows, axis=-1, keepdims=True)
    return rows / xp.sqrt(xp.where(squares > 0, squares, 1.0))


def _of_torch(form: str, kernel: str) -> Foreign:
    return MLSTM_KERNELS.imported(f"mlstm_kernels.torch.{form}").registry[kernel]


def _recurrent_of_torch() -> Foreign:
    module = MLSTM_KERNELS.imported("mlstm_kernels.torch.recurrent.native_sequence")
    return module.mlstm_recurrent_sequence__native_fw


def _of_jax(kernel: str) -> Foreign:
    module = MLSTM_KERNELS.imported("mlstm_kernels.jax.parallel.native")
    return getattr(module, f"mlstm_parallel__{kernel}")


def _chunkwise_of_jax() -> Foreign:
    # The package that contains this folder requires Triton.
    module = MLSTM_KERNELS.imported_from("mlstm_kernels/jax/chunkwise/native", "fwbw")
    return module.mlstm_chunkwise__native_autograd


def _run(load: Callable[[], Foreign], normalizes: bool, *arrays: Array, eps: float) -> Array:
    q, k, v, g, i = arrays
    only_self_attention(q, k, 2)
    out = load()(q, k, v, i, before_sigmoid(g), eps=eps)
    return _normalized(out) if normalizes else out


CHUNKS = {"multiple": 64}
_arrangement: Foreign
# The forms called "stable" use sums of gates, and no differences of sums.
for _name, _kernel, _mechanism, _eps, _arrangement in (
    ("torch_parallel", partial(_of_torch, "parallel", "native_autograd"), "mlstm", None, {}),
    ("torch_parallel_own_backward", partial(_of_torch, "parallel", "native_custbw"), NORMALIZED,
     0.0, {}),
    ("torch_parallel_stable", partial(_of_torch, "parallel", "native_stablef_autograd"), "mlstm",
     None, {}),
    ("torch_parallel_stable_own_backward",
     partial(_of_torch, "parallel", "native_stablef_custbw"), NORMALIZED, 0.0, {}),
    ("torch_chunkwise", partial(_of_torch, "chunkwise", "native_autograd"), WITHOUT_EPS, EPS,
     CHUNKS),
    ("torch_chunkwise_own_backward", partial(_of_torch, "chunkwise", "native_custbw"), NORMALIZED,
     EPS, CHUNKS),
    ("torch_recurrent", _recurrent_of_torch, WITHOUT_EPS, 0.0, {}),
    ("jax_parallel", partial(_of_jax, "native_autograd"), "mlstm", None, {}),
    ("jax_parallel_own_backward", partial(_of_jax, "native_custbw"), NORMALIZED, 0.0, {}),
    ("jax_chunkwise", _chunkwise_of_jax, WITHOUT_EPS, EPS, CHUNKS),
):  # fmt: skip
    _options = {} if _eps is None else {"eps": _eps}  # The option of the mechanism, if it has one.
    _load = partial(partial, _run, _kernel, _mechanism == NORMALIZED, **_options)
    _takes = "q k v g i eps=" if _eps is None else "q k v g i"
    _arrangement = {"layout": "bhtd", "heads": "equal", **_arrangement}
    _library = _name.partition("_")[0]
    MLSTM_KERNELS.direct(_name, _mechanism, _load, _takes, library=_library, **_arrangement)


XLSTM = on_github("NX-AI/xlstm@032a6fb8ee19a8c0db80ae6111ff4744a09414a9", "2025-11-04", "xLSTM")
CHUNK = 64


def _backends() -> ModuleType:
    return XLSTM.imported("xlstm/blocks/mlstm/backends.py")


@XLSTM.peer("mlstm", library="torch", layout="bhtd", heads="equal")
def parallel_stabilized_simple(
    q: Array, k: Array, v: Array, g: Array, i: Array, eps: float
) -> Array:
    run = _backends().parallel_stabilized_simple
    return run(q, k, v, i[..., None], before_sigmoid(g)[..., None], eps=eps)


@XLSTM.peer("mlstm[eps=0]", library="torch", layout="bhtd", heads="equal")
def recurrent_step_stabilized_simple(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    """Computes one token after the other, from a running maximum of 0. It squeezes its inputs in
    place."""
    import torch

    step, f = _backends().recurrent_step_stabilized_simple, before_sigmoid(g)
    b, h, tokens, d = k.shape
    state = (q.new_zeros(b, h, d, v.shape[-1]), q.new_zeros(b, h, d, 1), f.new_zeros(b, h, 1, 1))
    outs = []
    for t in range(tokens):
        q_t, k_t, v_t, i_t, f_t = (x[:, :, t, None].clone() for x in (q, k, v, i, f))
        out, state = step(*state, q_t, k_t, v_t, i_t[..., None], f_t[..., None], eps=0.0)
        outs.append(out)
    return torch.cat(outs, 2).to(q.dtype)


@XLSTM.peer("mlstm[eps=0]", library="torch", layout="bhtd", heads="equal", multiple=CHUNK)
def chunkwise_simple(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    """Computes in chunks, from a running maximum of 0."""
    run, e = _backends().chunkwise_simple, v.shape[-1]
    q, k, v = equally_wide_by_default(q, k, v)
    return run(q, k, v, i, before_sigmoid(g), chunk_size=CHUNK, eps=0.0)[..., :e].to(q.dtype)
