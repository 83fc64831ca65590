"""Caching checks: tokens arrive in one prefill, one by one, in blocks, or by several backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn.dispatch.explanation import Explanation
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Backend, Check, Measured, Trial
from precondattn_conformance.checks.ragged import (
    RaggedCall,
    calls,
    new_tokens,
    rows_of,
    with_columns,
)
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import require_unchanged
from precondattn_conformance.extremes import EXTREMES, makes_sense
from precondattn_conformance.inputs import CallLayout, slice_tokens
from precondattn_conformance.masks import OF_PAIRS
from precondattn_conformance.oracle import REFERENCE

EXTENDING = """cache, steps = cache_of(case{where})  # Empty, and what each call adds to it.
outs = []
for new in steps:
    out, cache = mechanism.extend(cache, **new, backend={backend})
    outs.append(out)"""


class Caching(Check):
    """A prefill, then single tokens, then a block, equal the full call.

    The cache usually has spare capacity; ragged and masked sequences are included. From the third
    call on the cache is donated, so that buffers are written in place. The first call contains the
    whole prefix, and an attn_mask has a column for each cached and new token.
    """

    name = "caching"
    snippet = EXTENDING

    def applies(self, case: Case) -> bool:
        layout, mechanism = case.layout, mechanism_of(case.mechanism)
        is_one_sequence = not layout.has("segment_ids") and layout.t == layout.s
        if any(map(layout.has, OF_PAIRS)):
            # A window's cache refuses them, and in ragged calls the first one does not contain the
            # whole prefix.
            is_whole = not (layout.has("prefix") and layout.has("lengths"))
            is_one_sequence &= is_whole and mechanism.program.reach is None
        is_sensible = case.kind not in EXTREMES or makes_sense(mechanism, case.kind)
        return mechanism.offers.causal and is_one_sequence and is_sensible

    def run(self, trial: Trial) -> Measured:
        ends = ends_of(trial.case.layout)
        pair = extended(trial, ends, [trial.backend])
        trial.require_purity()
        calls = f"in calls that end at {', '.join(map(str, ends))} tokens"
        return trial.agree({f"the extended output, {calls},": pair})


class Splits(Caching):
    """The output equals that of the full call for every split of the tokens in two, and one by one.

    Nothing is donated. A backend may support only some of the splits, such as one by one.
    """

    name = "splits"

    def run(self, trial: Trial) -> Measured:
        time = trial.case.layout.t
        plans = [[stop, time] for stop in range(1, time)] + [list(range(1, time + 1))]
        errors: list[float] = []
        for plan in plans:
            try:
                pair = extended(trial, plan, [trial.backend], donates=False)
            except pa.UnsupportedError:
                if plan is plans[-1] and not errors:
                    raise
                continue
            what = f"the output extended to {', '.join(map(str, plan))} tokens"
            errors.append(trial.agree({what: pair}).error)
        return Measured(max(errors), trial.bound)


class Alternation(Caching):
    """One backend continues from another's cache, so buffers must mean the same to all backends.

    Calls alternate between the backend under test and the reference, in both orders. In JAX, the
    reference's calls are made in NumPy.
    """

    name = "alternation"

    def run(self, trial: Trial) -> Measured:
        ends = ends_of(trial.case.layout)
        pairs = {}
        for first, second in ((trial.backend, REFERENCE), (REFERENCE, trial.backend)):
            order = "the reference first" if first == REFERENCE else "the reference second"
            pairs[f"the output extended with {order}"] = extended(
                trial, ends, cycle([first, second]), donates=False
            )
        return trial.agree(pairs)


class Purity(Caching):
    """A cache that was not donated is unchanged by a call, so that it can be extended again.

    Every check verifies that inputs were not written to. This one extends one cache twice with
    different tokens, as a search over continuations does.
    """

    name = "purity"
    snippet = """cache, steps = cache_of(case{where})
