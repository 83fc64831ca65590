"""mLSTM kernels: the forms of xLSTM's mLSTM in plain PyTorch and JAX, without Triton.

The forget gates here are values before a sigmoid; precondattn's are logarithms after it. In half
precision that value would be rounded, so it is at least in float32. The chunkwise and the recurrent
form begin with a running maximum of 0, the definition with −∞; with ε = 0, the result does not
depend on it. JAX's recurrent form can not be imported without Triton.

Their hand-written backward passes (`own_backward`) leave out the denominator, "as it cancels out in
the forward in the groupnorm". They are compared with a norm of each row after the output.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace, stop_gradient, upcast
from precondattn_conformance.peers.arrays import Foreign, only_self_attention
from precondattn_conformance.peers.folder import imported_from
from precondattn_conformance.peers.project import Project

MLSTM_KERNELS = Project(
    "mlstm_kernels",
    "mLSTM kernels",
    "https://github.com/NX-AI/mlstm_kernels",
    package="mlstm_kernels",
)
ALL = (MLSTM_KERNELS,)

EPS = 1.2e-38
"""The ε of the chunkwise form, in place of 0. The tokens that fill a chunk have queries of 0, for
which ε = 0 would give 0 / 0 where e^{−m} is 0 too. It is a normal number of float32, the dtype in
which the backward pass gets it."""
ALMOST_OPEN = -1e-26
"""The logarithm for a gate of 1: its value before the sigmoid is 60 instead of infinite."""
TORCH = {"library": "torch", "layout": "bhtd", "heads": "equal"}
JAX = {"library": "jax", "layout": "bhtd", "heads": "equal"}
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


def _torch(form: str, kernel: str) -> Foreign:
    return MLSTM_KERNELS.imported(f"mlstm_kernels.torch.{form}").registry[kernel]


@MLSTM_KERNELS.peer("mlstm", **TORCH)
def torch_parallel(q: Array, k: Array, v: Array, g: Array, i: Array, eps: float) -> Array:
    return _torch("parallel", "native_autograd")(q, k, v, i, before_sigmoid(g), eps=eps)


@MLSTM_KERNELS.peer(NORMALIZED, **TORCH)
def torch_parallel_own_backward(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    return _normalized(_torch("parallel", "native_custbw")(q, k, v, i, before_sigmoid(g), eps=0.0))


@MLSTM_KERNELS.peer("mlstm", **TORCH)
def torch_parallel_stable(q: Array, k: Array, v: Array, g: Array, i: Array, eps: float) -> Array:
    """Uses sums of gates, and no differences of sums."""
    return _torch("parallel", "native_stablef_autograd")(q, k, v, i, before_sigmoid(g), eps=eps)


@MLSTM_KERNELS.peer(NORMALIZED, **TORCH)
def torch_parallel_stable_own_backward(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    return _normalized(
        _torch("parallel", "native_stablef_custbw")(q, k, v, i, before_sigmoid(g), eps=0.0)
    )


@MLSTM_KERNELS.peer(WITHOUT_EPS, multiple=64, **TORCH)
def torch_chunkwise(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    return _torch("chunkwise", "native_autograd")(q, k, v, i, before_sigmoid(g), eps=EPS)


@MLSTM_KERNELS.peer(NORMALIZED, multiple=64, **TORCH)
def torch_chunkwise_own_backward(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    return _normalized(_torch("chunkwise", "native_custbw")(q, k, v, i, before_sigmoid(g), eps=EPS))


@MLSTM_KERNELS.peer(WITHOUT_EPS, **TORCH)
def torch_recurrent(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    only_self_attention(q, k, 2)
    module = MLSTM_KERNELS.imported("mlstm_kernels.torch.recurrent.native_sequence")
    run = module.mlstm_recurrent_sequence__native_fw
    return run(q, k, v, i, before_sigmoid(g), eps=0.0)


@MLSTM_KERNELS.peer("mlstm", **JAX)
def jax_parallel(q: Array, k: Array, v: Array, g: Array, i: Array, eps: float) -> Array:
    module = MLSTM_KERNELS.imported("mlstm_kernels.jax.parallel.native")
    return module.mlstm_parallel__native_autograd(q, k, v, i, before_sigmoid(g), eps=eps)


@MLSTM_KERNELS.peer(NORMALIZED, **JAX)
def jax_parallel_own_backward(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    module = MLSTM_KERNELS.imported("mlstm_kernels.jax.parallel.native")
    run = module.mlstm_parallel__native_custbw
    return _normalized(run(q, k, v, i, before_sigmoid(g), eps=0.0))


@MLSTM_KERNELS.peer(WITHOUT_EPS, multiple=64, **JAX)
def jax_chunkwise(q: Array, k: Array, v: Array, g: Array, i: Array) -> Array:
    # The package that contains this folder requires Triton.
    module = imported_from(MLSTM_KERNELS, "mlstm_kernels", "jax/chunkwise/native", "fwbw")
    return module.mlstm_chunkwise__native_autograd(q, k, v, i, before_sigmoid(g), eps=EPS)
