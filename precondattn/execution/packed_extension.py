"""`extend` with packed new tokens: each sequence has a row of the cache and a run of the tokens.

    o[tokens of sequence i], cache_i = extend(cache_i, x[tokens of sequence i])

As in a packed call (`packed.py`), sequences with similar numbers of new tokens are moved into one
batch, padded to the longest of them. A batch is an ordinary extension of its rows of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from precondattn.algebra.call import Call
from precondattn.algebra.declaration import ShapeError
from precondattn.algebra.piece import ExtendPullback
from precondattn.arrays import host_array, is_distributed, namespace, on_device_of
from precondattn.cache import KEY_MASK, Cache
from precondattn.execution.array_checks import check_arrays
from precondattn.execution.cache_checks import check_cacheable, check_is_cache
from precondattn.execution.checked import CHECKS
from precondattn.execution.input_names import (
    EXTEND_OPTIONS,
    inputs_by_name,
    shapes_of,
)
from precondattn.execution.masks import ValueChecks, check_mask, segments_of, sequences_between
from precondattn.execution.packed import Batches, is_of_tokens, moves_to, similar
from precondattn.frame import runs
from precondattn.frameworks.types import Array, Arrays, ByName
from precondattn.given import Given

PACKINGS = ("segment_ids", "cu_seqlens")


class PackedExtension(Batches):
    """A packed extension, and its batches."""

    def __init__(self, call: Call) -> None:
        mechanism, cache = call.mechanism, call.cache
        owner = str(mechanism)
        self.call, self.cache = call, cache
        check_is_cache(owner, cache)
        if is_distributed(call.arrays, call.named, cache.length):
            raise TypeError(f"{owner}: DTensors have no packed sequences in extend")
        check_cacheable(mechanism)
        if call.masks.get("lengths") is not None:
            raise ValueError(
                f"{owner}: lengths of packed sequences are those between their borders; leave "
                f"lengths out, and let cu_seqlens end before padding"
            )
        declared = mechanism.inputs.extending()
        inputs = inputs_by_name(owner, declared, call.arrays, call.named, EXTEND_OPTIONS)
        check_arrays(owner, declared, inputs)
        self.of_tokens = [name for name in inputs if is_of_tokens(declared[name])]
        for name in inputs:
            if name not in self.of_tokens and set(declared[name].letters) & set("bts"):
                raise ValueError(
                    f"{owner}: {name} ({declared[name]}) can not be divided among packed "
                    f"sequences; extend the cache of each sequence by itself"
                )
        # Inputs with an axis of the capacity are checked with the cache.
        token_inputs = {name: inputs[name] for name in self.of_tokens}
        sizes = declared.sizes(owner, shapes_of(token_inputs))
        self.inputs, self.shape = inputs, (sizes["b"], sizes["t"])
        self.like = next(iter(inputs.values()))
        starts, lengths = self._sequences(call.masks)
        self.count = int(lengths.sum())
        """The number of new tokens, without padding at the end of a single row."""
        if len(lengths) != cache.length.shape[0]:
            raise ShapeError(
                f"{owner}: found {len(lengths)} packed sequences, and {cache.length.shape[0]} in "
                f"the cache; init_cache(..., sequences={len(lengths)}) makes one for them"
            )
        self._check_capacity(lengths)
        key_mask = call.masks.get(KEY_MASK)
        self.key_mask = check_mask(
            owner, KEY_MASK, key_mask, self.like, self.shape, ("bool",), "(b t)"
        )
        has_tokens = self.shape[0] * self.shape[1] > 0
        self.groups = similar(lengths) if has_tokens else [np.arange(len(lengths))]
        self.lengths = [lengths[members] for members in self.groups]
        count = self.shape[0] * self.shape[1]
        moves = moves_to(self.groups, starts, lengths, count) if has_tokens else None
        super().__init__(self.shape[0], moves, self.like)
        self.sizes = tuple((len(n), max(int(n.max()), int(has_tokens))) for n in self.lengths)
        if CHECKS.get() is not None:
            from precondattn.execution.examined_values import examine_whole

            is_token = np.arange(count).reshape(self.shape) < self.count
            examine_whole(mechanism, inputs, is_token, self.key_mask)

    def _sequences(self, masks: Mapping[str, Given]) -> tuple[np.ndarray, np.ndarray]:
        """The first token and the number of tokens of each sequence, counted over all rows."""
        owner, (b, t) = str(self.call.mechanism), self.shape
        borders = {name: masks.get(name) for name in PACKINGS}
        packed = segments_of(owner, borders, self.like, b, t, ValueChecks(owner))
        if packed.on_host is None:
            name = next(name for name in PACKINGS if borders[name] is not None)
            raise TypeError(
                f"{owner}: {name} of extend has to be read, and is traced here; give cu_seqlens "
                f"as a list or a NumPy array"
            )
        if borders["cu_seqlens"] is None:
            return runs(packed.on_host)
        n = sequences_between(borders["cu_seqlens"])
        lengths = np.bincount(packed.on_host[0], minlength=n)[:n]
        return np.cumsum(lengths) - lengths, lengths

    def _check_capacity(self, lengths: np.ndarray) -> None:
        """Raise an error that gives the index of a sequence in the call, not in its batch."""
        capacity = self.cache.capacity
        old_lengths = None if capacity is None else host_array(self.cache.length)
        if old_lengths is None:  # There is no limit, or the length is traced.
            return
        for i, (before, new) in enumerate(zip(old_lengths.tolist(), lengths.tolist(), strict=True)):
            if before + new > capacity:
                raise ValueError(
                    f"{self.call.mechanism}: capacity exceeded: the cache holds at most {capacity} "
                    f"tokens, and the new ones do not fit (sequence {i} of the packed ones)"
                )

    def batches(self) -> list[tuple[list[int], Call]]:
        """The calls of the sequences that are extended together, and their rows of the cache."""
        parts = {name: self.gathered(self.inputs[name]) for name in self.of_tokens}
        key_masks = [None] * len(self.groups)
        if self.key_mask is not None:
            key_masks = self.gathered(self.key_mask)
        batches = []
        for i, (members, lengths) in enumerate(zip(self.groups, self.lengths, strict=True)):
            rows = members.tolist()
            is_whole = rows == list(range(self.cache.length.shape[0]))
            inputs = {**self.inputs, **{name: part[i] for name, part in parts.items()}}
            is_ragged = (lengths < self.sizes[i][1]).any()
            masks = {"lengths": lengths.tolist() if is_ragged else None, KEY_MASK: key_masks[i]}
            cache = self.cache if is_whole else self.cache.select(rows)
            batch = self.call._replace(arrays=(), named=inputs, masks=masks, cache=cache)
            batches.append((rows, batch))
        return batches

    @cached_property
    def order(self) -> list[int] | None:
        """The index of each sequence among those of all batches; None if the order is the same."""
        order: list[int] = np.argsort(np.concatenate(self.groups)).tolist()
        return None if order == list(range(len(order))) else order

    def cache_of(self, parts: Sequence[Cache]) -> Cache:
        """The cache of all sequences, from the caches of the batches."""
        whole = parts[0] if len(parts) == 1 else Cache.concatenate(parts)
        return whole if self.order is None else whole.reorder(self.order)

    def rows_of(self, parts: Sequence[Array]) -> Array:
        """The states (n, …) of all sequences, from the states of the batches."""
        xp = namespace(parts[0])
        whole = parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)
        return whole if self.order is None else xp.take(whole, self._index(self.order), axis=0)

    def states_of(self, rows: list[int], states: ByName) -> Arrays:
        """The rows of a batch, of arrays (n, …) by name."""
        if len(self.groups) == 1:
            return dict(states)
        index = self._index(rows)
        return {n: namespace(a).take(a, index, axis=0) for n, a in states.items()}

    def _index(self, rows: list[int]) -> Array:
        return on_device_of(self.like, np.asarray(rows, dtype=np.int64))


ExtendVjp = Callable[[Call], tuple[Array, Cache, ExtendPullback]]


def extend(call: Call, one_batch: Callable[[Call], tuple[Array, Cache]]) -> tuple[Array, Cache]:
    """The output for packed tokens, and the cache with them; `one_batch` extends each batch."""
    packed = PackedExtension(call)
    outs, caches = zip(*[one_batch(batch) for _, batch in packed.batches()], strict=True)
    if call.donate:
        call.cache.store.clear()
    return packed.returned(outs), packed.cache_of(caches)


def extend_vjp(call: Call, one_batch: ExtendVjp) -> tuple[Array, Cache, ExtendPullback]:
    """The output for packed tokens, the cache with them, and the pullback."""
    packed = PackedExtension(call)
    batches = packed.batches()
    outs, caches, pulls = zip(*[one_batch(batch) for _, batch in batches], strict=True)

    def pullback(cotangent: Array, d_store: Arrays) -> tuple[Arrays, Arrays]:
        parts = packed.gathered(cotangent)
        pulled = [
            pull(part, packed.states_of(rows, d_store))
            for pull, part, (rows, _) in zip(pulls, parts, batches, strict=True)
        ]
        gradients, d_past = zip(*pulled, strict=True)
        return packed.gradients(gradients), {
            n: packed.rows_of([part[n] for part in d_past]) for n in d_past[0]
        }

    return packed.returned(outs), packed.cache_of(caches), pullback
