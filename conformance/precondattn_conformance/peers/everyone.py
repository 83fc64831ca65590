"""All peers, and lookup by name. A project's module does not import the project itself."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from precondattn_conformance import peers
from precondattn_conformance.peers.project import Peer


@cache
def all_peers() -> dict[str, Peer]:
    """Every peer by its name, grouped by project."""
    all_of_them: dict[str, Peer] = {}
    for module in iter_modules(peers.__path__):
        defined = import_module(f"{peers.__name__}.{module.name}")
        for project in getattr(defined, "ALL", ()):
            all_of_them |= project.peers
    return all_of_them


def lines_to_check_out() -> str:
    """Shell lines that create every checkout in the folder named by `PRECONDATTN_CHECKOUTS`."""
    projects = {peer.project.name: peer.project for peer in all_peers().values()}
    checkouts = (project.checkout for project in projects.values())
    return "\n".join(checkout.lines for checkout in checkouts if checkout is not None)


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
