"""Whether a result is correct. A wrong one is not timed.

The oracle often needs quadratic memory, or runs token by token, so that it is too expensive at the
measured sizes. A causal mechanism is compared with it at these sizes as follows:

* outputs: the outputs of the first tokens equal those of a call on these tokens alone. The outputs
  of the last tokens are compared with the oracle in float64, which continues from the cache that
  the computation filled with all tokens before;
* gradients: with a cotangent that is 0 after the first tokens, the gradients of the first tokens
  equal those of a call on them alone, and all others are 0;
* decoding: a short context is compared with the oracle as a whole, and one token at the measured
  context with the oracle's step from the same cache.

A mechanism that is not causal is compared as a whole, or not measured.

In float32 the bound of the last tokens is twice what the definition itself loses there, where that
is more than the fixed number: LUCID's outputs are means of solved values that cancel, which in tens
of thousands of tokens amplifies rounding beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import HEADS
from precondattn.arrays import Arrays
from precondattn.cache import Cache
from precondattn_conformance.bench.computation import (
    CacheDecoder,
    Computation,
    TokenDecoder,
    decode_run,
    token_count,
)
from precondattn_conformance.bench.paired import Run
from precondattn_conformance.harmless_keys import with_harmless_keys
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from precondattn_conformance.libraries import Library
from precondattn_conformance.tolerance import bound, error

KIND = "clustered"
"""The kind of keys. On i.i.d. keys LUCID is nearly softmax, which hides many bugs."""

HEAD = 512
"""The number of first tokens that are compared."""

TAIL = 32
"""The number of last tokens that are compared."""

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


@dataclass(frozen=True)
class Checked:
    """The error, its bound, and what was compared."""

    error: float
    bound: float
    what: str


@dataclass(frozen=True)
class BenchOracle:
    """The rounded inputs of a measurement, and the oracle's results for the first tokens."""

    inputs: Arrays
    cotangent: np.ndarray
    """The cotangent of the output; 0 after the first tokens."""
    head: int
    """The number of first tokens."""
    out: np.ndarray
    gradients: Arrays

    @property
    def is_whole(self) -> bool:
        return bool(self.head == self.cotangent.shape[1])


@lru_cache(maxsize=4)
def inputs_of(mechanism: str, layout: CallLayout, dtype: str, library: str) -> Arrays:
    """The inputs, rounded to the dtype as the library does it, in float64."""
    m = pa.parse(mechanism)
    arrays = with_harmless_keys(m, make_inputs(m, layout, KIND))
    return {name: _rounded(array, dtype, library) for name, array in arrays.items()}


def _rounded(array: np.ndarray, dtype: str, library: str) -> np.ndarray:
    if dtype != "bfloat16":
        return array.astype(dtype).astype(np.float64)
    from precondattn_conformance import libraries

    of_library = libraries.named(library)
    return of_library.numpy(of_library.array(array, dtype))


@lru_cache(maxsize=4)
def oracle(mechanism: str, layout: CallLayout, dtype: str, library: str) -> BenchOracle:
    """The oracle's results, for all tokens or, if they are too many, for the first ones.

    Raises
    ------
    UncheckedError
        if there are too many tokens, and the first outputs are not those of a shorter call.
    """
    m = pa.parse(mechanism)
    inputs = inputs_of(mechanism, layout, dtype, library)
    head = min(layout.t, HEAD)
    is_linear = any(isinstance(leaf, pa.WholeSequence) for leaf in m.program.leaves)
    largest = LARGEST if m.offers.causal else LARGEST_NOT_CAUSAL
    if is_linear or layout.b * layout.h * layout.t * layout.s <= largest:
        head = layout.t
    has_pairs = any(pattern.is_pairwise for pattern in m.inputs.values())
    is_of_all = any(leaf.reads_all_queries for leaf in m.program.leaves)
    if head < layout.t and (has_pairs or is_of_all):
        raise UncheckedError(
            f"{m} at t={layout.t} can not be compared with the oracle: the output of the first "
            f"tokens is not that of a shorter call"
        )
    if head == layout.t:
        first = inputs
    elif m.offers.causal:
        first = slice_tokens(m, inputs, 0, head)
    else:  # Fewer queries, of all keys.
        first = {**inputs, "q": inputs["q"][:, :head]}
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
    return BenchOracle(inputs, np.pad(cotangent, rest), head, out, gradients)


