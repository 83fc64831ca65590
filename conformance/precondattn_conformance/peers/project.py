"""A project whose functions are peers: a package, or a checkout of a repository.

    FLA = Project("fla", "flash-linear-attention", package="fla-core", url=…)
    MAMBA = Project("mamba", "Mamba", repository="state-spaces/mamba", revision="…", url=…)

A package is imported as it is installed, with its dependencies or without. What is on no package
index is imported from a checkout that the user has (`checkout.py`).
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
    """Where functions come from, and the peers made of them."""

    name: str
    """The first part of its peers' names."""
    title: str
    url: str
    package: str | None = None
    """Its name on the package index."""
    repository: str | None = None
    """ "owner/name" on GitHub, for what is on no index."""
    revision: str | None = None
    date: str | None = None
    """Of the revision, or of a version that `released.py` has not: year, month and day."""
    peers: dict[str, Peer] = field(default_factory=dict)

    def peer(self, mechanism: str, **arrangement: Foreign) -> Callable[[Function], Function]:
        """Make a function a peer of this project, named as the function.

        Parameters
        ----------
        mechanism : str
            What it computes, as an expression.
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
        """Of what is installed, or the revision of the checkout.

        Raises
        ------
        MissingError
            where it is not there.
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
        """On which its version was released, or its revision was made; empty if unknown."""
        if self.date is not None or self.package is None:
            return self.date or ""
        try:
            return day_of(self.package, self.version)
        except MissingError:
            return ""

    @property
    def checkout(self) -> Checkout | None:
        """Of a project that is on no package index."""
        if self.repository is None or self.revision is None:
            return None
        return Checkout(self.repository, self.revision)

    @property
    def folder(self) -> Path:
        """That of the checkout; of a package, where its files are installed.

        Raises
        ------
        MissingError
            where it is not there, or has another revision.
        """
        if self.checkout is not None:
            return self.checkout.folder
        assert self.package is not None
        self.version  # noqa: B018 - It raises the error.
        return Path(str(distribution(self.package).locate_file("")))

    def imported(self, module: str) -> ModuleType:
        """A module of the package; or a file given by its path in the folder, without its package.

        Raises
        ------
        MissingError
            where it is not there, or one of its own imports is not.
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
