"""Recurrences whose states every process has; each computes all new tokens (`states.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from precondattn.algebra.mechanism import Leaf
from precondattn.parallel.states import with_states
from precondattn.parallel.torch.states import scanned
from precondattn.parallel.torch.step import DividedStep
from precondattn.parallel.ways import DividedPiece


def prefilled(
    piece: DividedPiece, begin: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of this process's tokens, and the states after all tokens by slot name.

    `begin` has the states before the first token.
    """
    keys = _keys(piece.leaf)
    begins = None if begin is None else {keys[slot]: state for slot, state in begin.items()}
    out, end = scanned(piece, begins, with_end=True)
    return out, {slot: end[key] for slot, key in keys.items()}


def stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, and the states after them by slot name."""
    keys = _keys(step.leaf)
    cache = step.leaf.init_cache(**step.inputs)
    cache = with_states(cache, {key: step.past[slot] for slot, key in keys.items()})
    out, cache = step.leaf.extend(
        cache,
        **dict(step.inputs),
        lengths=step.new.lengths,
        key_mask=step.new.key_mask,
        backend=step.new.backend,
    )
    return out, {slot: cache.store[key] for slot, key in keys.items()}


def _keys(leaf: Leaf) -> Mapping[str, str]:
    """The names of a leaf's states in its own cache, by slot name."""
    (keys,) = leaf.program.slot_keys
    return keys
