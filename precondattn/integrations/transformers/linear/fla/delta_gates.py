"""What the kernels of a gated delta rule do to their inputs before the recurrence, if it is asked.

    q̄ = L2(q),  k̄ = L2(k),      β = σ(b) or 2 σ(b)
    g = −e^A softplus(x + bias),    or  g = bound · σ(e^A (x + bias))  with a lower bound

x and the bias are of a token and head (gated delta rule), or of a channel too (Kimi Delta
Attention). A is of a head.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from precondattn.integrations.transformers.linear.delta_rule import unit_rows
from precondattn.layers.functions import log_decay


def delta_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> dict[str, Tensor]:
    """The inputs of the mechanism, from those of flash-linear-attention's functions.

    Raises
    ------
    ValueError
        if the gate is computed here, and has neither `A_log` nor `lower_bound`.
    """
    if use_qk_l2norm_in_kernel:
        q, k = unit_rows_of(q), unit_rows_of(k)
    if use_gate_in_kernel:
        g = _gate(g.float(), A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2 if allow_neg_eigval else 1)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def unit_rows_of(x: Tensor) -> Tensor:
    """L2(x), computed in float32 and returned in the dtype of x."""
    return unit_rows(x.float()).to(x.dtype)


def _gate(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    if A_log is None and lower_bound is None:
        raise ValueError("A_log: the logarithm of a rate for each head expected; found None")
    if dt_bias is not None:
        x = x + dt_bias.float().reshape(x.shape[2:])
    a = x.new_zeros(()) if A_log is None else A_log.float().reshape(-1, *[1] * (x.ndim - 3))
    if lower_bound is None:
        return log_decay(a, softplus(x))
    return lower_bound * (a.clamp(max=80.0).exp() * x).sigmoid()  # Finite, for its gradient.
