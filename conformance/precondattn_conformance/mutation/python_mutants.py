"""The mutants of a Python file: blocked algorithms, and Triton's and Pallas's kernels.

=============  ===========================================================================
comparison     `<` to `<=`, `>` to `>=`, `==` to `!=`, `is` to `is not`, and back
condition      `if x` to `if not x`, `and` to `or`, `&` to `|`, the branches of `where`
sign           `+` to `-`, `*` to `/`, `-x` to `x`
off by one     `+ 1` dropped; a bound of a slice or of `range`
number         0.0 to 1.0, 2 to 3
extremum       `min` to `max`
mask           `mask=` or `other=` removed
dtype          `.to(tl.float32)` removed, `tl.float32` to `tl.float16`
stride         neighbours with similar names exchanged: `stride_b, stride_h`, `i0, i1`
statement      `x += y`, `x[i] = y` or a call whose result is not used dropped
=============  ===========================================================================

Only the bodies of functions are changed: no annotations, defaults, decorators, or error messages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from precondattn_conformance.mutation.mutant import Lines, Mutant, numbered

Span = tuple[int, int]
Edit = tuple[str, Span, str]
"""The kind of change, its span, and the new text."""

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS: dict[type[ast.operator], tuple[str, str, str]] = {
    ast.Add: ("sign", "+", "-"),
    ast.Sub: ("sign", "-", "+"),
    ast.Mult: ("sign", "*", "/"),
    ast.Div: ("sign", "/", "*"),
    ast.BitAnd: ("condition", "&", "|"),
    ast.BitOr: ("condition", "|", "&"),
}
EXTREMA = {
    a: b
    for pair in (("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"))
    for a, b in (pair, pair[::-1])
}
NARROWER = {"float64": "float32", "float32": "float16"}
UNCHANGED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global)


def python_mutants(text: str) -> list[Mutant]:
    """The mutants of a file's text, in its order."""
    return numbered(list(_PythonFile(text).mutants()))


