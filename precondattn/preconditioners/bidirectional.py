"""Bidirectional recurrences, in which a token reads itself once (`spec/both_directions.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import (
    Mechanism,
    Offers,
    Pattern,
    Preconditioner,
    Step,
    options,
    registry,
    step,
)
from precondattn.spec.both_directions import BothDirections
from precondattn.spec.linear import Linear
from precondattn.spec.own_token import AFFINE, OwnToken
from precondattn.spec.reversed_tokens import ReversedTokens


@dataclass(frozen=True)
class Bidirectional(Preconditioner):
    """o = → + ← − own: a forward and a backward recurrence, minus what both read of the token.

    → is base(q, k, v, …), and ← is the base on the tokens of each sequence in reversed order. Both
    read token t itself, so `own`, the output of the base for that token alone, is subtracted once.
    The output of a token is thus one step of the recurrence from the sum of two states: of all
    tokens before it, and of all tokens after it. It is not causal and has no cache.

    Source: For delta rules this is the library's own definition. For a fixed decay it is a decay by
    distance, γ^|i−j|, which RMT (arXiv 2309.11523) has in two dimensions.

    Parameters
    ----------
    base : Mechanism
        A recurrence whose step is affine in its state: linear attention with or without decay, or a
        delta rule with one step per token. Preconditioners go outside: `QKNorm(Bidirectional())`.
    combine : {"sum", "concat"}
        Whether → and ← − own are added, or concatenated to twice the channels of v.

    Examples
    --------
    Without decay it is linear attention that is not causal:

    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> weights = np.einsum("bthd,bshd->bhts", q, k) / 2
    >>> o = np.einsum("bhts,bshd->bthd", weights, v)
    >>> bool(np.allclose(pa.Bidirectional()(q, k, v), o))
    True
    """

    name: ClassVar[str] = "bidirectional"
    variants: ClassVar[tuple[str, ...]] = (
        *(f"bidirectional({name})" for name in AFFINE[1:]),
        "bidirectional[combine=concat](gated_delta)",
    )

    base: Mechanism = Linear()
    combine: str = options.choice("sum", "concat")

    @cached_property
    def offers(self) -> Offers:
        return self.base.offers._replace(causal=False)

    def refuses(self) -> str | None:
        if not self.base.offers.causal:
            return "the base is not causal, so it reads tokens on both sides already"
        recurrence = self.base.recurrence if self.base.role == "base" else None
        if recurrence is not None and recurrence.normaliser == "sum":
            return (
                "its output is a quotient, and no linear function of its state; divide the output "
                "of bidirectional(linear) by that for values of 1"
            )
        if recurrence is not None and (recurrence.normaliser or recurrence.rule == "slots"):
            return (
                "its output is no linear function of its state, so the own token, which both "
                "directions read, can not be taken off"
            )
        if recurrence is not None and recurrence.steps is not None:
            return (
                "a token of the base has several keys and values, one for each of its steps, and "
                "a sequence is reversed by tokens with one of each"
            )
        if self.base.name not in AFFINE or registry.known(self.base.name) is not type(self.base):
            bases = ", ".join(AFFINE[:-1])
            return f"its base is a recurrence: {bases} or {AFFINE[-1]}"
        return None

    def steps(self) -> tuple[Step, ...]:
        inputs = {name: p for name, p in self.base.inputs.items() if p.time_axis is not None}
        own_token = OwnToken(self.base.name, self.base.scale)  # type: ignore[attr-defined]
        return (
            step("forward", self.base),
            *(_reversed(f"{name}_reversed", name, p) for name, p in inputs.items()),
            step("o_reversed", self.base, **{name: f"{name}_reversed" for name in inputs}),
            _reversed("backward", "o_reversed", self.base.program.output),
            step("own", own_token),
            step("out", BothDirections(self.combine)),
        )


def _reversed(out: str, x: str, pattern: Pattern) -> Step:
    return step(out, ReversedTokens(len(pattern.axes) == 4), x=x)
