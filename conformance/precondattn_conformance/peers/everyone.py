"""All peers, lookup by name, and what installs them.

A project's module does not import the project itself.
"""

from __future__ import annotations

import shlex
from functools import cache
from importlib import import_module
from importlib.metadata import requires
from pkgutil import iter_modules

from precondattn_conformance import peers
from precondattn_conformance.peers.project import Peer, Project


@cache
def all_peers() -> dict[str, Peer]:
    """Every peer by its name, grouped by project."""
    all_of_them: dict[str, Peer] = {}
    for module in iter_modules(peers.__path__):
        defined = import_module(f"{peers.__name__}.{module.name}")
        for project in (each for each in vars(defined).values() if isinstance(each, Project)):
            all_of_them |= project.peers
    return all_of_them


def peer_named(name: str) -> Peer:
    """A peer by its name, such as `"fla/kda_chunk"`.

    Raises
    ------
    ValueError
        if there is no such peer; the message lists the project's peers.
    """
    by_name = all_peers()
    if name not in by_name:
        project = name.partition("/")[0]
        near = [each for each in by_name if each.startswith(f"{project}/")]
        names = near or sorted({each.partition("/")[0] + "/..." for each in by_name})
        raise ValueError(f"{name!r} is no peer; there are {', '.join(names)}")
    return by_name[name]


EXTRA = "ecosystem"
"""The extra of precondattn that contains every package of a peer, besides the frameworks."""


def lines_to_install() -> str:
    """Shell lines for an environment that has precondattn with PyTorch, JAX and Transformers.

    Packages are installed without their dependencies, whose versions conflict. Checkouts are made
    in the folder named by `PRECONDATTN_CHECKOUTS`.
    """
    marked = (text.partition(";") for text in requires("precondattn") or ())
    of_extra = (f"extra == '{EXTRA}'", f'extra == "{EXTRA}"')
    packages = [name.strip() for name, _, marker in marked if marker.strip() in of_extra]
    projects = {peer.project.name: peer.project for peer in all_peers().values()}
    checkouts = [each.checkout.lines for each in projects.values() if each.checkout is not None]
    return "\n".join([f"pip install --no-deps {shlex.join(packages)}", *checkouts])
