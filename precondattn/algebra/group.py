"""A group: several leaf calls as one mechanism, for a backend that fuses them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.leaf_protocol import LeafCall, LeafProtocol
from precondattn.algebra.names import is_ours, name_of, named_pieces
from precondattn.algebra.piece import Piece
from precondattn.algebra.program import Program
from precondattn.algebra.text import read
from precondattn.limits import KEPT


@dataclass(frozen=True)
class Group(Piece):
    """Leaf calls of a program, under names that do not depend on that program."""

    calls: Program

    @property
    def program(self) -> Program:
        return self.calls

    @cached_property
    def inputs(self) -> Inputs:
        return Inputs(**self.calls.inputs)

    @cached_property
    def _name(self) -> str:  # type: ignore[override]
        return name_of(self)

    def __str__(self) -> str:
        return str(self.calls)


def group_of(expression: str | Piece) -> Program:
    """The program that a backend compares a mechanism's program with: `group_of("lucid")`.

    Examples
    --------
    >>> print(group_of("lucid"))
    y1 = lucid_solve(k, v); out = softmax(q, k, v=y1)
    >>> group_of("lucid(laser)") == group_of("lucid(softmax[read=log_mean_exp])")
    True
    """
    mechanism = read(expression) if isinstance(expression, str) else expression
    program = mechanism.program
    return program.part(range(len(program.calls)))[0]


def read_program(text: str) -> Program:
    """The program from its text: the inverse of `str` for programs returned by `Program.part`."""
    calls: list[LeafCall] = []
    for line in text.split("; "):
        match = re.fullmatch(r"(\w+) = (.+)\(([^()]*)\)", line)
        if match is None:
            raise ValueError(f"{line!r} is not a leaf call")
        leaf: LeafProtocol = read(match[2])
        arguments = []
        for word in match[3].split(", "):
            formal, _, value = word.partition("=")
            arguments.append((formal, value or formal))
        calls.append(LeafCall(match[1], leaf, tuple(arguments)))
    return Program(calls, calls[-1].out)


@lru_cache(maxsize=KEPT)
def read_mechanism(text: str) -> Piece:
    """The leaf or group from its text, the inverse of `str`."""
    return Group(read_program(text)) if " = " in text else read(text)


def piece_named(name: str) -> Piece:
    """The mechanism or group of this name."""
    if name in named_pieces:
        return named_pieces[name]
    text, mark, _ = name.partition(" #")
    if mark:
        raise ValueError(
            f"{text}: this graph was saved by another process, with a class that is not "
            f"registered there by a name of its own; give the class a `name`, and save again"
        )
    piece = read_mechanism(name)
    return piece if is_ours(piece) else named_pieces.setdefault(name, piece)
