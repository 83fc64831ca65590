"""What a leaf does to its state for each token, as one value.

    S'_t = Γ_t ∘ S_{t−1},    S_t = S'_t + k_t u_tᵀ,    o_t = s S_tᵀ q_t

A leaf declares it; its inputs, output, gradient and step are read from it, and a backend finds its
algorithm by it. So a mechanism that spells a recurrence which exists needs no code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Rule = Literal["add", "delta", "low rank", "slots"]
Gate = Literal["fixed", "head", "channel", "slot"]
Keys = Literal["given", "of the gate"]
Erase = Literal["written key", "own key", "own key, before the decay"]
Strength = Literal["scalar", "channel"]
Reads = Literal["after", "before, with a bonus"]
Normaliser = Literal["sum", "running maximum"]


@dataclass(frozen=True)
class Recurrence:
    """The recurrence of a leaf.

    Examples
    --------
    >>> import precondattn as pa
    >>> pa.KDA().recurrence
    Recurrence(rule='delta', gate='channel', strength='scalar', heads='u')
    """

    rule: Rule = "add"
    """u_t is v_t ("add"), or β_t (v_t − S'_tᵀ a_t) ("delta"). With "low rank" another key writes
    what it reads too, b_t (S_{t−1}ᵀ a_t)ᵀ; "slots" are two states that share m slots."""
    gate: Gate | None = None
    """Where Γ_t comes from: an input g, one for each "head", each key "channel" or each "slot", or
    a number that is "fixed" for each head. None without decay."""
    keys: Keys = "given"
    """The key k_t that is written: an input, or 1 − e^{g_t}."""
    erase: Erase = "written key"
    """The key a_t of a delta rule: k_t, or an input."""
    strength: Strength | None = None
    """How much a token writes: β for each state, or for each channel, separately erased and
    written."""
    steps: int | None = None
    """How many steps of the recurrence a token makes, each with a key and a value of its own, on an
    axis behind that of tokens. None for one step, without such an axis."""
    reads: Reads = "after"
    """Whether a query reads the state after its token, or before it, and the token with a bonus."""
    normaliser: Normaliser | None = None
    """What outputs are divided by: the sum of the weights, or of weights e^{…}, which are kept
    finite by a running maximum."""
    heads: Literal["n", "h", "u"] = "n"
    """The letter of the heads that have a state: n (keys), h (queries) or u (values)."""

    @property
    def is_diagonal(self) -> bool:
        """Whether a token multiplies each number of the state by a factor."""
        return self.rule in ("add", "slots")

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        given = (f"{f.name}={value!r}" for f, value in values if value != f.default)
        return f"Recurrence({', '.join(given)})"
