"""Whether a package is installed."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Whether Python finds code of this package, without importing it.

    A folder of that name beside the program, such as `torch/` or `jax/`, is not enough: Python
    would import it as a namespace package without contents.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
