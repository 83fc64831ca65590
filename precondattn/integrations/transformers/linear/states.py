"""A mechanism with one state, computed from a state that Transformers holds to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.cache import Cache
from precondattn.cache.kinds import STATE, Kind

KIND = str(Kind(STATE, is_wide=True))


def computed_from(
    mechanism: Mechanism,
    inputs: dict[str, Tensor],
    state: Tensor | None,
    returns_state: bool,
    backend: Any,
) -> tuple[Tensor, Tensor | None]:
    """The output, and the state after it if it is wanted.

    Without gradients the state is computed in its own memory: Transformers writes the new state
    there in any case.
    """
    if state is None and not returns_state:
        return mechanism(**inputs, backend=backend), None
    cache = mechanism.init_cache(**inputs) if state is None else _holding(mechanism, state.float())
    donate = not torch.is_grad_enabled()
    out, cache = mechanism.extend(cache, **inputs, backend=backend, donate=donate)
    return out, next(iter(cache.store.values())) if returns_state else None


def _holding(mechanism: Mechanism, state: Tensor) -> Cache:
    """A cache of the mechanism with that state (b, …), the only one that it has."""
    (name,) = mechanism.program.slots
    length = torch.zeros(state.shape[0], dtype=torch.int32, device=state.device)
    return Cache(length, {name: state}, {name: {KIND: ()}})