class _PythonFile:
    def __init__(self, text: str) -> None:
        self.text, self.lines = text, Lines(text)

    def mutants(self) -> Iterator[Mutant]:
        for name, function in _functions(ast.parse(self.text), ""):
            for statement in function.body:
                yield from self._of_statement(name, statement)

    def _of_statement(self, name: str, statement: ast.stmt) -> Iterator[Mutant]:
        if isinstance(statement, UNCHANGED) or _is_text(statement):
            return
        inner = [s for block in _blocks(statement) for s in block]
        last = inner[0].lineno - 1 if inner else statement.end_lineno or statement.lineno
        lines = (statement.lineno, max(last, statement.lineno))
        for kind, span, new in self._edits(statement):
            removed = self.text[span[0] : span[1]].count("\n") - new.count("\n")
            yield self.lines.mutant(name, kind, span, new + "\n" * removed, lines)
        for each in inner:
            yield from self._of_statement(name, each)

    def _edits(self, statement: ast.stmt) -> Iterator[Edit]:
        """The edits of a statement itself and of its expressions."""
        if _can_be_dropped(statement):
            yield "statement", self.span(statement), "pass"
        if isinstance(statement, ast.AugAssign) and type(statement.op) in OPERATORS:
            kind, old, new = OPERATORS[type(statement.op)]
            yield from self._between(kind, statement.target, statement.value, old, new)
        if isinstance(statement, ast.If | ast.While):
            yield from self._negated(statement.test)
        for expression in _expressions(statement):
            yield from self._of_expression(expression)

    def _of_expression(self, node: ast.expr) -> Iterator[Edit]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
                yield from self._between("comparison", left, right, *COMPARISONS[type(op)])
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between("condition", left, right, old, new)
        elif isinstance(node, ast.BinOp):
            yield from self._of_operator(node)
        elif isinstance(node, ast.UnaryOp):
            yield from self._of_unary(node)
        elif isinstance(node, ast.IfExp):
            yield from self._negated(node.test)
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)
        elif isinstance(node, ast.Slice):
            yield from self._moved("off by one", node.lower, 1)
            yield from self._moved("off by one", node.upper, -1)
        elif isinstance(node, ast.Constant):
            yield from self._of_constant(node)
        elif isinstance(node, ast.Attribute) and node.attr in NARROWER:
            stop = self.span(node)[1]
            yield "dtype", (stop - len(node.attr), stop), NARROWER[node.attr]

    def _of_operator(self, node: ast.BinOp) -> Iterator[Edit]:
        if isinstance(node.op, ast.Add | ast.Sub) and _is_number(node.right, 1):
            at = self._found(node.left, node.right, "+" if isinstance(node.op, ast.Add) else "-")
            if at is not None:
                yield "off by one", (at, self.span(node.right)[1]), ""
        elif type(node.op) in OPERATORS and not _is_zero(node.right):
            kind, old, new = OPERATORS[type(node.op)]
            yield from self._between(kind, node.left, node.right, old, new)

    def _of_unary(self, node: ast.UnaryOp) -> Iterator[Edit]:
        operand = self.span(node.operand)[0]
        start = self.span(node)[0]
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            yield "sign", (start, start + 1), ""
        elif isinstance(node.op, ast.Not | ast.Invert):
            length = 3 if isinstance(node.op, ast.Not) else 1
            yield "condition", (start, min(start + length, operand)), ""

    def _of_call(self, node: ast.Call) -> Iterator[Edit]:
        name = _name(node.func)
        if name in EXTREMA:
            stop = self.span(node.func)[1]
            yield "extremum", (stop - len(name), stop), EXTREMA[name]
        if name == "where" and len(node.args) == 3:
            yield from self._exchanged("condition", node.args[1], node.args[2])
        if name == "range":
            if len(node.args) > 1:
                yield from self._moved("off by one", node.args[0], 1)
            yield from self._moved("off by one", node.args[min(len(node.args), 2) - 1], -1)
        if name == "to" and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
            yield "dtype", (self.span(node.func.value)[1], self.span(node)[1]), ""
        for keyword in node.keywords:
            if keyword.arg in ("mask", "other"):
                others = [k for k in node.keywords if k is not keyword]
                without = ast.Call(node.func, node.args, others)
                yield "mask", self.span(node), ast.unparse(without)
        for left, right in zip(node.args, node.args[1:], strict=False):
            if _are_alike(left, right):
                yield from self._exchanged("stride", left, right)

    def _of_constant(self, node: ast.Constant) -> Iterator[Edit]:
        if isinstance(node.value, float):
            yield "number", self.span(node), "1.0" if node.value == 0 else repr(2 * node.value)
        elif type(node.value) is int and node.value > 1:
            yield "number", self.span(node), str(node.value + 1)

    def _negated(self, test: ast.expr) -> Iterator[Edit]:
        """`if x` to `if not x`, unless another edit does this."""
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.NamedExpr):
            yield "condition", self.span(test), f"not ({self.text_of(test)})"

    def _moved(self, kind: str, bound: ast.expr | None, by: int) -> Iterator[Edit]:
        if bound is None:
            return
        if isinstance(bound, ast.Constant) and isinstance(bound.value, int):
            yield kind, self.span(bound), str(bound.value + by)
        else:
            old = self.text_of(bound)
            simple = isinstance(bound, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            yield kind, self.span(bound), f"{old if simple else f'({old})'} {'+-'[by < 0]} 1"

    def _exchanged(self, kind: str, left: ast.expr, right: ast.expr) -> Iterator[Edit]:
        (a0, a1), (b0, b1) = self.span(left), self.span(right)
        new = self.text[b0:b1] + self.text[a1:b0] + self.text[a0:a1]
        if new != self.text[a0:b1]:
            yield kind, (a0, b1), new

    def _between(
        self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[Edit]:
        at = self._found(left, right, old)
        if at is not None:
            stop = at + len(old)
            if old == "is not" or old == "not in":  # There may be any space between the two words.
                stop = at + len(re.match(r"\w+\s+\w+", self.text[at:])[0])  # type: ignore[index]
            yield kind, (at, stop), new

    def _found(self, left: ast.expr, right: ast.expr, operator: str) -> int | None:
        """The position of the operator between its operands, which may be in parentheses."""
        start, stop = self.span(left)[1], self.span(right)[0]
        words = r"\s+".join(re.escape(word) for word in operator.split())
        gap = re.sub(r"#.*", lambda comment: " " * len(comment[0]), self.text[start:stop])
        found = re.search(words, gap)
        return None if found is None else start + found.start()

    def span(self, node: ast.stmt | ast.expr) -> Span:
        """The first and last character of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )

    def _at(self, line: int, column: int) -> int:
        start = self.lines.starts[line - 1]
        whole = self.text[start : self.lines.starts[line]]
        return start + len(whole.encode()[:column].decode())  # Columns count bytes.

    def text_of(self, node: ast.expr) -> str:
        start, stop = self.span(node)
        return self.text[start:stop]


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and methods of its classes; nested functions are part of these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _functions(child, prefix)


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements inside a statement."""
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    return [block for block in blocks if block and isinstance(block[0], ast.stmt)]


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """All expressions of a statement, except those of statements inside it."""
    skipped = ("annotation", "returns", "args", "decorator_list", "keywords", "bases")
    todo: list[ast.AST] = [
        value
        for name, field in ast.iter_fields(statement)
        if name not in skipped
        for value in (field if isinstance(field, list) else [field])
        if isinstance(value, ast.expr | ast.withitem)
    ]
    while todo:
        node = todo.pop()
        if isinstance(node, UNCHANGED):
            continue
        if isinstance(node, ast.expr | ast.Slice):
            yield node
        todo += ast.iter_child_nodes(node)


def _can_be_dropped(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Continue | ast.Break)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_number(node: ast.expr, value: int) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == value


def _is_zero(node: ast.expr) -> bool:
    """Whether a node is 0: `x + 0` is a copy, and `x - 0` is the same."""
    return isinstance(node, ast.Constant) and node.value == 0


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _are_alike(left: ast.expr, right: ast.expr) -> bool:
    """Whether two names are similar: `stride_b` and `stride_h`; `x.stride(0)` and `x.stride(1)`."""
    a, b = (ast.unparse(node) for node in (left, right))
    if isinstance(left, ast.Name) and isinstance(right, ast.Name):
        return a != b and (
            re.sub(r"\d", "#", a) == re.sub(r"\d", "#", b)
            or ("_" in a and a.rpartition("_")[0] == b.rpartition("_")[0])
            or ("_" in a and a.partition("_")[2] == b.partition("_")[2])
        )
    return a != b and "stride" in a and "stride" in b
