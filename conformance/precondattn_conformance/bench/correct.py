"""Whether a result is correct. A wrong one is not timed.

The oracle is too expensive at the measured sizes. Of a causal mechanism it computes these parts:

* outputs: the first tokens equal those of a call on them alone. The last tokens equal what the
  oracle continues in float64 from the cache that the computation filled with all tokens before;
* gradients: with a cotangent that is 0 after the first tokens, they equal those of a call on these;
* decoding: a token after a short context, and one at the measured context from the same cache.

A mechanism that is not causal is compared as a whole, or not measured. In float32 the bound of the
last tokens is twice what the definition itself loses there, where that is more than the fixed one:
LUCID's outputs are means of solved values that cancel, which amplifies rounding.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn_conformance.bench.computation import (
    OUTPUT,
    CacheDecoder,
    Computation,
    decode_run,
    gradient_of,
    token_count,
)
from precondattn_conformance.bench.paired import Run
from precondattn_conformance.inputs import CallLayout, slice_tokens
from precondattn_conformance.libraries import Library
from precondattn_conformance.oracle import inputs_of as rounded_inputs
from precondattn_conformance.oracle import rounded
from precondattn_conformance.tolerance import bound, error

KIND = "clustered"
"""The kind of keys. On i.i.d. keys LUCID is nearly softmax, which hides many bugs."""

HEAD, TAIL = 512, 32
"""The numbers of first tokens and of last tokens that are compared."""

PART = 256
"""The number of tokens with which the definition continues at once."""

LARGEST = 2**22
"""The largest batch × heads × queries × keys for which the oracle computes all tokens."""

LARGEST_NOT_CAUSAL = 2**25
"""The largest such product where a call on the first tokens alone has another result."""


class WrongResultError(AssertionError):
    """A result that differs from the oracle's."""

    def __init__(self, what: str, measured: float, limit: float) -> None:
        super().__init__(f"{what} is off by {measured:.3g}, and {limit:.1g} is allowed")
        self.error, self.bound = measured, limit


class UncheckedError(RuntimeError):
    """A result that can not be compared with the oracle."""


class Checked(NamedTuple):
    """The error, its bound, and what was compared."""

    error: float
    bound: float
    what: str


class BenchOracle(NamedTuple):
    """The rounded inputs of a measurement, and the oracle's results for the first tokens."""

    inputs: Arrays
    cotangent: np.ndarray
    """The cotangent of the output; 0 after the first tokens."""
    head: int
    """The number of first tokens."""
    results: Arrays
    """The output of the first tokens, and all gradients, by the names of a run's results."""

    @property
    def is_whole(self) -> bool:
        return bool(self.head == self.cotangent.shape[1])


@lru_cache(maxsize=4)
def inputs_of(mechanism: str, layout: CallLayout, dtype: str) -> Arrays:
    """The inputs, rounded to the dtype, in float64. Only a few are kept, as they are large."""
    return rounded_inputs.__wrapped__(mechanism, layout, KIND, dtype)


@lru_cache(maxsize=4)
def oracle(mechanism: str, layout: CallLayout, dtype: str) -> BenchOracle:
    """The oracle's results, for all tokens or, if they are too many, for the first ones.

    Raises `UncheckedError` if there are too many, and the first outputs are not those of a shorter
    call.
    """
    m = pa.parse(mechanism)
    inputs = compared = inputs_of(mechanism, layout, dtype)
    is_linear = any(isinstance(leaf, pa.WholeSequence) for leaf in m.program.leaves)
    largest = LARGEST if m.offers.causal else LARGEST_NOT_CAUSAL
    is_small = is_linear or layout.b * layout.h * layout.t * layout.s <= largest
    head = layout.t if is_small else min(layout.t, HEAD)
    if head < layout.t:
        has_pairs = any(pattern.is_pairwise for pattern in m.inputs.values())
        if has_pairs or any(leaf.reads_all_queries for leaf in m.program.leaves):
            raise UncheckedError(
                f"{m} at t={layout.t} can not be compared with the oracle: the output of the first "
                f"tokens is not that of a shorter call"
            )
        if m.offers.causal:
            compared = slice_tokens(m, inputs, 0, head)
        else:  # Fewer queries, of all keys.
            compared = {**inputs, "q": inputs["q"][:, :head]}
    out, pullback = m.vjp(**compared, backend="reference")
    cotangent = rounded(np.random.default_rng(1).normal(size=out.shape), dtype)
    results: Arrays = {OUTPUT: out}
    for name, gradient in pullback(cotangent).items():
        later = np.subtract(inputs[name].shape, gradient.shape)
        results[gradient_of(name)] = np.pad(gradient, [(0, size) for size in later])
    cotangent = np.pad(cotangent, [(0, 0), (0, layout.t - head), (0, 0), (0, 0)])
    return BenchOracle(inputs, cotangent, head, results)


