"""The layout `contiguous`: every process keeps its tokens, and keys or states go to the others.

Softmax attention passes keys and values around a ring (`ring_torch.py`); recurrences pass states
(`states_torch.py`).
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from precondattn.parallel import ring_torch, states_torch
from precondattn.parallel.call_torch import Call, Processes
from precondattn.spec.softmax import Softmax

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism


def refusal(mechanism: Mechanism, call: Call, processes: Processes) -> str | None:
    """Why a call can not be divided like this; None where it can."""
    way = _way(mechanism)
    masks = [name for name in call.bound.masks if name not in way.MASKS]
    if masks:
        return f"does not support {', '.join(masks)} of {mechanism}; use the layout 'heads'"
    if call.tokens["t"] != call.tokens["s"]:
        return (
            f"expects as many queries as keys on every process; found {call.tokens['t']} and "
            f"{call.tokens['s']}"
        )
    reason: str | None = way.refusal(mechanism)
    return reason


def output(call: Call, processes: Processes) -> Tensor:
    """The output of this process's tokens."""
    out: Tensor = _way(call.mechanism).output(call, processes)
    return out


def during(call: Call, processes: Processes) -> str:
    """What a process has during the call."""
    count = call.tokens["t"][processes.rank]
    return f"{count} tokens of all heads, and {_way(call.mechanism).PASSED},"


def bytes_sent(call: Call, processes: Processes) -> dict[str, int]:
    """Forward, by this process to others."""
    sent: dict[str, int] = _way(call.mechanism).bytes_sent(call, processes)
    return sent


def is_softmax(mechanism: Mechanism) -> bool:
    """Whether it is softmax attention alone."""
    leaves = mechanism.program.leaves
    return len(leaves) == 1 and isinstance(leaves[0], Softmax)


def _way(mechanism: Mechanism) -> ModuleType:
    return ring_torch if is_softmax(mechanism) else states_torch
