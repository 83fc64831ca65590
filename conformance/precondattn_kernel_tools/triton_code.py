"""The code of a Triton kernel as a text that changes whenever its meaning can.

The text is the syntax tree of the kernel and of every `triton.jit` function that it calls, without
comments and docstrings, and the constants that they read. It does not depend on the module in which
a function is defined. Triton's own functions are not part of it: the version of Triton is a part of
the key beside it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import ModuleType
from typing import Any


def code_of(function: Any) -> str:
    """The text of a function that `triton.jit` returned.

    Raises
    ------
    ValueError
        for a global that is neither a function of Triton's nor a constant.
    """
    parts: set[str] = set()
    _collect(function, parts, set())
    return "\n".join(sorted(parts))


def _collect(function: Any, parts: set[str], visited: set[int]) -> None:
    if id(function) in visited:
        return
    visited.add(id(function))
    python = function.fn
    tree = ast.parse(textwrap.dedent(inspect.getsource(python)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    name = python.__qualname__
    parts.add(f"{name}: {ast.dump(tree)}")
    arguments = inspect.signature(python).parameters
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in arguments:
            value = python.__globals__.get(node.id)
            _collect_global(f"{name}.{node.id}", value, parts, visited)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = python.__globals__.get(node.value.id)
            if isinstance(module, ModuleType) and not _is_triton(module.__name__):
                value = getattr(module, node.attr)
                _collect_global(f"{name}.{node.value.id}.{node.attr}", value, parts, visited)


def _collect_global(name: str, value: Any, parts: set[str], visited: set[int]) -> None:
    """`value` is None for a local name, a builtin or the constant None."""
    if value is None or isinstance(value, ModuleType):
        return
    if _is_triton(getattr(value, "__module__", None) or "") and not hasattr(value, "fn"):
        if type(value).__name__ == "constexpr":
            parts.add(f"{name} = {value.value!r}")
    elif hasattr(value, "fn"):
        if not _is_triton(value.fn.__module__):
            _collect(value, parts, visited)
    elif isinstance(value, bool | int | float | str | tuple):
        parts.add(f"{name} = {value!r}")
    else:
        raise ValueError(f"{name} is a {type(value).__name__}, and no constant of a kernel")


def _is_triton(module: str) -> bool:
    return module.partition(".")[0] == "triton"
