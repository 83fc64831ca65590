"""Operations on caches: an extended cache equals one that holds these sequences from the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import precondattn as pa
from precondattn.dispatch.explanation import Explanation
from precondattn_conformance.checks.caching import Caching
from precondattn_conformance.checks.check import Measured, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.inputs import slice_tokens

OTHERS = 2
"""Tokens that are cached and removed again."""


class CacheOperations(Caching):
    """Other tokens are cached and removed, sequences are rearranged, the capacity grows.

    The extended cache then equals the full call of these sequences. Histories of tokens are
    cropped; what can not be cropped has to say so, and goes back to a snapshot.
    """

    name = "cache_operations"
    snippet = """cache = mechanism.init_cache(**inputs, capacity=99)
before = cache.snapshot()
out, cache = mechanism.extend(cache, **inputs, backend={backend})
cache = cache.restore(before).reorder([1, 0]).grow(200)"""

    def run(self, trial: Trial) -> Measured:
        b, time = trial.case.layout.b, trial.case.layout.t
        kept, capacity = max(time // 2, 1), time + 1
        extension = _Extension(trial)
        same = list(range(b))
        cache = trial.mechanism.init_cache(
            **trial.inputs, capacity=kept + OTHERS, key_mask=trial.case.layout.mask == "key_mask"
        )
        first, cache = extension(cache, trial.numpy_inputs, same, 0, kept)
        before = cache.snapshot()
        others = trial.reversed_inputs
        _, longer = extension(cache, others, same, kept, min(kept + OTHERS, time), donate=True)
        _require_refusal(longer)
        operations = _rearranged
        if trial.case.layout.mask is None:  # Traced where the library can; otherwise as they are.
            operations = trial.library.transforms().get("jit", lambda function: function)(
                operations
            )
        order = [*range(1, b), 0, b - 1]
        cache = operations((longer, before)).grow(capacity)
        last, cache = extension(cache, trial.numpy_inputs, order, kept, time)
        extension.require_used()
        trial.require_purity()
        expected = trial.expected.out
        return trial.agree(
            {
                "the output of the first tokens": (first, expected[:, :kept]),
                "the output after the operations": (last, expected[order, kept:]),
            }
        )


def _rearranged(caches: tuple[pa.Cache, Any]) -> pa.Cache:
    """The cache at the snapshot, with sequences 1, 2, … 0, and the last one again."""
    longer, before = caches
    cache = longer.crop(before.length) if longer.can_crop else longer.restore(before)
    b = cache.length.shape[0]
    cache = (
        pa.Cache.concatenate([cache.select(slice(1, None)), cache.select([0])]) if b > 1 else cache
    )
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
        start: int,
        stop: int,
        donate: bool = False,
    ) -> tuple[np.ndarray, pa.Cache]:
        trial = self.trial
        m, array, backend = trial.mechanism, trial.library.array, trial.backend
        chosen = {n: self._of(n, a, sequences, cache.capacity) for n, a in inputs.items()}
        new = trial.arrays(slice_tokens(m, chosen, start, stop))
        masks = {n: mask[sequences] for n, mask in trial.case.layout.masks().items()}
        options: dict[str, Any] = {}
        if "lengths" in masks:
            options["lengths"] = array(np.clip(masks["lengths"] - start, 0, stop - start))
        if "key_mask" in masks:
            options["key_mask"] = array(masks["key_mask"][:, start:stop])
        self.explained.append(m.explain(**new, **options, cache=cache, backend=backend))
        out, cache = m.extend(cache, **new, **options, backend=backend, donate=donate)
        return trial.numpy(out), cache

    def _of(
        self, name: str, array: np.ndarray, sequences: Sequence[int], capacity: int | None
    ) -> np.ndarray:
        """An input of these sequences; one for pairs has a key column for each slot."""
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
