"""The core's imports of every kind, annotations and lazy ones included, have no large circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LARGEST = 2
"""Files of a circle: two halves of one idea may name each other's types."""


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "precondattn").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The files that can be reached from each other, in sets of two or more."""
    reached = {name: reachable(name, graph) for name in graph}
    together = {frozenset(o for o in reached[n] if n in reached[o]) for n in graph}
    return [set(circle) for circle in together if len(circle) > 1]


def reachable(name: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for other in graph[waiting.pop()] - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def test_no_circle_of_imports_has_more_than_two_files():
    paths = modules()
    graph = {n: {i for i in imported(p, set(paths)) if i in paths} - {n} for n, p in paths.items()}
    assert [sorted(c) for c in circles(graph) if len(c) > LARGEST] == []


def test_no_file_is_named_after_a_framework():
    """Its room is: `frameworks/torch/autograd.py`."""
    named = [p for p in modules().values() if p.stem.endswith(("_torch", "_jax"))]
    assert named == []
