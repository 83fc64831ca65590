"""A mutant: a file's text with one token replaced, dropped, or exchanged with its neighbour."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mutant:
    """One change of a file's text."""

    function: str
    """The function that contains it, with its class: `Work.parts`. In CUDA, the kernel."""
    kind: str
    """The kind of change: "comparison", "stride", "mask"."""
    start: int
    """The index of the first character that is replaced."""
    stop: int
    new: str
    line: int
    """The number of the first line that changes."""
    lines: tuple[int, int]
    """The first and last line of the statement; a case that executes none of these is not run."""
    before: str
    """The text of the changed lines, without indentation."""
    after: str
    target: str = ""
    """The name of the `Target` of its file."""
    number: int = 1
    """A number that distinguishes mutants of a function with the same texts before and after."""

    @property
    def key(self) -> str:
        """The mutant's name in records and lists, which does not depend on lines above it."""
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.function}: {self.before} -> {self.after}{again}"

    def applied(self, text: str) -> str:
        """The text of the file with this mutant's change."""
        return text[: self.start] + self.new + text[self.stop :]


class Lines:
    """The lines of a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0]
        for line in text.split("\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)

    def number(self, character: int) -> int:
        """The number of the line that contains a character, counted from 1."""
        return bisect_right(self.starts, character)

    def mutant(
        self, function: str, kind: str, span: tuple[int, int], new: str, lines: tuple[int, int]
    ) -> Mutant:
        """The mutant that replaces the characters of a span."""
        start, stop = span
        first, last = self.number(start), self.number(max(start, stop - 1))
        begin, end = self.starts[first - 1], self.starts[last]
        before = self.text[begin:end]
        after = self.text[begin:start] + new + self.text[stop:end]
        return Mutant(
            function, kind, start, stop, new, first, lines, _one_line(before), _one_line(after)
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def numbered(mutants: list[Mutant]) -> list[Mutant]:
    """The mutants in the order of the text, with distinct keys and without duplicates."""
    known: dict[str, int] = {}
    spans: set[tuple[int, int, str]] = set()
    result = []
    for mutant in sorted(mutants, key=lambda m: (m.start, m.stop, m.new)):
        span = (mutant.start, mutant.stop, mutant.new)
        if span in spans:
            continue
        spans.add(span)
        count = known[mutant.key] = known.get(mutant.key, 0) + 1
        result.append(replace(mutant, number=count))
    return result
