"""Valid names of a new backend: one name for pip, for `import` and for `--backend`."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.util import find_spec
from typing import NamedTuple

from precondattn.dispatch.discovery import discover
from precondattn_conformance import libraries

FORM = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


class Names(NamedTuple):
    """The three spellings of a name."""

    name: str
    """The name of the backend and of the distribution, as given."""
    module: str
    class_name: str


def checked(name: str) -> Names:
    """The spellings of a name.

    Raises
    ------
    ValueError
        if the name is not valid for a distribution and a module, or is already used.
    """
    if not FORM.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid name for a backend: use lower-case letters and digits, "
            f"with single hyphens or underscores between them, beginning with a letter"
        )
    names = Names(
        name,
        name.replace("-", "_"),
        "".join(part.capitalize() for part in re.split("[-_]", name)),
    )
    if keyword.iskeyword(names.module):
        raise ValueError(f"{name!r} is a Python keyword, and can not be imported")
    backends = discover()
    if name in [*(b.name for b in backends.backends), *(broken for broken, _ in backends.broken)]:
        raise ValueError(f"the backend name {name!r} is taken by an installed backend")
    frameworks = {cls.module for cls in libraries.ALL}
    if names.module in sys.stdlib_module_names | frameworks or _is_importable(names.module):
        raise ValueError(f"{name!r} would hide the module {names.module!r}, or be hidden by it")
    return names


def _is_importable(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # A mere folder has no origin.
