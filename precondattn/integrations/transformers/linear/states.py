"""A mechanism of the linear family, computed from states that a model holds to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import Cache
from precondattn.cache.kinds import STATE, Kind

KIND = str(Kind(STATE, is_wide=True))
States = tuple[Tensor, ...]
"""The states (b, …) of a mechanism, in the order of its slots."""


def computed_from(
    mechanism: Mechanism,
    inputs: dict[str, Tensor],
    states: States | None,
    returns_states: bool,
    backend: Any,
) -> tuple[Tensor, States | None]:
    """The output, and the states after it if they are wanted.

    Without gradients the states are computed in their own memory: a model puts the new ones in
    their place in any case.
    """
    if states is None and not returns_states:
        return mechanism(**inputs, backend=backend), None
    cache = mechanism.init_cache(**inputs) if states is None else _holding(mechanism, states)
    donate = not torch.is_grad_enabled()
    out, cache = mechanism.extend(cache, **inputs, backend=backend, donate=donate)
    return out, tuple(cache.store.values()) if returns_states else None


def _holding(mechanism: Mechanism, states: States) -> Cache:
    """A cache of the mechanism with these states, the only ones that it has."""
    store = dict(zip(mechanism.program.slots, (x.float() for x in states), strict=True))
    length = torch.zeros(states[0].shape[0], dtype=torch.int32, device=states[0].device)
    return Cache(length, store, {name: {KIND: ()} for name in store})
