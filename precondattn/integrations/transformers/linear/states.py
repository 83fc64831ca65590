"""A call of a mechanism of the linear family on states that a model stores."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import writable
from precondattn.cache import Cache, Replace
from precondattn.cache.kinds import STATE, Kind
from precondattn.execution.preparation import prepared
from precondattn.execution.signature import GivenCall, signature_of
from precondattn.frame import EXTENSION, Frame, Layout

KIND = str(Kind(STATE, is_wide=True))
States = tuple[Tensor, ...]
"""The states (b, …) of a mechanism, in the order of its slots."""
NO_MASKS = {"lengths": None, "key_mask": None}
ONE_TOKEN = Layout(EXTENSION, 1, 0, held=0, longest=0)


def computed_from(
    mechanism: Mechanism,
    inputs: dict[str, Tensor],
    states: States | None,
    returns_states: bool,
    backend: BackendNames,
) -> tuple[Tensor, States | None]:
    """The output, and the states after the tokens if `returns_states` is set.

    Without gradients the states are computed in their own memory: a model puts the new ones in
    their place in any case.
    """
    if states is None and not returns_states:
        return mechanism(**inputs, backend=backend), None
    cache = mechanism.init_cache(**inputs) if states is None else _holding(mechanism, states)
    donate = not torch.is_grad_enabled()
    if donate and inputs["q"].shape[1] == 1 and not torch.compiler.is_compiling():
        result = _one_token(mechanism, inputs, cache, backend)
        if result is not None:
            return result
    out, cache = mechanism.extend(cache, **inputs, backend=backend, donate=donate)
    return out, tuple(cache.store.values()) if returns_states else None


def _one_token(
    mechanism: Mechanism, inputs: dict[str, Tensor], cache: Cache, backend: BackendNames
) -> tuple[Tensor, States] | None:
    """One token of `extend`: only its preparation and its backend; None where it is more than that.

    What `extend` does besides is for lengths, masks and several calls, of which there are none
    here. It would take a third of the time of a step.
    """
    call = GivenCall("extend", mechanism, (), inputs, NO_MASKS, backend, cache)
    signature = signature_of(call)
    if signature is None:
        return None
    ready = prepared(call, signature)
    if not ready.is_direct or ready.is_cast or len(ready.plan.calls) > 1:
        return None
    (planned,) = ready.plan.calls
    frame = Frame.of(ONE_TOKEN, cache.length)
    frame.may_overwrite = True
    past = {name: cache.store[key] for name, key in planned.buffers}
    named = {name: inputs[value] for name, value in planned.arguments}
    out, updates = planned.runner.step(past, named, frame)
    after = {key: cast(Replace, updates[name]).value for name, key in planned.buffers}
    return out, tuple(after[key] for key in cache.store)


def _holding(mechanism: Mechanism, states: States) -> Cache:
    """A cache of the mechanism with these states, which are all of its states."""
    store = dict(zip(mechanism.program.slots, (writable(x.float()) for x in states), strict=True))
    length = torch.zeros(states[0].shape[0], dtype=torch.int32, device=states[0].device)
    return Cache(length, store, {name: {KIND: ()} for name in store})
