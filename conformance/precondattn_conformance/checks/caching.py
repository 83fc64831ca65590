"""Caches, however the tokens arrive: in one prefill, one by one, in blocks, by several backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

import precondattn as pa
from precondattn.dispatch.explanation import Explanation
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Backend, Check, Measured, Trial
from precondattn_conformance.checks.ragged import calls, new_tokens, rows_of
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.inputs import Layout

EXTENDING = """cache = mechanism.init_cache(**inputs, capacity={tokens})
out, cache = mechanism.extend(cache, **inputs, backend={backend})"""


class Caching(Check):
    """A prefill, then single tokens, then a block, equal the full call.

    The cache usually has spare capacity; ragged and masked sequences are included. From the third
    call on the cache is donated, so that buffers are written in place.
    """

    name = "caching"
    snippet = EXTENDING

    def applies(self, case: Case) -> bool:
        is_one_sequence = not case.layout.has("segment_ids") and case.layout.t == case.layout.s
        return mechanism_of(case.mechanism).offers.causal and is_one_sequence

    def run(self, trial: Trial) -> Measured:
        pair = extended(trial, _ends(trial.case.layout), [trial.backend])
        trial.require_purity()
        return trial.agree({"the extended output": pair})


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
    """One backend continues from another's cache: buffers mean the same to all backends.

    Calls alternate between the backend under test and the reference, in both orders.
    """

    name = "alternation"

    def run(self, trial: Trial) -> Measured:
        ends = _ends(trial.case.layout)
        pairs = {}
        for first, second in ((trial.backend, "reference"), ("reference", trial.backend)):
            order = "the reference first" if first == "reference" else "the reference second"
            pairs[f"the output extended with {order}"] = extended(
                trial, ends, cycle([first, second]), donates=False
            )
        return trial.agree(pairs)


def extended(
    trial: Trial,
    ends: Sequence[int],
    backends: Iterable[Backend],
    *,
    donates: bool = True,
    order: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of successive `extend` calls by backends in turn, and what is expected.

    The calls end at these tokens of the longest sequence; the others get fewer in each (`ragged`).
    With an `order`, new tokens are views (`Library.view`). They may not be written to. Raises an
    UnsupportedError if the backend under test runs no part of any call.
    """
    m, layout = trial.mechanism, trial.case.layout
    library, masks = trial.library, layout.masks()
    has_key_mask = "key_mask" in masks
    capacity = layout.t if has_key_mask else layout.t + 3
    inputs = {n: _with_capacity(m, n, array, capacity) for n, array in trial.numpy_inputs.items()}
    cache = m.init_cache(**trial.inputs, capacity=capacity, key_mask=has_key_mask)
    outs, expected = [], []
    explained: list[Explanation] = []
    plan = zip(calls(layout, list(ends)), cycle(backends), strict=False)
    for number, (call, backend) in enumerate(plan):
        options: dict[str, Any] = {}
        if call.is_ragged:
            options["lengths"] = library.array(call.counts)
        if has_key_mask:
            options["key_mask"] = library.array(
                np.take_along_axis(masks["key_mask"], call.tokens, 1)
            )
        tokens = new_tokens(m, inputs, call)
        new = trial.laid_out(tokens)
        if order is not None:
            new = {name: library.view(array, order) for name, array in new.items()}
        if backend == trial.backend:
            explained.append(m.explain(**new, **options, cache=cache, backend=backend))
        donate = donates and number > 1
        out, cache = m.extend(cache, **new, **options, backend=backend, donate=donate)
        for name, array in new.items():
            if not np.array_equal(trial.numpy(array), tokens[name]):
                raise DisagreementError(f"the new tokens of {name} were written to")
        outs.append(trial.numpy(out))
        expected.append(rows_of(trial.expected.out, call))
    if not any(map(trial.is_used, explained)):
        trial.require_used(explained[-1])
    return np.concatenate(outs, axis=1), np.concatenate(expected, axis=1)


def _ends(layout: Layout) -> list[int]:
    """Where the calls end: a prefill and single tokens, over the edge of a block if there is one.

    Short sequences also start with a single token.
    """
    time, block = layout.t, layout.block
    if 0 < block < time:
        return sorted({block - 1, block, block + 1, time})
    if time > 16:
        return [time - 2, time - 1, time]
    return sorted({1, max(time // 2, 1), min(time // 2 + 1, time), min(time // 2 + 2, time), time})


def _with_capacity(m: pa.Mechanism, name: str, array: np.ndarray, capacity: int) -> np.ndarray:
    """An input of pairs of query and key, padded to as many key columns as the cache has slots."""
    if not m.inputs[name].is_pairwise:
        return array
    padding = capacity - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)], constant_values=7.0)
