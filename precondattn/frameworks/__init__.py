"""One object for each array library, with everything that depends on it.

`of(array)` is the only way to it. The folder of a framework connects to all other folders, and no
other imports it: it is imported by name, when the first array of its library is seen. A call with
NumPy's arrays thus enters no file of PyTorch's or JAX's.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import array_api_compat
import numpy as np

from precondattn.frameworks.framework import Framework, wait_for_imports
from precondattn.frameworks.plain import CuPy, NumPy
from precondattn.frameworks.types import Array

_MODULES = {
    "of_torch": "precondattn.frameworks.torch.framework",
    "of_jax": "precondattn.frameworks.jax.framework",
    "distributed": "precondattn.frameworks.torch.dtensor",
    "in_graph": "precondattn.frameworks.torch.compile",
    "under_autocast": "precondattn.frameworks.torch.autograd_autocast",
}
"""The modules that are imported when they are needed. Three have the functions that are called in
place of others: with distributed tensors, in code that PyTorch compiles, and under autocast."""

_NO_ARRAY, _NUMPY, _CUPY = Framework(None), NumPy("numpy"), CuPy("cupy")
_of_type: dict[type, Framework] = {}


def __getattr__(name: str) -> ModuleType:
    # Not in a function of this module, because Dynamo can not trace `import_module`.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = import_module(_MODULES[name])
    return module


def of(array: Array) -> Framework:
    """The framework of an array; one with the name None for anything else."""
    kind = type(array)
    if kind not in _of_type:
        wait_for_imports()
        _of_type[kind] = _framework(array)
    return _of_type[kind]


def _framework(array: Array) -> Framework:
    from precondattn import frameworks

    # The dtype does not matter: an array of JAX's float0 is an array of NumPy too.
    if isinstance(array, np.ndarray | np.generic):
        # The mask of a masked array would be ignored, and * of matrices is a matrix product.
        return _NO_ARRAY if hasattr(array, "mask") or isinstance(array, np.matrix) else _NUMPY
    found: Framework = _NO_ARRAY
    if array_api_compat.is_torch_array(array):
        found = frameworks.of_torch.framework_of(array)
    elif array_api_compat.is_jax_array(array):
        found = frameworks.of_jax.FRAMEWORK
    elif array_api_compat.is_cupy_array(array):
        found = _CUPY
    elif hasattr(array, "__array_namespace__"):
        found = Framework(array.__array_namespace__().__name__.partition(".")[0])
    return found
