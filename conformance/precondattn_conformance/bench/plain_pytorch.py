"""Transformers' functions in plain PyTorch, also where a package with kernels is installed.

Transformers wraps a function that such a package has too, as flash-linear-attention has the gated
delta rule, and calls that of the package if it can be imported. On a CPU this ends in an error:
"0 active drivers" of Triton.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

from precondattn_conformance.bench.paired import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precondattn.arrays import Arrays


class PlainFunctions:
    """A context in which the functions of the modules that a model is of call no kernels."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = {sys.modules[type(layer).__module__] for layer in model.modules()}
        self.wrapped = [
            (vars(module), name, function)
            for module in modules
            if module.__name__.startswith("transformers.models.")
            for name, function in vars(module).items()
            if inspect.isfunction(function) and hasattr(function, "__wrapped__")
        ]

    def __enter__(self) -> None:
        for names, name, function in self.wrapped:
            names[name] = inspect.unwrap(function)

    def __exit__(self, *error: object) -> None:
        for names, name, function in self.wrapped:
            names[name] = function

    def around(self, run: Run) -> Run:
        """The run, called in this context."""

        def call() -> Arrays:
            with self:
                return run.call()

        return run._replace(call=call)