for new in (steps[0], steps[0]):  # The same cache again: the first call may not change it.
    out, _ = mechanism.extend(cache, **new, backend={backend})"""

    def applies(self, case: Case) -> bool:
        return case.layout.mask is None and case.layout.t > 2 and super().applies(case)

    def run(self, trial: Trial) -> Measured:
        m, time = trial.mechanism, trial.case.layout.t
        arrays = trial.numpy_inputs
        first = trial.arrays(slice_tokens(m, arrays, 0, time - 1))
        last = trial.arrays(slice_tokens(m, arrays, time - 1, time))
        # Other tokens at the same position.
        others = trial.arrays(slice_tokens(m, trial.reversed_inputs, time - 1, time))
        cache = m.init_cache(**trial.inputs, capacity=time)
        trial.require_used(m.explain(**last, cache=cache, backend=trial.backend))
        _, cache = m.extend(cache, **first, backend=trial.backend)
        before = {name: trial.numpy(a).copy() for name, a in cache.store.items()}
        m.extend(cache, **others, backend=trial.backend)
        for name, array in cache.store.items():
            what = f"the buffer {name!r} of a cache that was not donated"
            require_unchanged(what, trial.numpy(array), before[name])
        out, _ = m.extend(cache, **last, backend=trial.backend)
        expected = trial.expected.out[:, time - 1 :]
        return trial.agree({"the output from a cache used before": (trial.numpy(out), expected)})


def extended(
    trial: Trial,
    ends: Sequence[int],
    backends: Iterable[Backend],
    *,
    donates: bool = True,
    order: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of successive `extend` calls by backends in turn, and the expected outputs.

    The calls end at these tokens of the longest sequence; the other sequences get fewer tokens in
    each call (`ragged`). With an `order`, new tokens are views (`Library.view`). They may not be
    written to. Raises an UnsupportedError if the backend under test runs no part of any call.
    """
    m = trial.mechanism
    cache = empty_cache(trial)
    outs, expected = [], []
    explanation: Explanation | None = None
    for number, (step, backend) in enumerate(
        zip(steps(trial, ends), cycle(backends), strict=False)
    ):
        new = step.new
        if order is not None:
            new = {name: trial.library.view(array, order) for name, array in new.items()}
        is_known = explanation is not None and trial.is_used(explanation)
        if backend == trial.backend and not is_known:
            explanation = m.explain(**new, **step.masks, cache=cache, backend=backend)
        donate = donates and number > 1
        helps = backend == REFERENCE != trial.under_test
        extend = _in_numpy if helps and trial.library.compiles_operations else _in_the_library
        out, cache = extend(trial, cache, new | step.masks, backend=backend, donate=donate)
        for name, array in new.items():
            what = f"the array of the new tokens of {name}"
            require_unchanged(what, trial.numpy(array), step.tokens[name], trial.axes(what))
        outs.append(trial.numpy(out))
        expected.append(rows_of(trial.expected.out, step.call))
    if explanation is not None:
        trial.require_used(explanation)
    return np.concatenate(outs, axis=1), np.concatenate(expected, axis=1)


def _in_the_library(
    trial: Trial, cache: pa.Cache, inputs: Arrays, **options: Array
) -> tuple[Array, pa.Cache]:
    return trial.mechanism.extend(cache, **inputs, **options)


def _in_numpy(
    trial: Trial, cache: pa.Cache, inputs: Arrays, **options: Array
) -> tuple[Array, pa.Cache]:
    """Make the call with the cache and the new tokens in NumPy, where nothing is compiled."""
    array = trial.library.array

    def moved(cache: pa.Cache, into: Callable[[Array], Array]) -> pa.Cache:
        store = {name: into(buffer) for name, buffer in cache.store.items()}
        return cache._replace(length=into(cache.length), store=store)

    in_numpy: Arrays = {name: np.asarray(a) for name, a in inputs.items()}
    out, cache = trial.mechanism.extend(moved(cache, np.asarray), **in_numpy, **options)
    return array(out), moved(cache, array)


class ExtendCall(NamedTuple):
    """One call of `extend`."""

    call: RaggedCall
    tokens: dict[str, np.ndarray]
    """The inputs of the new tokens as NumPy arrays."""
    new: Arrays
    """The inputs as arrays of the library, in the layout's order in memory."""
    masks: Arrays


def empty_cache(trial: Trial) -> pa.Cache:
    """The cache that `steps` extend, with spare capacity unless its keys are masked."""
    layout = trial.case.layout
    has_key_mask = layout.has("key_mask")
    return trial.mechanism.init_cache(
        **trial.inputs, capacity=_capacity(layout), key_mask=has_key_mask
    )


def steps(trial: Trial, ends: Sequence[int]) -> Iterator[ExtendCall]:
    """The calls of `extend` that end at these tokens of the longest sequence."""
    m, layout, array = trial.mechanism, trial.case.layout, trial.library.array
    masks, capacity = layout.masks(), _capacity(layout)
    inputs = {n: with_columns(m.inputs[n], a, capacity) for n, a in trial.numpy_inputs.items()}
    if "prefix" in masks:
        ends = sorted({max(end, int(masks["prefix"].max())) for end in ends})
    for number, call in enumerate(calls(layout, list(ends))):
        options = call.masks(masks, array)
        if "prefix" in masks and number % 2 == 0:  # It is only required in the first call.
            options["prefix"] = array(masks["prefix"])
        if "attn_mask" in masks:
            columns = capacity if number % 2 or call.is_ragged else int(call.stops.max())
            options["attn_mask"] = array(_rows_of_pairs(masks["attn_mask"], call, columns))
        tokens = new_tokens(m, inputs, call)
        yield ExtendCall(call, tokens, trial.laid_out(tokens), options)


def _rows_of_pairs(mask: np.ndarray, call: RaggedCall, columns: int) -> np.ndarray:
    """The rows of an attn_mask (b, h or 1, t, s) for a call's tokens, with this many columns."""
    rows = np.take_along_axis(mask, call.tokens[:, None, :, None], axis=2)[..., :columns]
    width = [(0, 0)] * 3 + [(0, columns - rows.shape[3])]
    return np.pad(rows, width, constant_values=True)


def _capacity(layout: CallLayout) -> int:
    return layout.t if layout.has("key_mask") else layout.t + 3


def ends_of(layout: CallLayout) -> list[int]:
    """The tokens at which calls end: a prefill and single tokens, across a block's edge if any.

    Two single tokens come last, after a block of new ones. Short sequences also start with one.
    """
    time, block = layout.t, layout.block
    if 0 < block < time:
        return sorted({block - 1, block, block + 1, time - 2, time - 1, time})
    if time > 16:
        return [time - 2, time - 1, time]
    return sorted({1, max(time // 2, 1), min(time // 2 + 1, time), min(time // 2 + 2, time), time})