def check(
    computation: Computation, expected: BenchOracle, library: Library, dtype: str, results: Arrays
) -> Checked:
    """The output of a run, and its gradients if it has any. Raises `WrongResultError`.

    Without gradients the output of the last tokens is compared too.
    """
    limit, out = bound(dtype, KIND), library.numpy(results[OUTPUT])
    if out.shape != expected.cotangent.shape:
        raise WrongResultError(f"{OUTPUT}, of shape {out.shape},", np.inf, limit)
    if not np.all(np.isfinite(out)):
        raise WrongResultError(f"{OUTPUT}, which is not finite,", np.inf, limit)
    worst = _compare(OUTPUT, out[:, : expected.head], expected.results[OUTPUT], limit)
    gradients = [name for name in expected.results if name != OUTPUT] if len(results) > 1 else []
    for name in gradients:
        array = library.numpy(results[name])
        worst = max(worst, _compare(name, array, expected.results[name], limit))
    what = "all tokens" if expected.is_whole else f"the first {expected.head} tokens"
    last = None
    if not expected.is_whole and not gradients:
        last = _last_tokens(computation, expected.inputs, library, dtype)
    if last is None:
        return Checked(worst, limit, what)
    if dtype == "float32" and limit < error(out[:, -TAIL:], last):
        limit = max(limit, 2 * lost_by_definition(computation.mechanism, expected.inputs, dtype))
    tail = _compare("the output of the last tokens", out[:, -TAIL:], last, limit)
    return Checked(max(worst, tail), limit, f"{what} and the last {TAIL}")


def lost_by_definition(m: pa.Mechanism, inputs: Arrays, dtype: str) -> float:
    """The error of the reference in a dtype, at the last tokens, beside itself in float64.

    It continues a cache in NumPy.
    """
    stop = token_count(m, inputs)
    bounds = [*range(0, stop - TAIL, PART), stop - TAIL, stop]

    def last(dtype: str) -> np.ndarray:
        x = {name: array.astype(dtype) for name, array in inputs.items()}
        out, cache = None, m.init_cache(**x, capacity=stop)
        for start, end in pairwise(bounds):
            new = slice_tokens(m, x, start, end)
            out, cache = m.extend(cache, **new, backend="reference", donate=True)
        return np.asarray(out, dtype="float64")

    return error(last(dtype), last("float64"))


def _last_tokens(
    computation: Computation, inputs: Arrays, library: Library, dtype: str
) -> np.ndarray | None:
    """The oracle's output for the last tokens, from the computation's own cache of the others.

    None if it has no cache, or one that the reference would have to fill.
    """
    m, tokens = computation.mechanism, token_count(computation.mechanism, inputs)
    if computation.decoder is None or not m.program.slots or not m.offers.causal:
        return None
    if computation.name == "sdpa":
        return np.asarray(m(**inputs | {"q": inputs["q"][:, -TAIL:]}, backend="reference"))
    decoder = computation.decoder(library, dtype, slice_tokens(m, inputs, 0, tokens - TAIL + 1))
    if decoder.is_by_the_reference:
        return None
    decoder.fill()
    store = {}
    for name, array in decoder.cache.store.items():
        # A buffer with a slot for each token gets slots for the last ones.
        letters = m.program.slots[name][1].letters
        padding = [(0, TAIL if letter == "c" else 0) for letter in letters]
        store[name] = np.pad(library.numpy(array), padding)
    new = slice_tokens(m, inputs, tokens - TAIL, tokens)
    return decoder.continued(store, new)


def check_decode(
    computation: Computation, layout: CallLayout, decoder: CacheDecoder, run: Run
) -> Checked:
    """One token after a short context, and after the measured one. Raises `WrongResultError`."""
    m, library, dtype = computation.mechanism, decoder.library, decoder.dtype
    limit, short, long = bound(dtype, KIND), min(layout.t, 256) - 1, layout.t - 1
    inputs = inputs_of(str(m), layout._replace(t=short + 1, s=short + 1), dtype)
    assert computation.decoder is not None  # The caller has checked it.
    brief = computation.decoder(library, dtype, inputs)
    brief.fill()
    brief_run = decode_run(library, brief)
    whole = np.asarray(m(**inputs, backend="reference"))[:, -1:]
    worst = 0.0
    for of, tokens, expected in ((brief_run, short, whole), (run, long, decoder.oracle_step())):
        of.reset()
        out = library.numpy(of.call()[OUTPUT])
        worst = max(worst, _compare(f"the token after {tokens} others", out, expected, limit))
    return Checked(worst, limit, f"one token after {short} and {long}")


def _compare(what: str, result: np.ndarray, expected: np.ndarray, limit: float) -> float:
    """The error. Raises `WrongResultError`."""
    if result.shape != expected.shape:
        raise WrongResultError(f"{what}, of shape {result.shape},", np.inf, limit)
    measured = error(result, expected)
    if not measured <= limit:
        raise WrongResultError(what, measured, limit)
    return measured
