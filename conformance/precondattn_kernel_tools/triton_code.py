"""The code of a Triton kernel as a text that changes if its meaning may, and rarely otherwise.

The text is the kernel's syntax tree without comments and docstrings. In it, the name of a
`triton.jit` function is replaced by the text of that function, a global by its value, and a
parameter or local variable by a number. So neither the names nor the module of a function matter.
Triton's own functions keep their names, since the version of Triton is part of the key besides the
text.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from types import FunctionType, ModuleType

from precondattn_kernel_tools import Foreign


@functools.cache  # A kernel has many variants, and calls what others call.
def code_of(function: Foreign) -> str:
    """The text of a function that `triton.jit` returned. Its parameters are numbered in order.

    Raises
    ------
    ValueError
        for a global that is neither a Triton function nor a constant.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.name = "kernel"
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:] or [ast.Pass()]
    return ast.dump(_Canonical(function.fn, definition).visit(definition))


class _Canonical(ast.NodeTransformer):
    """Replaces names by what they refer to."""

    def __init__(self, python: FunctionType, definition: ast.FunctionDef) -> None:
        self.globals = python.__globals__
        names = enumerate(_parameters(python))
        self.local = {name: f"parameter {number}" for number, name in names}
        stored = (
            node.id
            for node in ast.walk(definition)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        local = [name for name in dict.fromkeys(stored) if name not in self.local]
        self.local |= {name: f"local {number}" for number, name in enumerate(local)}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.local:
            node.id = self.local[node.id]
            return node
        return self._replaced(node, node.id, self.globals.get(node.id))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.local[node.arg]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = self._global(node.func)
        if _is_kernel(called):
            numbers = {name: number for number, name in enumerate(_parameters(called.fn))}
            for keyword in node.keywords:
                if keyword.arg in numbers:
                    keyword.arg = f"parameter {numbers[keyword.arg]}"
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        value = self._global(node)
        return self.generic_visit(node) if value is None else self._replaced(node, node.attr, value)

    def _global(self, node: ast.AST) -> Foreign:
        """The global that a name, or an attribute of one of the package's modules, refers to."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            return self.globals.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self._global(node.value)
            if isinstance(module, ModuleType) and not _is_triton(module.__name__):
                return getattr(module, node.attr)
        return None

    def _replaced(self, node: ast.AST, name: str, value: Foreign) -> ast.AST:
        """Replace a name by its value; `value` is None for a builtin, and for the constant None."""
        if value is None or isinstance(value, ModuleType):
            return node
        if _is_kernel(value):
            return ast.Name(hashlib.sha256(code_of(value).encode()).hexdigest())
        if type(value).__name__ == "constexpr":
            return ast.Name(f"constant {value.value!r}")
        if isinstance(value, bool | int | float | str | tuple):
            return ast.Name(f"constant {value!r}")
        if _is_triton(getattr(value, "__module__", None) or ""):
            return node
        raise ValueError(f"{name} is a {type(value).__name__}, and no constant of a kernel")


def _parameters(python: FunctionType) -> list[str]:
    return list(inspect.signature(python).parameters)


def _is_kernel(value: Foreign) -> bool:
    """Whether a value is a result of `triton.jit` that is not one of Triton's own functions."""
    return hasattr(value, "fn") and not _is_triton(value.fn.__module__)


def _is_triton(module: str) -> bool:
    return module.partition(".")[0] == "triton"
