"""The rows of the table: implementations of mechanisms, and how the suite calls them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

import precondattn as pa
from precondattn.dispatch.discovery import register_backend
from precondattn_conformance.functions.backend import FunctionBackend
from precondattn_conformance.libraries import named
from precondattn_conformance.peers.everyone import all_peers, peer_named
from precondattn_conformance.peers.files import MissingError
from precondattn_conformance.peers.project import Peer

LIBRARIES = {
    "reference": "numpy",
    "portable": "numpy",
    "torch": "torch",
    "jax": "jax",
    "triton": "torch",
    "pallas": "jax",
    "cupy": "cupy",
}
"""Our own backends, each with its array library."""

MECHANISMS = ("softmax", "lucid", "path", "gated_delta", "kda")
"""The mechanisms in our own backends' rows; the suite's own runs cover the others."""

WITHOUT = {("pallas", "path"), ("cupy", "path")}
"""Pairs (backend, mechanism) without a kernel."""


@dataclass(frozen=True)
class OfProject:
    """A peer, identified by its name, so that another process can look it up."""

    name: str

    @property
    def peer(self) -> Peer:
        return peer_named(self.name)

    @property
    def mechanism(self) -> str:
        return str(pa.parse(self.peer.mechanism))

    @property
    def library(self) -> str:
        return self.peer.library

    def described(self) -> dict[str, str]:
        """A description of its project: title, url, date."""
        project = self.peer.project
        return {"project": project.title, "url": project.url, "date": project.day}

    def version(self) -> str:
        """The version of the project. Raises a MissingError if it is not installed."""
        return self.peer.project.version

    def limits(self) -> Mapping[str, str]:
        """The limits that its documentation states, by the name of the check."""
        return self.peer.limits

    def ready(self) -> tuple[str, FunctionBackend | None]:
        """The name of its registered backend, and the backend itself if it is a function."""
        backend = self.peer.backend()
        backend.promises = pa.CONVENTIONS  # A run finds the conventions that it does not keep.
        register_backend(backend)
        return backend.name, backend


@dataclass(frozen=True)
class OfOurs:
    """A backend of this library, with one mechanism."""

    backend: str
    mechanism: str

    @property
    def name(self) -> str:
        return f"precondattn/{self.backend}/{self.mechanism}"

    @property
    def library(self) -> str:
        return LIBRARIES[self.backend]

    def described(self) -> dict[str, str]:
        return {"project": "precondattn", "url": "", "date": ""}

    def version(self) -> str:
        if not named(self.library).is_installed():
            raise MissingError(f"{self.library} is not installed")
        return pa.__version__

    def limits(self) -> Mapping[str, str]:
        return {}

    def ready(self) -> tuple[str, FunctionBackend | None]:
        return self.backend, None


Contender = OfProject | OfOurs
"""One implementation of one mechanism."""


def contenders(patterns: Iterable[str] = ()) -> list[Contender]:
    """The rows in the order of the table: all, or those that match a pattern such as `"fla/*"`.

    Raises
    ------
    ValueError
        for a pattern that matches no row.
    """
    pairs = [pair for pair in product(LIBRARIES, MECHANISMS) if pair not in WITHOUT]
    every: list[Contender] = [*map(OfProject, all_peers()), *(OfOurs(*pair) for pair in pairs)]
    wanted = tuple(patterns)
    for pattern in wanted:
        if not any(fnmatchcase(each.name, pattern) for each in every):
            projects = dict.fromkeys(each.name.partition("/")[0] + "/..." for each in every)
            raise ValueError(f"{pattern!r} matches no peer; there are {', '.join(projects)}")
    return [each for each in every if any(fnmatchcase(each.name, p) for p in wanted or ("*",))]
