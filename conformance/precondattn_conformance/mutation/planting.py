"""Plants a mutant in this process: the module's functions get other code, and no file is written.

A function keeps its identity, so that every module that has imported it calls the mutant. Cached
results of earlier calls are removed: plans, compiled functions, `functools.cache`. Triton's
interpreter and `inspect` read the source again; they get the mutant's from `linecache`.
"""

from __future__ import annotations

import functools
import gc
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Protocol

from precondattn.execution import preparation
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.target import Target

Place = tuple[str, int]
"""A function's name, with its class, and its first line."""


class NotPlantedError(RuntimeError):
    """Raised if no function of this process has the mutant's code."""


class Planter:
    """Plants the mutants of a Python module that this process has imported."""

    def __init__(self, target: Target, module: ModuleType) -> None:
        self.target, self.text = target, target.text
        self.file = str(module.__file__)
        self.functions = self._functions()

    def _functions(self) -> dict[Place, list[FunctionType]]:
        found: dict[Place, list[FunctionType]] = {}
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename == self.file:
                found.setdefault(_place(each.__code__), []).append(each)
        return found

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Context in which the process contains the mutant.

        Raises
        ------
        NotPlantedError
            if this process can not call the mutant's function, or its code is invalid.
        """
        text = mutant.applied(self.text)
        try:
            module = compile(text, self.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise NotPlantedError(f"{mutant.key}: {error}") from None
        replaced = []
        for code in _codes(module):
            if code.co_qualname == mutant.function:
                known = self.functions.get(_place(code), [])
                replaced += [(function, function.__code__, code) for function in known]
        replaced = [(f, old, new) for f, old, new in replaced if old != new]
        if not replaced:
            raise NotPlantedError(f"{mutant.key}: no function has this code")
        lines = linecache.cache.get(self.file)
        linecache.cache[self.file] = (len(text), None, text.splitlines(keepends=True), self.file)
        try:
            for function, _, new in replaced:
                function.__code__ = new
            forget(self.target.package.name)
            yield
        finally:
            for function, old, _ in replaced:
                function.__code__ = old
            linecache.cache.pop(self.file, None)
            if lines is not None:
                linecache.cache[self.file] = lines
            forget(self.target.package.name)


def forget(package: str) -> None:
    """Clear caches of earlier calls in the package, in precondattn and in compilers."""
    preparation.prepared_calls.clear()
    for kept in _kept(package):
        kept.cache_clear()
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        interpreter.InterpretedFunction.rewritten_fn.clear()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


class CachedFunction(Protocol):
    def cache_clear(self) -> None: ...


@functools.cache
def _kept(package: str) -> list[CachedFunction]:
    """The functions with `functools.cache` or `lru_cache` in the package and in precondattn.

    The registry of mechanisms is not among them, and the suite's own results are kept.
    """
    of = (package, "precondattn")
    cached = type(functools.lru_cache(_place))
    return [
        each
        for each in gc.get_objects()
        if type(each) is cached and (each.__module__ or "").partition(".")[0] in of
    ]


def _place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code objects of all functions and classes in a module's code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
