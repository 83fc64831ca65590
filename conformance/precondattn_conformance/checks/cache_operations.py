"""Operations on caches: an extended cache equals one that holds these sequences from the start."""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn.cache.kept import without_way_back
from precondattn.dispatch.explanation import Explanation
from precondattn_conformance.checks.caching import Caching
from precondattn_conformance.checks.check import Measured, Trial
from precondattn_conformance.checks.ragged import (
    RaggedCall,
    calls,
    new_tokens,
    rows_of,
    with_columns,
)
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
        m, explained = trial.mechanism, list[Explanation]()

        def extension(
            cache: pa.Cache,
            inputs: Arrays,
            sequences: list[int],
            call: RaggedCall,
            **options: Array,
        ) -> tuple[np.ndarray, pa.Cache]:
            """`extend` by some tokens of some sequences."""
            call = call._replace(starts=call.starts[sequences], stops=call.stops[sequences])
            chosen = {}
            for name, array in inputs.items():
                of_batch = m.inputs[name].letters[:1] == "b" and array.shape[0] > 1
                rows = array[sequences] if of_batch else array
                chosen[name] = with_columns(m.inputs[name], rows, cache.capacity)
            masks = {n: mask[sequences] for n, mask in layout.masks().items()}
            arguments = trial.arrays(new_tokens(m, chosen, call))
            arguments |= call.masks(masks, trial.library.array) | {"backend": trial.backend}
            explained.append(m.explain(**arguments, cache=cache))
            out, cache = m.extend(cache, **arguments, **options)
            return trial.numpy(out), cache

        same = list(range(b))
        cache = m.init_cache(
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
        if not any(map(trial.is_used, explained)):
            trial.require_used(explained[-1])
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
