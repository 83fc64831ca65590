"""`Any` has a name wherever it can: an array is an `Array`, JSON is `Json`."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("precondattn", "backends", "conformance")
LIMIT = 20
"""Uses of `Any` without a name, in all trees together."""


def unnamed(code: str) -> Iterator[ast.Name]:
    """Every `Any` in a module but for those that a module-level alias names, and Triton kernels."""
    tree = ast.parse(code)
    nodes: list[ast.AST] = [node for node in tree.body if not _is_alias(node)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and node.id == "Any":
            yield node
        if not _is_triton_kernel(node):
            nodes.extend(ast.iter_child_nodes(node))


def _is_alias(node: ast.stmt) -> bool:
    """`Array = Any`, `Arrays = dict[str, Any]` …"""
    return isinstance(node, ast.Assign) and isinstance(
        node.value, ast.Name | ast.Subscript | ast.BinOp
    )


def _is_triton_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
    )


def test_any_stands_almost_nowhere_without_a_name():
    found: Counter[str] = Counter()
    for path in (path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))):
        code = path.read_text(encoding="utf-8")
        if re.search(r"\bAny\b", code):
            found[str(path.relative_to(ROOT))] += sum(1 for _ in unnamed(code))
    assert found.total() <= LIMIT, "\n".join(f"{n:4} {path}" for path, n in found.most_common(20))


def test_of_tritons_functions_only_kernels_have_no_types():
    for path in (ROOT / "backends" / "precondattn_triton").rglob("*.py"):
        nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        while nodes:
            node = nodes.pop()
            if _is_triton_kernel(node):
                continue
            if isinstance(node, ast.FunctionDef):
                assert node.returns, f"{path.name}: {node.name} has no types"
            nodes.extend(ast.iter_child_nodes(node))
