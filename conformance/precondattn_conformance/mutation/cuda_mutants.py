"""The mutants of a CUDA file, token by token. Comments, strings and preprocessor lines are kept.

The kinds are those of `python_mutants`: comparisons, signs, `+ 1`, numbers, `min` and `max`, `&&`
and `||`, neighbouring arguments with similar names exchanged, accumulations and barriers dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from precondattn_conformance.mutation.mutant import Lines, Mutant, numbered

TOKEN = re.compile(
    r"""(?P<skipped>//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[fFuUlL]*|0[xX][\da-fA-F]+[uUlL]*)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<sign><<=|>>=|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|/=|<<|>>|\+\+|--|->|::|[^\s\w])""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
COMPARISONS = {"<=": "<", ">=": ">", "<": "<=", ">": ">=", "==": "!=", "!=": "=="}
CONDITIONS = {"&&": "||", "||": "&&"}
SIGNS = {"+": "-", "-": "+", "*": "/", "/": "*", "+=": "-=", "-=": "+="}
EXTREMA = {"min": "max", "max": "min", "fminf": "fmaxf", "fmaxf": "fminf"}
BARRIERS = ("__syncthreads", "__syncwarp")
STATEMENT = re.compile(r"[;{}]")


class Token(NamedTuple):
    """A word, a number or a sign, and its position."""

    kind: str
    text: str
    start: int
    stop: int


def cuda_mutants(text: str) -> list[Mutant]:
    """The mutants of a file's text, in its order."""
    return numbered(list(_CudaFile(text).mutants()))


class _CudaFile:
    def __init__(self, text: str) -> None:
        self.text, self.lines = text, Lines(text)
        found = ((match.lastgroup or "", match) for match in TOKEN.finditer(text))
        self.tokens = [Token(k, m[0], *m.span()) for k, m in found if k != "skipped"]
        self.functions = list(_functions(self.tokens))

    def mutants(self) -> Iterator[Mutant]:
        for name, begin, end in self.functions:
            for at in range(begin, end):
                for kind, span, new in self._edits(at):
                    yield self.lines.mutant(name, kind, span, new, (0, 0))

    def _edits(self, index: int) -> Iterator[tuple[str, tuple[int, int], str]]:
        before, token, after = self.tokens[index - 1 : index + 2]
        span = (token.start, token.stop)
        text = token.text
        if text in COMPARISONS and self._is_spaced(index):
            yield "comparison", span, COMPARISONS[text]
        elif text in CONDITIONS:
            yield "condition", span, CONDITIONS[text]
        elif text in ("+", "-") and after.text == "1" and self._is_spaced(index):
            yield "off by one", (token.start, after.stop), ""
        elif text in SIGNS and self._is_spaced(index):
            yield "sign", span, SIGNS[text]
        elif text == "!" and after.text != "=":
            yield "condition", span, ""
        elif token.kind == "number" and before.text not in ("<", "[[") and text != "1":
            yield from self._of_number(token)
        elif text in EXTREMA and after.text == "(":
            yield "extremum", span, EXTREMA[text]
        elif text in BARRIERS:
            stop = self._closing(index + 1)
            yield "barrier", (token.start, self.tokens[stop].stop), "void()"
        elif text == ",":
            yield from self._exchanged(index)
        if text in ("+=", "-=", "="):
            yield from self._dropped(index)

    def _of_number(self, token: Token) -> Iterator[tuple[str, tuple[int, int], str]]:
        digits = re.match(r"[\d.]+(?:[eE][+-]?\d+)?", token.text)
        if digits is None or token.text[:2] in ("0x", "0X"):
            return
        number, suffix = digits[0], token.text[len(digits[0]) :]
        is_real = any(c in number for c in ".eE")
        if is_real:
            new = "1.0" if float(number) == 0 else repr(2 * float(number))
        else:
            new = str(int(number) + 1)
        yield "number", (token.start, token.stop), new + suffix

    def _exchanged(self, index: int) -> Iterator[tuple[str, tuple[int, int], str]]:
        """Exchange neighbouring words with a common beginning or end: `stride_b, stride_h`."""
        if index < 2 or index + 2 >= len(self.tokens):
            return
        edge, left, _, right, other = self.tokens[index - 2 : index + 3]
        if edge.text not in "(," or other.text not in "),":
            return
        a, b = left.text, right.text
        if left.kind == right.kind == "word" and a != b and _are_alike(a, b):
            yield "stride", (left.start, right.stop), f"{b}, {a}"

    def _dropped(self, index: int) -> Iterator[tuple[str, tuple[int, int], str]]:
        """Drop `x += y;` or `x[i] = y;` if it is a complete statement."""
        first = index
        depth = 0
        while first > 0:
            text = self.tokens[first - 1].text
            depth += (text in ")]") - (text in "([") if len(text) == 1 else 0
            if depth < 0 or (depth == 0 and STATEMENT.fullmatch(text)):
                break
            first -= 1
        if depth < 0:
            return  # It is inside `for (…)`, or an argument.
        words = self.tokens[first:index]
        if any(t.text in ("for", "if", "while", "return", "else") for t in words):
            return
        is_new = len(words) > 1 and words[0].kind == words[1].kind == "word"
        is_new |= any(t.text in ("const", "auto", "using", "static") for t in words)
        if is_new or (self.tokens[index].text == "=" and words[-1].text != "]"):
            return
        last = index
        while self.tokens[last].text != ";":
            last += 1
        start, stop = self.tokens[first].start, self.tokens[last].start
        yield "statement", (start, stop), "\n" * self.text[start:stop].count("\n")

    def _is_spaced(self, index: int) -> bool:
        """Whether spaces surround an operator, unlike in templates, pointers and signs."""
        token = self.tokens[index]
        return self.text[token.start - 1].isspace() and self.text[token.stop].isspace()

    def _closing(self, index: int) -> int:
        """The index of the parenthesis that closes the one at an index."""
        depth = 0
        while True:
            depth += (self.tokens[index].text == "(") - (self.tokens[index].text == ")")
            if depth == 0:
                return index
            index += 1


def _functions(tokens: list[Token]) -> Iterator[tuple[str, int, int]]:
    """The name, and the first and last token of the body, of each function of the file."""
    depth, name, begin, at = 0, "", 0, 0
    while at < len(tokens):
        text = tokens[at].text
        if text == "namespace" or (text == "struct" and depth == 0):
            while tokens[at].text not in "{;":
                at += 1
        elif text == "(" and depth == 0 and tokens[at - 1].kind == "word":
            name = tokens[at - 1].text
        elif text == "{":
            depth += 1
            if depth == 1:
                begin = at + 1
        elif text == "}" and depth > 0:
            depth -= 1
            if depth == 0 and name:
                yield name, begin, at
                name = ""
        at += 1


def _are_alike(a: str, b: str) -> bool:
    same = re.sub(r"\d", "#", a) == re.sub(r"\d", "#", b)
    parts = (a.rpartition("_")[0], b.rpartition("_")[0])
    return same or (parts[0] == parts[1] != "") or (len(a) == len(b) == 1)
