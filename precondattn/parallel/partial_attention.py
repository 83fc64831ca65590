"""Attention to some of the keys, with the log-sum-exp of its scores, and the merge of such parts.

    λ_i = log Σ_j e^{S_ij},    o = A v,

and for parts 1 … m, each with some of the keys,

    λ = log Σ_m e^{λ_m},    o = Σ_m e^{λ_m − λ} o_m.

λ is computed together with the output, as one more channel (`spec/read.py`), in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from precondattn.algebra.call import Call
from precondattn.arrays import Array, Arrays, cast, namespace, upcast, upcast_all
from precondattn.frameworks import of
from precondattn.given import Arguments, Given
from precondattn.spec.array_functions import finite_or_zero, log_sum_exp
from precondattn.spec.read import MEAN, MEAN_AND_LOG_SUM
from precondattn.spec.softmax import SoftmaxAttention

FULL_CALL = ("segment_ids", "cu_seqlens", "lengths", "key_mask", "prefix", "attn_mask")
"""The masks of a full call"""


def with_lse(mechanism: SoftmaxAttention, *arrays: Array, **named: Given) -> tuple[Array, Array]:
    """The output (b, t, h, e) and the log-sum-exp (b, t, h) of each query's scores.

    Both are differentiable in PyTorch and JAX. The log-sum-exp is taken over the scaled, capped,
    biased and masked scores, and the sink if there is one. A query that sees no key and has no sink
    has the log-sum-exp −∞ and the output 0. For a query of padding both are 0.

    Parameters
    ----------
    mechanism : Softmax or Path
        A mechanism with its default `read`.
    *arrays, **named
        The arguments of a call of the mechanism, including masks and `backend`.

    Returns
    -------
    tuple
        The output in v's dtype, and the log-sum-exp in float32, or in float64 for float64 inputs.
        Half precision is computed in float32, also under autocast.

    Raises
    ------
    TypeError, ValueError
        for another mechanism, and for everything that a call raises an error for.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 6, 2, 4))
    >>> full = pa.Softmax(causal=False)
    >>> parts = [pa.with_lse(full, q, k[:, i:j], v[:, i:j]) for i, j in ((0, 2), (2, 6))]
    >>> out, lse = pa.merge(*zip(*parts))
    >>> bool(np.allclose(out, full(q, k, v)))
    True
    """
    call = _CallWithLse(mechanism, arrays, named)
    with call.without_autocast():
        return call.split(call.mechanism(**call.inputs, **call.others))


def with_lse_vjp(
    mechanism: SoftmaxAttention, *arrays: Array, **named: Given
) -> tuple[tuple[Array, Array], Callable[[Array, Array], Arrays]]:
    """The results of `with_lse`, and the pullback that maps their cotangents to gradients.

    The pullback returns a dict of gradients by input name. This works on every array library. As in
    `vjp`, the results may be written to, and the inputs must not change before the pullback runs.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4))
    >>> (out, lse), pullback = pa.with_lse_vjp(pa.Softmax(), q, k, v)
    >>> sorted(pullback(np.zeros_like(out), np.ones_like(lse)))
    ['k', 'q', 'v']
    """
    call = _CallWithLse(mechanism, arrays, named)
    with call.without_autocast():
        packed, pull = call.mechanism.vjp(**call.inputs, **call.others)
    out, lse = call.split(packed)

    def pullback(d_out: Array, d_lse: Array) -> Arrays:
        for name, cotangent, result in (("d_out", d_out, out), ("d_lse", d_lse, lse)):
            if tuple(cotangent.shape) != tuple(result.shape):
                raise ValueError(
                    f"{mechanism}: {name} must have the shape {tuple(result.shape)}; "
                    f"found {tuple(cotangent.shape)}"
                )
        xp = namespace(packed)
        cotangents = [cast(a, packed.dtype) for a in (d_out, d_lse[..., None])]
        gradients = pull(xp.concat(cotangents, axis=-1))
        gradients["v"] = gradients["v"][..., :-1]
        return {name: cast(d, call.dtypes[name]) for name, d in gradients.items()}

    return (out, lse), pullback


def part_vjp(
    mechanism: SoftmaxAttention,
    inputs: Mapping[str, Array],
    out: Array,
    lse: Array,
    d_out: Array,
    **others: Given,
) -> Arrays:
    """The gradients of attention to some of the keys, from output and log-sum-exp over all keys.

        W = e^{S − λ},    dS = W ∘ (do vᵀ − do·o),    dv = Wᵀ do

    where o and λ are the output and the log-sum-exp over all keys. No forward pass of the part is
    needed if the backend defines `residuals_from_lse`. Other values of o and λ may be given: o = 0
    and a constant λ give the gradients of e^{S − λ} v, attention without normalisation. λ must be ∞
    for a query that sees none of the keys.

    Parameters
    ----------
    mechanism : Softmax
        A mechanism with its default `read` and without a sink.
    inputs : mapping
        The inputs by name, in float32 or wider: q (b, t, h, d), and k and v of the part.
    out, lse, d_out : arrays (b, t, h, e), (b, t, h), (b, t, h, e)
        The output o, the log-sum-exp λ, and the cotangent do of the output.
    **others
        Masks and `backend`.

    Returns
    -------
    dict
        The gradients by input name.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, d_out = rng.normal(size=(4, 1, 6, 2, 4))
    >>> full = pa.Softmax(causal=False)
    >>> out, lse = pa.with_lse(full, q, k, v)
    >>> part = part_vjp(full, {"q": q, "k": k[:, :2], "v": v[:, :2]}, out, lse, d_out)
    >>> bool(np.allclose(part["k"], full.vjp(q, k, v)[1](d_out)["k"][:, :2]))
    True
    """
    from precondattn.execution.run import gradients_from_lse  # Imported at the first call.

    masks = {name: others.get(name) for name in FULL_CALL}
    call = Call("vjp", mechanism, (), dict(inputs), masks, others.get("backend"))
    gradients = gradients_from_lse(call, out, lse, d_out)
    if gradients is not None:
        return gradients
    (of_part, lse_of_part), pull = with_lse_vjp(mechanism, **inputs, **others)
    d_part = namespace(out).exp(lse_of_part - lse)[..., None] * d_out
    return pull(d_part, namespace(out).sum(d_part * (of_part - out), axis=-1))


class _CallWithLse:
    """A call of a mechanism whose values have one more channel for the log-sum-exp."""

    def __init__(
        self, mechanism: SoftmaxAttention, arrays: tuple[Array, ...], named: Arguments
    ) -> None:
        if not isinstance(mechanism, SoftmaxAttention) or mechanism.read != MEAN:
            raise TypeError(
                f"with_lse: the mechanism must be a Softmax or Path that reads a mean of its "
                f"values; found {mechanism}"
            )
        from precondattn.execution.arguments import check_call  # Imported at the first call.
        from precondattn.execution.input_names import CALL_OPTIONS

        self.others = {name: named[name] for name in CALL_OPTIONS if name in named}
        by_name = {name: array for name, array in named.items() if name not in self.others}
        self.like = next(iter((*arrays, *by_name.values())), None)
        with self.without_autocast():
            check_call(mechanism, arrays, by_name, self.others)  # These are the unpadded shapes.
        inputs = {**dict(zip(mechanism.inputs, arrays, strict=False)), **by_name}
        self.dtypes = {name: array.dtype for name, array in inputs.items()}
        self.inputs = upcast_all(inputs)
        v = self.inputs["v"]
        self.inputs["v"] = namespace(v).concat([v, namespace(v).zeros_like(v[..., :1])], axis=-1)
        self.mechanism = mechanism.with_read(MEAN_AND_LOG_SUM)

    def without_autocast(self) -> AbstractContextManager[object]:
        return of(self.like).without_autocast(self.like)

    def split(self, packed: Array) -> tuple[Array, Array]:
        """The output, in the dtype of the values, and the log-sum-exp."""
        return cast(packed[..., :-1], self.dtypes["v"]), packed[..., -1]


def merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """The attention to all keys, merged from the attention to parts of them.

    It is differentiable in PyTorch and JAX. A sink must be included in exactly one part.

    Parameters
    ----------
    outs : sequence of arrays (b, t, h, e)
        The output of each part.
    lses : sequence of arrays (b, t, h)
        The log-sum-exp of each part; −∞ for a query that sees no key of the part.

    Returns
    -------
    tuple
        Output (b, t, h, e) and log-sum-exp (b, t, h) over all keys, in the parts' dtypes.

    Raises
    ------
    ValueError
        if there are no parts, if outputs and log-sum-exps differ in number, or if shapes differ.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> outs = np.ones((1, 1, 1, 2)), np.zeros((1, 1, 1, 2))
    >>> out, lse = pa.merge(outs, [np.zeros((1, 1, 1))] * 2)
    >>> out.ravel(), lse.ravel().round(3)
    (array([0.5, 0.5]), array([0.693]))
    """
    outs, lses = tuple(outs), tuple(lses)
    _check_parts(outs, lses)
    xp = namespace(*outs)
    logs = xp.stack([upcast(lse) for lse in lses], axis=-1)
    total = log_sum_exp(logs, axis=-1)
    weights = xp.exp(logs - finite_or_zero(total))
    parts = [weights[..., i : i + 1] * upcast(out) for i, out in enumerate(outs)]
    merged = sum(parts[1:], start=parts[0])
    return cast(merged, outs[0].dtype), cast(total[..., 0], lses[0].dtype)


def _check_parts(outs: tuple[Array, ...], lses: tuple[Array, ...]) -> None:
    from precondattn.execution.array_checks import check_stored

    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge: there must be as many outs as lses, at least one; found {len(outs)} outs and "
            f"{len(lses)} lses"
        )
    check_stored("merge: outs[0]", outs[0])
    shape = tuple(outs[0].shape)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, found, expected in (("outs", out, shape), ("lses", lse, shape[:-1])):
            check_stored(f"merge: {name}[{i}]", found)
            if tuple(found.shape) != expected:
                raise ValueError(
                    f"merge: {name}[{i}] must have the shape {expected}, like outs[0]; found "
                    f"{tuple(found.shape)}"
                )
