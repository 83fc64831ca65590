"""The declaration of a leaf's recurrence, which is what a token does to the state.

    S'_t = Γ_t ∘ S_{t−1},    S_t = S'_t + k_t u_tᵀ,    o_t = s S_tᵀ q_t

Inputs, output, gradient and step of a leaf follow from its declaration, and a backend chooses its
algorithm by it. A mechanism whose recurrence can be declared needs no code of its own.
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
    """The rule for u_t: v_t for "add", and β_t (v_t − S'_tᵀ a_t) for "delta". "low rank" also adds
    b_t (S_{t−1}ᵀ a_t)ᵀ to the state, with a second key b_t. "slots" are two states that share m
    slots."""
    gate: Gate | None = None
    """The form of the gate Γ_t: an input g with one number for each "head", each key "channel" or
    each "slot", or a "fixed" number for each head. None without decay."""
    keys: Keys = "given"
    """The key k_t that is written: an input ("given"), or 1 − e^{g_t}."""
    erase: Erase = "written key"
    """The key a_t that a delta rule erases with: k_t ("written key"), or an input."""
    strength: Strength | None = None
    """The form of the strength β_t: one number for each state, or separate strengths of erasing and
    writing for each channel. None without β."""
    steps: int | None = None
    """The number of steps that a token makes, each with a separate key and value, along an axis
    after the token axis. None for one step without such an axis."""
    reads: Reads = "after"
    """Whether a query reads the state after its token, or the state before it plus the token with a
    bonus."""
    normaliser: Normaliser | None = None
    """The divisor of the outputs: the sum of the weights, or of exponential weights, which a
    running maximum keeps finite. None without one."""
    heads: Literal["n", "h", "u"] = "n"
    """The letter of the heads that have a state: n (keys), h (queries) or u (values)."""

    @property
    def is_diagonal(self) -> bool:
        """Whether a token multiplies each entry of the state by a factor."""
        return self.rule in ("add", "slots")

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        differing = (f"{f.name}={value!r}" for f, value in values if value != f.default)
        return f"Recurrence({', '.join(differing)})"
