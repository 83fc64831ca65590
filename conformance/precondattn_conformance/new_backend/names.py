"""What a new backend may be called: one name for pip, for `import` and for `--backend`."""

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
    """A name as it is spelt in the three places where it stands."""

    name: str
    """Of the backend and of the distribution, as it was given."""
    module: str
    class_name: str


def checked(name: str) -> Names:
    """The names that a name makes.

    Raises
    ------
    ValueError
        when it is no name for a distribution and a module, or when it is taken.
    """
    if not FORM.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name for a backend's package: it takes lower-case letters and digits, "
            f"with single hyphens or underscores between them, and begins with a letter"
        )
    names = Names(
        name,
        name.replace("-", "_"),
        "".join(part.capitalize() for part in re.split("[-_]", name)),
    )
    if keyword.iskeyword(names.module):
        raise ValueError(f"{name!r} is a word of Python, and can not be imported")
    found = discover()
    if name in [*(b.name for b in found.backends), *(broken for broken, _ in found.broken)]:
        raise ValueError(f"the backend name {name!r} is taken by one that is installed here")
    frameworks = {cls.module for cls in libraries.ALL}
    if names.module in sys.stdlib_module_names | frameworks or _is_importable(names.module):
        raise ValueError(f"{name!r} would hide the module {names.module!r}, or be hidden by it")
    return names


def _is_importable(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # A folder alone has no origin.
