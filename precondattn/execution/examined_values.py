"""The checks of a checked call: the values of its inputs, by their declared patterns.

=====================  ===========================================================
an input               its values must be
=====================  ===========================================================
any                    finite; −∞ is allowed in log-decays and in a pairwise bias
with a range           inside it
with unit rows         rows of length at most 1: shorter ones are stable too
=====================  ===========================================================

If both ends of a range are positive, like that of λ in MesaNet, the range is only the usual one,
and values must be positive. Rows of padding and masked keys are not checked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from precondattn.algebra import registry
from precondattn.algebra.declaration import HEADS, Pattern, ShapeError
from precondattn.algebra.piece import Piece
from precondattn.arrays import HALF, Array, ByName, cast, dtype_name, host_array, namespace
from precondattn.backend import NotCheckedWarning
from precondattn.execution.checked import CHECKS
from precondattn.execution.input_names import declared_inputs
from precondattn.execution.preparation import times

if TYPE_CHECKING:
    from precondattn.execution.arguments import BoundCall

INF = math.inf

LONGEST = 1 + 2.0**-7
"""The largest length of a row that was scaled to length 1 and rounded to bfloat16."""


def examine(mechanism: Piece, call: BoundCall, *, is_full: bool) -> None:
    """Raise a ValueError for the first value that is not finite or out of its range."""
    if is_full and CHECKS.get():
        sizes, (_, tokens) = call.sizes, times(call.sizes)
        heads = max((sizes[letter] for letter in HEADS if letter in sizes), default=0)
        if 1 < tokens < heads:
            raise ShapeError(
                f"{mechanism}: more heads than tokens ({heads} and {tokens}), as arrays "
                f"(b, h, t, d) have; the layout here is (b, t, h, d), so exchange the axes 1 and "
                f"2; if it is meant, write checked(layout=False)"
            )
    keys = call.frame.k_valid if is_full else call.frame.valid_keys(call.sizes["t"])
    valid = {"t": call.frame.q_valid, "s": keys}
    examine_inputs(mechanism, call.inputs, valid, is_full=is_full)


def examine_inputs(
    mechanism: Piece, inputs: ByName, valid: Mapping[str, Array | None], *, is_full: bool
) -> None:
    """Check inputs by name. `valid` has masks of valid tokens by letter: "t" (b, t), "s" (b, s)."""
    for name, pattern in declared_inputs(mechanism).items():
        array = inputs[name]
        is_half = dtype_name(array) in HALF
        values = host_array(cast(array, namespace(array).float32) if is_half else array)
        masks = {x: m for x, m in valid.items() if m is not None and x in pattern.letters}
        if masks and pattern.is_pairwise and not is_full:
            continue  # Its key axis has the cache's capacity.
        hosts = {letter: host_array(mask) for letter, mask in masks.items()}
        if values is None or any(mask is None for mask in hosts.values()):
            warnings.warn(
                f"{mechanism}: checked() can not look at the values of {name}, which are traced or "
                f"of a library that does not show them; call it without jit, compile and vmap",
                NotCheckedWarning,
                stacklevel=2,
            )
            return
        for fault in _faults(mechanism, name, pattern, values):
            is_bad = fault.is_bad
            for letter, mask in hosts.items():
                shape = [1] * is_bad.ndim
                shape[0], shape[pattern.letters.index(letter)] = mask.shape
                is_bad = is_bad & mask.reshape(shape)
            if is_bad.any():
                raise ValueError(_message(str(mechanism), name, fault, is_bad))


def examine_whole(
    mechanism: Piece, inputs: ByName, is_token: np.ndarray | None, key_mask: Array | None
) -> None:
    """Check an extension before it is divided, so that errors give indices of the given tokens."""
    keys = is_token if key_mask is None else host_array(key_mask)
    if keys is None and key_mask is not None:
        keys = key_mask  # It is traced, and nothing can be examined.
    elif is_token is not None and key_mask is not None:
        keys = keys & is_token
    examine_inputs(mechanism, inputs, {"t": is_token, "s": keys}, is_full=False)


class BadValues(NamedTuple):
    """Values that differ from what is declared in one way."""

    is_bad: np.ndarray
    shown: np.ndarray
    expected: str
    instead: str
    is_of_rows: bool = False


def _faults(
    mechanism: Piece, name: str, pattern: Pattern, values: np.ndarray
) -> Iterator[BadValues]:
    may_be_minus_infinity = pattern.low == -INF or pattern.is_pairwise
    is_good = values < INF if may_be_minus_infinity else np.isfinite(values)
    padding = "if it is padding, give lengths= or key_mask="
    yield BadValues(
        ~is_good, values, "finite", f"{padding}; otherwise look at what computes {name}"
    )
    if pattern.low is not None and pattern.high is not None:
        yield _out_of_range(name, pattern, values)
    if pattern.unit:
        lengths = np.sqrt(np.sum(np.square(values.astype(np.float64)), axis=-1))
        yield BadValues(lengths > LONGEST, lengths, "at most 1", _shortened(mechanism, name), True)


def _out_of_range(name: str, pattern: Pattern, values: np.ndarray) -> BadValues:
    low, high, open_low, open_high = pattern.low, pattern.high, pattern.open_low, pattern.open_high
    assert low is not None
    assert high is not None
    if low > 0:
        low, high, open_low, open_high = 0.0, INF, True, True
    below = values <= low if open_low and low > -INF else values < low
    above = values >= high if open_high else values > high
    if low == -INF:
        expected, instead = f"at most {high:g}", "write log(x) of a decay x, or -softplus(x)"
        instead = f"{name} is the logarithm of a decay: {instead}"
    elif high == INF:
        expected = ("above" if open_low else "at least") + f" {low:g}"
        instead = "write softplus(x) or exp(x)"
    else:
        between = "above {:g} and at most {:g}" if open_low else "between {:g} and {:g}"
        expected = between.format(low, high)
        instead = f"write {'' if high == 1 else f'{high:g} * '}sigmoid(x)"
    return BadValues(below | above, values, expected, instead)


def _shortened(mechanism: Piece, name: str) -> str:
    """Code that gives the input rows of length 1."""
    divided = f"divide each row of {name} by its length"
    qk_norm: Callable[..., object] | None = registry.known("qk_norm")
    if name != "k" or qk_norm is None:
        return divided
    try:
        return f"{divided}, or write {qk_norm(mechanism, norm='l2')}"
    except (TypeError, ValueError):  # It can not be composed with this mechanism.
        return divided


def _message(owner: str, name: str, fault: BadValues, is_bad: np.ndarray) -> str:
    index = tuple(int(i) for i in np.unravel_index(np.argmax(is_bad), is_bad.shape))
    place = name + (f"[{', '.join(map(str, index))}]" if index else "")
    others, value = int(is_bad.sum()) - 1, float(np.broadcast_to(fault.shown, is_bad.shape)[index])
    what = f"a row of length {value:.4g}" if fault.is_of_rows else f"{value:.4g}"
    more = f" ({others} more)" if others else ""
    return f"{owner}: {place} is {what}, not {fault.expected}{more}; {fault.instead}"