def check_forward(
    computation: Computation, expected: BenchOracle, library: Library, dtype: str, results: Arrays
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
    last = _last_tokens(computation, expected.inputs, library, dtype)
    if last is None:
        return Checked(worst, limit, f"the first {expected.head} tokens")
    what, result = "the output of the last tokens", out[:, total - TAIL :]
    of_tail = error(result, last)
    if dtype == "float32" and limit < of_tail:
        limit = max(limit, 2 * lost_by_definition(computation.mechanism, expected.inputs, dtype))
    tail = _compare(what, result, last, limit)
    return Checked(max(worst, tail), limit, f"the first {expected.head} tokens and the last {TAIL}")


def lost_by_definition(m: pa.Mechanism, inputs: Arrays, dtype: str) -> float:
    """The error of the reference in a dtype, at the last tokens, beside itself in float64.

    It continues a cache in NumPy. Heads lose alike, so it does so for the first key/value head of
    the first sequence; for all of them where a head depends on its number.
    """
    if not m.numbers_heads:
        inputs = _of_first_head(m, inputs)
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


def _of_first_head(m: pa.Mechanism, inputs: Arrays) -> Arrays:
    """The inputs of the first sequence, and of its first key/value head."""
    sizes = m.inputs.sizes(str(m), {name: array.shape for name, array in inputs.items()})
    heads = next((sizes[letter] for letter in HEADS if letter in sizes), 1)
    kept = {letter: sizes[letter] // heads for letter in HEADS if letter in sizes} | {"b": 1}
    return {
        name: array[
            tuple(
                slice(None if size == 1 else kept.get(axis.letter))
                for axis, size in zip(m.inputs[name].axes, array.shape, strict=True)
            )
        ]
        for name, array in inputs.items()
    }


def _last_tokens(
    computation: Computation, inputs: Arrays, library: Library, dtype: str
) -> np.ndarray | None:
    """The oracle's output for the last tokens, from the computation's own cache of the others.

    None if it has no cache, or one that the reference would have to fill.
    """
    m = computation.mechanism
    tokens = token_count(m, inputs)
    if computation.decoder is None or not m.program.slots or not m.offers.causal:
        return None
    if computation.name == "sdpa":
        rounded = {**inputs, "q": inputs["q"][:, -TAIL:]}
        return np.asarray(m(**rounded, backend="reference"))
    before = slice_tokens(m, inputs, 0, tokens - TAIL + 1)
    decoder = computation.decoder(library, dtype, before)
    assert isinstance(decoder, CacheDecoder)
    if decoder.is_by_the_reference:
        return None
    decoder.fill()
    new = slice_tokens(m, inputs, tokens - TAIL, tokens)
    store = {}
    for name, array in decoder.cache.store.items():
        axis = m.program.slots[name][1].letters.find("c")
        store[name] = _with_capacity(library.numpy(array), axis)
    cache = Cache(decoder.length.copy(), store)
    return np.asarray(m.extend(cache, **new, backend="reference")[0])


def _with_capacity(buffer: np.ndarray, axis: int) -> np.ndarray:
    """A buffer whose capacity axis, if it has one, has slots for the last tokens."""
    if axis < 0:
        return buffer
    padding = [(0, 0)] * buffer.ndim
    padding[axis] = (0, TAIL)
    return np.pad(buffer, padding)


def check_backward(expected: BenchOracle, library: Library, dtype: str, results: Arrays) -> Checked:
    """The output and the gradients at the oracle's cotangent. Raises `WrongResultError`."""
    limit = bound(dtype, KIND)
    out = library.numpy(results["the output"])
    worst = _compare("the output", out[:, : expected.head], expected.out, limit)
    for name, wanted in expected.gradients.items():
        what = f"the gradient of {name}"
        worst = max(worst, _compare(what, library.numpy(results[what]), wanted, limit))
    what = "all tokens" if expected.is_whole else f"the first {expected.head} tokens"
    return Checked(worst, limit, what)


def check_decode(
    computation: Computation,
    layout: CallLayout,
    library: Library,
    dtype: str,
    decoder: TokenDecoder,
    run: Run,
) -> Checked:
    """One token after a short context, and after the measured one. Raises `WrongResultError`."""
    limit = bound(dtype, KIND)
    m = computation.mechanism
    short = layout._replace(t=min(layout.t, 256), s=min(layout.t, 256))
    inputs = inputs_of(str(m), short, dtype, library.name)
    assert computation.decoder is not None  # The caller has checked it.
    brief = computation.decoder(library, dtype, inputs)
    brief.fill()
    brief.reset()
    whole = np.asarray(m(**inputs, backend="reference"))
    what = f"the token after {short.t - 1} others"
    brief_out = decode_run(library, brief).call()["the output"]
    worst = _compare(what, library.numpy(brief_out), whole[:, -1:], limit)
    expected = decoder.oracle_step()
    run.reset()
    out = library.numpy(run.call()["the output"])
    worst = max(worst, _compare(f"the token after {layout.t - 1} others", out, expected, limit))
    return Checked(worst, limit, f"one token after {short.t - 1} and {layout.t - 1}")


def _compare(what: str, result: np.ndarray, expected: np.ndarray, limit: float) -> float:
    """The error. Raises `WrongResultError`."""
    if result.shape != expected.shape:
        raise WrongResultError(f"{what}, of shape {result.shape},", np.inf, limit)
    measured = error(result, expected)
    if not measured <= limit:
        raise WrongResultError(what, measured, limit)
    return measured
