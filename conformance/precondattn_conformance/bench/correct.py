"""Whether a result is right. A wrong one gets no time.

The oracle is quadratic in memory, or goes token by token, so at the sizes that are measured it is
often out of reach. A causal mechanism is held to it at these sizes all the same:

* outputs: the first tokens of the very output that is timed are those of a call on these tokens
  alone; and the last ones are what the oracle makes of them in float64, behind the cache that the
  computation leaves of all tokens before;
* gradients: with a cotangent that is 0 behind the first tokens, those of the first tokens are those
  of a call on them alone, and all others are 0;
* decoding: the whole of a short context against the oracle, and one token at the measured context
  against the oracle behind the same cache.

What is not causal is compared whole, or not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

import precondattn as pa
from precondattn.cache import Cache
from precondattn_conformance.bench.computation import (
    Computation,
    Run,
    token_count,
)
from precondattn_conformance.declared import is_bounded
from precondattn_conformance.inputs import Arrays, Layout, make_inputs, slice_tokens
from precondattn_conformance.libraries import Library
from precondattn_conformance.tolerance import bound, error

KIND = "clustered"
"""On i.i.d. keys LUCID is nearly softmax, and many a mistake hides."""

HEAD = 512
"""How many first tokens are compared."""

TAIL = 32
"""How many last tokens are compared."""

LARGEST = 2**22
"""Batch × heads × queries × keys up to which the oracle is asked for everything."""


class WrongResultError(AssertionError):
    """A result that is not the oracle's."""

    def __init__(self, what: str, seen: float, limit: float) -> None:
        super().__init__(f"{what} is off by {seen:.3g}, and {limit:.1g} is allowed")
        self.error, self.bound = seen, limit


class UncheckedError(RuntimeError):
    """A result that nothing here can hold to the oracle."""


@dataclass(frozen=True)
class Checked:
    """How far from the oracle, how far it may be, and what was compared."""

    error: float
    bound: float
    what: str


@dataclass(frozen=True)
class Oracle:
    """The inputs of a measurement as rounded, and the oracle's answer for the first tokens."""

    inputs: Arrays
    cotangent: np.ndarray
    """Of the output, 0 behind the first tokens."""
    head: int
    """How many these are."""
    out: np.ndarray
    gradients: Arrays

    @property
    def is_whole(self) -> bool:
        return self.head == self.cotangent.shape[1]


@lru_cache(maxsize=4)
def inputs_of(mechanism: str, layout: Layout, dtype: str, library: str) -> Arrays:
    """The inputs, rounded to the dtype as the library does it, in float64."""
    m = pa.parse(mechanism)
    made = make_inputs(m, layout, KIND)
    if not is_bounded(m) and "k" in made:
        made["k"] = 0.5 * made["k"]
    return {name: _rounded(array, dtype, library) for name, array in made.items()}


def _rounded(array: np.ndarray, dtype: str, library: str) -> np.ndarray:
    if dtype != "bfloat16":
        return array.astype(dtype).astype(np.float64)
    from precondattn_conformance import libraries

    wide = libraries.named(library)
    return wide.numpy(wide.array(array, dtype))


@lru_cache(maxsize=4)
def oracle(mechanism: str, layout: Layout, dtype: str, library: str) -> Oracle:
    """The oracle's answer, for as many tokens as can be asked of it.

    Raises
    ------
    UncheckedError
        where that is not all of them, and the first ones say nothing about a longer call.
    """
    m = pa.parse(mechanism)
    inputs = inputs_of(mechanism, layout, dtype, library)
    head = min(layout.t, HEAD)
    if layout.b * layout.h * layout.t * layout.s <= LARGEST:
        head = layout.t
    has_pairs = any(pattern.is_pairwise for pattern in m.inputs.values())
    if head < layout.t and (has_pairs or not m.offers.causal):
        raise UncheckedError(
            f"{m} at t={layout.t} can not be held to the oracle: the output of the first tokens "
            f"is not that of a shorter call"
        )
    first = inputs if head == layout.t else slice_tokens(m, inputs, 0, head)
    out, pullback = m.vjp(**first, backend="reference")
    cotangent = _rounded(np.random.default_rng(1).normal(size=out.shape), dtype, library)
    gradients = pullback(cotangent)
    rest = [(0, 0), (0, layout.t - head), (0, 0), (0, 0)]
    for name, gradient in gradients.items():
        axis = m.inputs[name].time_axis
        if axis is not None and gradient.shape != inputs[name].shape:
            padding = [(0, 0)] * gradient.ndim
            padding[axis] = (0, inputs[name].shape[axis] - gradient.shape[axis])
            gradients[name] = np.pad(gradient, padding)
    return Oracle(inputs, np.pad(cotangent, rest), head, out, gradients)


