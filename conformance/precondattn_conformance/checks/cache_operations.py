"""Operations on caches: an extended cache equals one that holds these sequences from the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn.cache.kept import without_way_back
from precondattn.dispatch.explanation import Explanation
from precondattn_conformance.checks.caching import Caching
from precondattn_conformance.checks.check import Measured, Trial
from precondattn_conformance.checks.ragged import RaggedCall, calls, new_tokens, rows_of
from precondattn_conformance.disagreement import DisagreementError

OTHERS = 2
"""The number of tokens that are cached and removed again."""


class CacheOperations(Caching):
    """A cache stays right when tokens are removed, sequences rearranged and its capacity grows.

    The extended cache then equals the full call of these sequences. Token histories are cropped,
    and so are states, of which a copy is kept before the other tokens. A cache that can not be
    cropped has to raise an error. The first sequence goes back to a snapshot.
    """

    name = "cache_operations"
    snippet = """cache, steps = cache_of(case{where})
out, cache = mechanism.extend(cache, **steps[0], backend={backend})
before = cache.snapshot()
out, longer = mechanism.extend(cache, **steps[-1], backend={backend})
cache = longer.restore(before)  # Or crop, select, concatenate, reorder, grow."""

    def run(self, trial: Trial) -> Measured:
        layout, inputs = trial.case.layout, trial.numpy_inputs
        b, time = layout.b, layout.t
        first_count, capacity = max(time // 2, 1), time + 1
        first_call, last_call = calls(layout, [first_count, time])
        extension = _Extension(trial)
        same = list(range(b))
        cache = trial.mechanism.init_cache(
            **trial.inputs, capacity=first_count + OTHERS, key_mask=layout.has("key_mask")
        )
        first, cache = extension(cache, inputs, same, first_call)
        before = cache.snapshot()
        others = _first_rows(last_call, OTHERS)
        kept = 0 if without_way_back(cache) else OTHERS
        if kept:
            _require_refusal(cache)
        _, longer = extension(cache, trial.reversed_inputs, same, others, donate=True, keep=kept)
        if not kept:
            _require_refusal(longer)
        operations = _rearranged
        jit = trial.library.transforms().get("jit")
        if layout.mask is None and jit is not None:  # Traced where the library can trace.
            operations = jit(operations)
        order = [*range(1, b), 0, b - 1]
        cache = operations((longer, before)).grow(capacity)
        last, cache = extension(cache, inputs, order, last_call)
        extension.require_used()
        trial.require_purity()
        expected = trial.expected.out
        return trial.agree(
            {
                "the output of the first tokens": (first, rows_of(expected, first_call)),
                "the output after the operations": (last, rows_of(expected, last_call)[order]),
            }
        )


def _first_rows(call: RaggedCall, most: int) -> RaggedCall:
    """The call with at most this many new tokens of each sequence."""
    stops = np.minimum(call.stops, call.starts + most)
    return call._replace(stops=stops, width=min(call.width, most))


def _rearranged(caches: tuple[pa.Cache, pa.Snapshot]) -> pa.Cache:
    """The cache at the snapshot, with sequences 1, 2, … 0, and the last one again."""
    longer, before = caches
    restored = longer.restore(before)
    is_kept = longer.can_crop or not without_way_back(longer)
    cropped = longer.crop(before.length) if is_kept else restored
    b = cropped.length.shape[0]
    cache = cropped
    if b > 1:
        cache = pa.Cache.concatenate([cropped.select(slice(1, None)), restored.select([0])])
    return cache.reorder([*range(b), max(b - 2, 0)])


def _require_refusal(cache: pa.Cache) -> None:
    if cache.can_crop:
        return
    try:
        cache.crop(0)
    except ValueError as error:
        if "snapshot()" in str(error):
            return
    raise DisagreementError("crop of a state or of rewritten rows did not raise, naming snapshot()")


class _Extension:
    """`extend` by some tokens of some sequences, and whether the backend under test ran it."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.explained: list[Explanation] = []

    def __call__(
        self,
        cache: pa.Cache,
        inputs: Mapping[str, np.ndarray],
        sequences: Sequence[int],
        call: RaggedCall,
        donate: bool = False,
        keep: int = 0,
    ) -> tuple[np.ndarray, pa.Cache]:
        trial = self.trial
        m, array, backend = trial.mechanism, trial.library.array, trial.backend
        call = call._replace(starts=call.starts[sequences], stops=call.stops[sequences])
        chosen = {n: self._of(n, a, sequences, cache.capacity) for n, a in inputs.items()}
        new = trial.arrays(new_tokens(m, chosen, call))
        masks = {n: mask[sequences] for n, mask in trial.case.layout.masks().items()}
        options: Arrays = {}
        if call.is_ragged:
            options["lengths"] = array(call.counts)
        if "key_mask" in masks:
            options["key_mask"] = array(np.take_along_axis(masks["key_mask"], call.tokens, 1))
        self.explained.append(m.explain(**new, **options, cache=cache, backend=backend))
        options |= {"donate": donate, "keep": keep}
        out, cache = m.extend(cache, **new, **options, backend=backend)
        return trial.numpy(out), cache

    def _of(
        self, name: str, array: np.ndarray, sequences: Sequence[int], capacity: int | None
    ) -> np.ndarray:
        """An input of these sequences; an input of pairs has a key column for each slot."""
        pattern = self.trial.mechanism.inputs[name]
        if pattern.letters[:1] == "b" and array.shape[0] > 1:
            array = array[list(sequences)]
        if not pattern.is_pairwise or capacity is None:
            return array
        array = array[..., :capacity]
        padding = capacity - array.shape[-1]
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)], constant_values=7.0)

    def require_used(self) -> None:
        if not any(map(self.trial.is_used, self.explained)):
            self.trial.require_used(self.explained[-1])
