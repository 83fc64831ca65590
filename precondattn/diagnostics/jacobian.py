"""The norm of the Jacobian of an output, such as ∂o_t / ∂q and ∂o_t / ∂k.

    ‖∂o_t / ∂x‖² = Σ_c ‖∂o_tc / ∂x‖²

A small norm means that queries or keys hardly learn from the output, for example if softmax is
sharp (LUCID, §3.1 and A.1; LASER, §3). Each ∂o_tc / ∂x is the pullback of a basis vector by the
mechanism's `vjp`, so that the norm is exact for any mechanism, composition and input.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Array, Arrays, arange_like, cast, namespace, stop_gradient
from precondattn.diagnostics.checks import examined_inputs
from precondattn.given import whole_number


def jacobian_norms(
    mechanism: Mechanism,
    *arrays: Array,
    of: Sequence[str] = ("q", "k"),
    tokens: Sequence[int] | None = None,
    **named: Any,
) -> Arrays:
    """The Frobenius norm of the Jacobian of each output row with respect to whole inputs.

    Parameters
    ----------
    mechanism : Mechanism
        Any mechanism; it need not be linear in its values.
    *arrays, **named
        The arguments of its call, including masks and `backend`.
    of : sequence of str
        The names of inputs with a batch axis. The derivative is with respect to all tokens, heads
        and channels of an input.
    tokens : sequence of int, optional
        The indices of output tokens, from 0 to t − 1; all by default.

    Returns
    -------
    dict of arrays (b, number of tokens, h)
        The norms by the names in `of`, in float32 for inputs in half precision, and without a
        gradient. Every chosen token, head and channel of the output needs a pullback, so that only
        small arrays are practical.

    Raises
    ------
    TypeError
        for traced arrays, and for arguments that the call refuses.
    ValueError
        for arguments that the call refuses; if `of` or `tokens` are not as described; for several
        sequences if the output of one depends on the others.

    Examples
    --------
    A query that attends more and more sharply to one of two keys:

    >>> import numpy as np, precondattn as pa
    >>> k, v = np.eye(2).reshape(1, 2, 1, 2), np.asarray([1.0, 0]).reshape(1, 2, 1, 1)
    >>> for sharp in (0, 4, 12):
    ...     q = np.asarray([[0.0, 0], [0, sharp]]).reshape(1, 2, 1, 2)
    ...     norms = (
    ...         pa.diagnostics.jacobian_norms(attn, q, k, v, of=("q",), tokens=(1,))["q"].item()
    ...         for attn in (pa.Softmax(scale=1.0), pa.Laser(pa.Softmax(scale=1.0)))
    ...     )
    ...     print("softmax {:.0e}, LASER {:.0e}".format(*norms))
    softmax 4e-01, LASER 3e-01
    softmax 2e-02, LASER 4e-02
    softmax 9e-06, LASER 1e-05
    """
    inputs, options = examined_inputs("jacobian_norms", mechanism, arrays, named)
    inputs = {name: stop_gradient(array) for name, array in inputs.items()}
    _check_names(mechanism, of)
    if mechanism.mixes_sequences and next(iter(inputs.values())).shape[0] > 1:
        raise ValueError(
            f"{mechanism}: the output of a sequence depends on the others of the batch; give one"
        )
    out, pullback = mechanism.vjp(**inputs, **options)
    xp, (b, t, h, *channels) = namespace(out), out.shape
    e = prod(channels)
    chosen = _checked(tokens, t)
    number = xp.reshape(arange_like(t * h * e, out), (1, t, h, *channels))
    squares: dict[str, list[Array]] = {name: [] for name in of}
    for token in chosen:
        for place in range(token * h * e, (token + 1) * h * e):
            row = xp.broadcast_to(cast(number == place, out.dtype), out.shape)
            gradients = pullback(row + xp.zeros_like(out))
            for name, found in squares.items():
                flat = xp.reshape(gradients[name], (b, prod(gradients[name].shape[1:])))
                found.append(xp.sum(flat * flat, axis=1))
    shape = (len(chosen), h, e, b)
    norms = {
        name: xp.sqrt(xp.sum(xp.reshape(xp.stack(found), shape), axis=2))
        for name, found in squares.items()
    }
    return {name: xp.permute_dims(norm, (2, 0, 1)) for name, norm in norms.items()}


def _check_names(mechanism: Mechanism, of: Sequence[str]) -> None:
    batched = [name for name, axes in mechanism.inputs.items() if axes.letters[:1] == "b"]
    if isinstance(of, str) or not of or not set(of) <= set(batched):
        raise ValueError(
            f"of must be names of inputs of {mechanism} with a batch axis, among "
            f"{', '.join(batched)}; found {of!r}"
        )


def _checked(tokens: Sequence[int] | None, t: int) -> list[int]:
    """The chosen tokens, after a check that they are from 0 to t − 1."""
    numbers = range(t) if tokens is None else tokens
    chosen = [-1 if (n := whole_number(x)) is None else n for x in numbers]
    if not chosen or not all(0 <= x < t for x in chosen):
        raise ValueError(
            f"tokens must be whole numbers from 0 to t - 1 = {t - 1}; found {tokens!r}"
        )
    return chosen