def check_forward(
    of: Computation, expected: Oracle, library: Library, dtype: str, results: Arrays
) -> Checked:
    """The output of a forward run. Raises `WrongResultError`."""
    out = library.numpy(results["the output"])
    limit = bound(dtype, KIND)
    total = expected.cotangent.shape[1]
    if out.shape != expected.cotangent.shape:
        raise WrongResultError(f"the output, of shape {out.shape},", np.inf, limit)
    if not np.all(np.isfinite(out)):
        raise WrongResultError("the output, which is not finite,", np.inf, limit)
    worst = _compare("the output", out[:, : expected.head], expected.out, limit)
    if expected.is_whole:
        return Checked(worst, limit, "all tokens")
    last = _last_tokens(of, expected.inputs, library, dtype)
    if last is None:
        return Checked(worst, limit, f"the first {expected.head} tokens")
    tail = _compare("the output of the last tokens", out[:, total - TAIL :], last, limit)
    return Checked(max(worst, tail), limit, f"the first {expected.head} tokens and the last {TAIL}")


def _last_tokens(
    of: Computation, inputs: Arrays, library: Library, dtype: str
) -> np.ndarray | None:
    """The oracle's output for the last tokens, behind the computation's own cache of the others.

    None where it has no cache, or one that the reference would have to fill.
    """
    m = of.mechanism
    tokens = token_count(m, inputs)
    if of.decoder is None or not m.program.slots:
        return None
    if of.name == "sdpa":
        rounded = {**inputs, "q": inputs["q"][:, -TAIL:]}
        return np.asarray(m(**rounded, backend="reference"))
    before = slice_tokens(m, inputs, 0, tokens - TAIL + 1)
    decoder: Any = of.decoder(library, dtype, before)
    if decoder.is_by_the_reference:
        return None
    decoder.fill()
    new = slice_tokens(m, inputs, tokens - TAIL, tokens)
    store = {}
    for name, array in decoder.cache.store.items():
        axis = m.program.slots[name][1].letters.find("c")
        store[name] = _with_room(library.numpy(array), axis)
    cache = Cache(decoder.length.copy(), store)
    return np.asarray(m.extend(cache, **new, backend="reference")[0])


def _with_room(buffer: np.ndarray, axis: int) -> np.ndarray:
    """A buffer whose capacity, if it has one, has a place for the last tokens."""
    if axis < 0:
        return buffer
    padding = [(0, 0)] * buffer.ndim
    padding[axis] = (0, TAIL)
    return np.pad(buffer, padding)


def check_backward(expected: Oracle, library: Library, dtype: str, results: Arrays) -> Checked:
    """Output and gradients under the oracle's cotangent. Raises `WrongResultError`."""
    limit = bound(dtype, KIND)
    out = library.numpy(results["the output"])
    worst = _compare("the output", out[:, : expected.head], expected.out, limit)
    for name, wanted in expected.gradients.items():
        what = f"the gradient of {name}"
        worst = max(worst, _compare(what, library.numpy(results[what]), wanted, limit))
    what = "all tokens" if expected.is_whole else f"the first {expected.head} tokens"
    return Checked(worst, limit, what)


def check_decode(
    of: Computation, layout: Layout, library: Library, dtype: str, decoder: Any, run: Run
) -> Checked:
    """One token at a short context, and at the measured one. Raises `WrongResultError`."""
    limit = bound(dtype, KIND)
    m = of.mechanism
    short = layout._replace(t=min(layout.t, 256), s=min(layout.t, 256))
    inputs = inputs_of(str(m), short, dtype, library.name)
    assert of.decoder is not None  # Who has none was not asked.
    brief = of.decoder(library, dtype, inputs)
    brief.fill()
    brief.reset()
    whole = np.asarray(m(**inputs, backend="reference"))
    what = f"the token behind {short.t - 1} others"
    worst = _compare(what, library.numpy(brief.step()), whole[:, -1:], limit)
    wanted = decoder.oracle_step()
    run.reset()
    found = library.numpy(run.call()["the output"])
    worst = max(worst, _compare(f"the token behind {layout.t - 1} others", found, wanted, limit))
    return Checked(worst, limit, f"one token behind {short.t - 1} and {layout.t - 1}")


def _compare(what: str, found: np.ndarray, expected: np.ndarray, limit: float) -> float:
    """The error, or `WrongResultError`."""
    if found.shape != expected.shape:
        raise WrongResultError(f"{what}, of shape {found.shape},", np.inf, limit)
    seen = error(found, expected)
    if not seen <= limit:
        raise WrongResultError(what, seen, limit)
    return seen
