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
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.inputs import slice_tokens

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
        is_one_sequence = case.layout.mask != "segment_ids" and case.layout.t == case.layout.s
        return mechanism_of(case.mechanism).offers.causal and is_one_sequence

    def run(self, trial: Trial) -> Measured:
        time = trial.case.layout.t
        out = extended(trial, _ends(time), [trial.backend])
        trial.require_purity()
        return trial.agree({"the extended output": (out, trial.expected.out)})


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
                out = extended(trial, plan, [trial.backend], donates=False)
            except pa.UnsupportedError:
                if plan is plans[-1] and not errors:
                    raise
                continue
            what = f"the output extended to {', '.join(map(str, plan))} tokens"
            errors.append(trial.agree({what: (out, trial.expected.out)}).error)
        return Measured(max(errors), trial.bound)


class Alternation(Caching):
    """One backend continues from another's cache: buffers mean the same to all backends.

    Calls alternate between the backend under test and the reference, in both orders.
    """

    name = "alternation"

    def run(self, trial: Trial) -> Measured:
        time = trial.case.layout.t
        pairs = {}
        for first, second in ((trial.backend, "reference"), ("reference", trial.backend)):
            out = extended(trial, _ends(time), cycle([first, second]), donates=False)
            order = "the reference first" if first == "reference" else "the reference second"
            pairs[f"the output extended with {order}"] = (out, trial.expected.out)
        return trial.agree(pairs)


def extended(
    trial: Trial,
    ends: Sequence[int],
    backends: Iterable[Backend],
    *,
    donates: bool = True,
    order: str | None = None,
) -> np.ndarray:
    """The outputs of successive `extend` calls, which end at these tokens, by backends in turn.

    With an `order`, new tokens are views (`Library.view`). They may not be written to. Raises an
    UnsupportedError if the backend under test runs no part of any call.
    """
    m, layout = trial.mechanism, trial.case.layout
    library, inputs, masks = trial.library, trial.numpy_inputs, layout.masks()
    capacity = layout.t if layout.mask == "key_mask" else layout.t + 3
    arrays = {name: _with_capacity(m, name, array, capacity) for name, array in inputs.items()}
    has_key_mask = layout.mask == "key_mask"
    cache = m.init_cache(**trial.inputs, capacity=capacity, key_mask=has_key_mask)
    outs, start = [], 0
    explained: list[Explanation] = []
    for call, (stop, backend) in enumerate(zip(ends, cycle(backends), strict=False)):
        options: dict[str, Any] = {}
        if layout.mask == "lengths":
            valid = np.clip(masks["lengths"] - start, 0, stop - start)
            options["lengths"] = library.array(valid)
        if has_key_mask:
            options["key_mask"] = library.array(masks["key_mask"][:, start:stop])
        tokens = slice_tokens(m, arrays, start, stop)
        new = trial.arrays(tokens)
        if order is not None:
            new = {name: library.view(array, order) for name, array in new.items()}
        if backend == trial.backend:
            explained.append(m.explain(**new, **options, cache=cache, backend=backend))
        donate = donates and call > 1
        out, cache = m.extend(cache, **new, **options, backend=backend, donate=donate)
        for name, array in new.items():
            if not np.array_equal(trial.numpy(array), tokens[name]):
                raise DisagreementError(f"the new tokens of {name} were written to")
        outs.append(trial.numpy(out))
        start = stop
    if not any(map(trial.is_used, explained)):
        trial.require_used(explained[-1])
    return np.concatenate(outs, axis=1)


def _ends(time: int) -> list[int]:
    """Where the calls end: a prefill and single tokens; short sequences also start with one."""
    if time > 16:
        return [time - 2, time - 1, time]
    return sorted({1, max(time // 2, 1), min(time // 2 + 1, time), min(time // 2 + 2, time), time})


def _with_capacity(m: pa.Mechanism, name: str, array: np.ndarray, capacity: int) -> np.ndarray:
    """An input of pairs of query and key, padded to as many key columns as the cache has slots."""
    if not m.inputs[name].is_pairwise:
        return array
    padding = capacity - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)], constant_values=7.0)
