"""The context manager given by `--inside`, in which all cases of a run execute."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager


def context_manager(text: str) -> Callable[[], AbstractContextManager[object]]:
    """The context manager with the name "package.module:function".

    Raises
    ------
    ValueError
        if it does not exist.
    """
    module, _, name = text.partition(":")
    try:
        found: Callable[[], AbstractContextManager[object]]
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--inside: expected the name of a context manager, as my_tests.tiles:small_tiles; "
            f"found {text!r}: {error}"
        ) from None
    return found
