"""methods-lucid-solve: a precondattn backend for PyTorch.

precondattn imports this module before it gets any array, so nothing here imports a
framework. The first call imports the modules that do.
"""

from .backend import MethodsLucidSolve

__all__ = ["MethodsLucidSolve"]
