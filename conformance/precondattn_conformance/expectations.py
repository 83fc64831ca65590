"""Expected failures and skipped cases: two files with a reason per line.

    # One pattern of case ids per line (`*` for any text), then # and the reason.
    gradients-*-lucid_solve*      # the backward kernel is not written yet
    outputs-torch-float16-*       # issue 12: overflow of the norms

Both are strict. A line that matches no case is an error, whatever cases are chosen. An expected
failure that passes is a failure, because its line is no longer true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from pathlib import Path

from precondattn_conformance.case import Case
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import FAILED, PASSED, SKIPPED, XFAILED


class ExpectationError(ValueError):
    """Raised for a line of these files that has no reason or matches no case."""


@dataclass(frozen=True)
class ExpectationLine:
    """One line of a file of expectations."""

    pattern: str
    reason: str
    place: str
    """The file and the line number."""
    expression: re.Pattern[str] = field(compare=False)

    def matches(self, case: Case) -> bool:
        return self.expression.fullmatch(case.id) is not None


@dataclass(frozen=True)
class Expectations:
    """The cases that are expected to fail, and those that are not run."""

    xfail: tuple[ExpectationLine, ...] = ()
    skip: tuple[ExpectationLine, ...] = ()

    @classmethod
    def read(cls, xfail: str | Path | None, skip: str | Path | None) -> Expectations:
        """Read the two files; either may be None."""
        return cls(_read(xfail), _read(skip))

    @property
    def lines(self) -> tuple[ExpectationLine, ...]:
        return self.xfail + self.skip

    def require_true(self, level_cases: Iterable[Case]) -> None:
        """Raise an ExpectationError for lines that match no case."""
        false = list(self.lines)
        for case in level_cases:
            if not false:
                return
            false = [line for line in false if not line.matches(case)]
        if false:
            text = "\n".join(f"{line.place}: {line.pattern} matches no case" for line in false)
            raise ExpectationError(text)

    @property
    def mechanisms(self) -> frozenset[str] | None:
        """The names at the beginning of the lines' mechanisms; None if one may match any."""
        ends = [line.pattern.rpartition("*")[2].rpartition("?")[2] for line in self.lines]
        if not all("-" in end and "=-" not in end for end in ends):
            return None
        return frozenset(name_of(end.rpartition("-")[2]) for end in ends)

    def skipped(self, case: Case) -> Outcome | None:
        """The outcome of the case if it is skipped, else None."""
        line = _first(self.skip, case)
        return None if line is None else Outcome(case, SKIPPED, reason=line.reason)

    def expects(self, outcome: Outcome) -> bool:
        """Whether the case is expected to fail."""
        return _first(self.xfail, outcome.case) is not None

    def judged(self, outcome: Outcome) -> Outcome:
        """The outcome, taking expected failures into account."""
        line = _first(self.xfail, outcome.case)
        if line is None or outcome.status not in (PASSED, FAILED):
            return outcome
        if outcome.status == FAILED:
            return replace(outcome, status=XFAILED, reason=f"{line.reason}: {outcome.reason}")
        reason = f"it passed, though {line.place} expects it to fail: {line.reason}"
        return replace(outcome, status=FAILED, reason=reason)


def name_of(expression: str) -> str:
    """The name at the beginning of an expression: `lucid` of `lucid[window=3](laser)`."""
    return re.split(r"[\[(]", expression, maxsplit=1)[0]


def _first(lines: Sequence[ExpectationLine], case: Case) -> ExpectationLine | None:
    return next((line for line in lines if line.matches(case)), None)


def _read(path: str | Path | None) -> tuple[ExpectationLine, ...]:
    if path is None:
        return ()
    lines = []
    try:
        content = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ExpectationError(f"{path} is no text file") from None
    for number, text in enumerate(content.splitlines(), start=1):
        place = f"{path}:{number}"
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        pattern, _, reason = text.partition("#")
        if not reason.strip():
            raise ExpectationError(f"{place}: no reason given; write it after a #")
        # Brackets in an expression are literal, not a character class.
        escaped = pattern.strip().replace("[", "[[]")
        compiled = re.compile(translate(escaped))
        lines.append(ExpectationLine(pattern.strip(), reason.strip(), place, compiled))
    return tuple(lines)
