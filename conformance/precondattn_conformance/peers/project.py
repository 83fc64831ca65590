"""A project whose functions are peers: a package, or a checkout of a repository.

    FLA = Project("fla", "flash-linear-attention", package="fla-core", url=…)
    MAMBA = Project("mamba", "Mamba", repository="state-spaces/mamba", revision="…", url=…)

A package is imported as installed, with or without its dependencies. A project that is not on a
package index is imported from a checkout (`checkout.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from types import ModuleType

from precondattn_conformance.peers.arrays import Foreign
from precondattn_conformance.peers.checkout import Checkout
from precondattn_conformance.peers.files import MissingError, excerpt_of, module_of
from precondattn_conformance.peers.peer import Function, Peer
from precondattn_conformance.peers.released import day_of


@dataclass(frozen=True)
class Project:
    """A public project, and the peers made of its functions."""

    name: str
    """The project's name, the first part of its peers' names."""
    title: str
    url: str
    package: str | None = None
    """The project's name on the package index."""
    repository: str | None = None
    """"owner/name" on GitHub, for a project that is not on an index."""
    revision: str | None = None
    date: str | None = None
    """The date (year, month, day) of the revision, or of a version not in `released.py`."""
    peers: dict[str, Peer] = field(default_factory=dict)

    def peer(self, mechanism: str, **arrangement: Foreign) -> Callable[[Function], Function]:
        """A decorator that makes a function a peer of this project, with the function's name.

        Parameters
        ----------
        mechanism : str
            The mechanism that it computes, as an expression.
        **arrangement
            Parameters of `backend_from_function`, and `limits` (`peer.py`).
        """

        def added(function: Function) -> Function:
            name = f"{self.name}/{function.__name__.strip('_')}"
            self.peers[name] = Peer(name, mechanism, function, self, **arrangement)
            return function

        return added

    @property
    def version(self) -> str:
        """The installed version, or the revision of the checkout.

        Raises
        ------
        MissingError
            if the project is not installed.
        """
        if self.package is not None:
            try:
                return version(self.package)
            except PackageNotFoundError:
                raise MissingError(f"{self.package} is not installed") from None
        self.folder  # noqa: B018 - It raises the error.
        return str(self.revision)[:12]

    @property
    def day(self) -> str:
        """The day on which the version was released or the revision was made; empty if unknown."""
        if self.date is not None or self.package is None:
            return self.date or ""
        try:
            return day_of(self.package, self.version)
        except MissingError:
            return ""

    @property
    def checkout(self) -> Checkout | None:
        """The checkout of a project that is not on a package index; else None."""
        if self.repository is None or self.revision is None:
            return None
        return Checkout(self.repository, self.revision)

    @property
    def folder(self) -> Path:
        """The folder of the checkout, or the folder in which a package's files are installed.

        Raises
        ------
        MissingError
            if the project is not installed, or has another revision.
        """
        if self.checkout is not None:
            return self.checkout.folder
        assert self.package is not None
        self.version  # noqa: B018 - It raises the error.
        return Path(str(distribution(self.package).locate_file("")))

    def imported(self, module: str) -> ModuleType:
        """A module of the package, or a file given by its path in the folder, without its package.

        Raises
        ------
        MissingError
            if the module, or one of its imports, is not installed.
        """
        try:
            if module.endswith(".py"):
                return module_of(self.folder / module)
            return import_module(module)
        except MissingError:
            raise
        except ImportError as error:
            raise MissingError(f"{module} could not be imported: {error}") from error

    def excerpt(self, path: str, *names: str, given: Mapping[str, object]) -> ModuleType:
        """Functions and classes of a file whose imports are not installed (`excerpt_of`)."""
        return excerpt_of(self.folder / path, *names, given=given)
