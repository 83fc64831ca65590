"""Commands that install the compared projects: packages of the extra `ecosystem`, and checkouts.

The packages are installed without their dependencies, whose versions conflict.
"""

from __future__ import annotations

import shlex
from importlib.metadata import requires

from precondattn_conformance.peers.everyone import lines_to_check_out

EXTRA = "ecosystem"
"""The extra of precondattn that contains every package of a peer, besides the frameworks."""


def packages() -> list[str]:
    """The requirements of the extra, with their versions."""
    marked = (text.partition(";") for text in requires("precondattn") or ())
    wanted = (f"extra == '{EXTRA}'", f'extra == "{EXTRA}"')
    return [name.strip() for name, _, marker in marked if marker.strip() in wanted]


def commands() -> str:
    """Shell lines for an environment that has precondattn with PyTorch, JAX and Transformers."""
    return f"pip install --no-deps {shlex.join(packages())}\n{lines_to_check_out()}"
