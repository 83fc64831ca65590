"""A project whose functions are peers: a package, or a checkout of a repository.

    FLA = Project("fla", "flash-linear-attention", url=…, package="fla-core")
    MAMBA = on_github("state-spaces/mamba@…", "2026-07-23", "Mamba")

A package is imported as installed, with or without its dependencies. A project that is not on a
package index is imported from a checkout (`files.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType

import precondattn as pa
from precondattn.arrays import Array
from precondattn.frame import full_frame
from precondattn_conformance.functions.backend import (
    FunctionBackend,
    backend_from_function,
    lacks_device,
)
from precondattn_conformance.functions.parameters import State
from precondattn_conformance.peers.arrays import Foreign
from precondattn_conformance.peers.files import (
    Checkout,
    MissingError,
    excerpt_of,
    module_of,
    names_of,
)

RELEASED = {
    ("dm-haiku", "0.0.17"): "2026-07-27",
    ("equinox", "0.13.8"): "2026-05-05",
    ("fla-core", "0.6.0"): "2026-10-23",
    ("flax", "0.12.8"): "2026-07-20",
    ("jax", "0.10.2"): "2026-06-17",
    ("keras", "3.15.1"): "2026-07-29",
    ("linear-attention-transformer", "0.19.1"): "2021-09-07",
    ("local-attention", "1.11.2"): "2025-07-16",
    ("mlstm_kernels", "2.0.6"): "2026-09-14",
    ("native-sparse-attention-pytorch", "0.2.3"): "2025-08-15",
    ("nystrom-attention", "0.0.14"): "2025-03-24",
    ("onnx", "1.23.2"): "2026-10-06",
    ("performer-pytorch", "1.1.4"): "2022-02-02",
    ("timm", "1.0.31"): "2026-11-03",
    ("tokamax", "0.0.12"): "2026-03-19",
    ("torch", "2.13.0"): "2026-07-08",
    ("transformers", "5.23.0"): "2026-11-13",
    ("x-transformers", "2.31.10"): "2026-10-23",
    ("xformers", "0.0.35"): "2026-02-20",
}
"""Release dates by package and version, from the package index; those of others are unknown."""

Function = Callable[..., object]


@dataclass(frozen=True)
class Peer:
    """A function of a project with the mechanism's input names, and its arrangement."""

    name: str
    """The peer's name, "project/function"."""
    mechanism: str
    function: Function
    project: Project
    library: str = "torch"
    layout: str = "bthd"
    heads: str = "grouped"
    multiple: int = 1
    widths: str = "any"
    dtypes: Iterable[str] | None = None
    gradient: bool = True
    state: State | tuple[str, str] | None = None
    devices: frozenset[str] = frozenset()
    """The only kinds of devices it runs on, such as `"cuda"`; empty for any."""
    promises: frozenset[str] = pa.CONVENTIONS
    """The conventions that the function keeps."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """The limits that its documentation states, by the name of the check."""

    def backend(self) -> FunctionBackend:
        """The peer as a backend.

        Raises
        ------
        MissingError
            if the project, or a part of it, is not installed.
        """
        self.project.version  # noqa: B018 - It raises the error.
        return self._backend()

    def function_of(self, mechanism: pa.Mechanism) -> Callable[..., Array]:
        """A function of the mechanism's inputs that returns the output, without a backend's checks.

        Parameters
        ----------
        mechanism : Mechanism
            The peer's mechanism, with any options that the function takes.
        """
        backend = self._backend()

        def output(**inputs: Array) -> Array:
            frame = full_frame(inputs["q"].shape[1], inputs["v"].shape[1], inputs["q"])
            return backend.call(mechanism, inputs, frame)[0]

        return output

    def lacks_device(self, device: str) -> str:
        """The reason why the peer does not run on a device, such as `"cuda:1"`; empty if it may."""
        return lacks_device(self.devices, device)

    def _backend(self) -> FunctionBackend:
        arrangement = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("function", "mechanism", "project", "limits"):
            del arrangement[name]
        return backend_from_function(self.function, self.mechanism, **arrangement)


@dataclass(frozen=True, eq=False)
class Project:
    """A public project, and the peers made of its functions."""

    name: str
    """The project's name, the first part of its peers' names."""
    title: str
    url: str
    package: str | None = None
    """The project's name on the package index."""
    checkout: Checkout | None = None
    """The checkout of a project that is not on an index."""
    date: str | None = None
    """The date (year, month, day) of the revision, or of a version not in `RELEASED`."""
    peers: dict[str, Peer] = field(default_factory=dict)

    def peer(self, mechanism: str, **arrangement: Foreign) -> Callable[[Function], Function]:
        """A decorator that makes a function a peer of this project, with the function's name.

        Parameters
        ----------
        mechanism : str
            The mechanism that it computes, as an expression.
        **arrangement
            The other fields of `Peer`.
        """

        def added(function: Function) -> Function:
            name = f"{self.name}/{function.__name__.strip('_')}"
            self.peers[name] = Peer(name, mechanism, function, self, **arrangement)
            return function

        return added

    def direct(
        self,
        name: str,
        mechanism: str,
        load: Callable[[], Function],
        takes: str,
        **arrangement: Foreign,
    ) -> None:
        """A peer whose function, which `load` returns, takes its arguments as they are.

        `takes` lists them in the order of the function: `"q k v bias? scale= **state"`. One with a
        question mark may be missing, and one with an equals sign is passed by name.
        """
        words = {word.rstrip("?="): word for word in takes.split()}
        by_position = [each for each, word in words.items() if word[0] != "*" and "=" not in word]

        def function(**arguments: Foreign) -> object:
            values = [arguments.pop(each, None) for each in by_position]
            return load()(*values, **arguments)

        kinds = {True: Parameter.VAR_KEYWORD, False: Parameter.KEYWORD_ONLY}
        function.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(
                    each.strip("*"),
                    kinds[word[0] == "*"],
                    default=None if "?" in word else Parameter.empty,
                )
                for each, word in words.items()
            ]
        )
        function.__name__ = name
        self.peer(mechanism, **arrangement)(function)

    @property
    def version(self) -> str:
        """The installed version, or the revision of the checkout.

        Raises
        ------
        MissingError
            if the project is not installed.
        """
        if self.checkout is not None:
            self.folder  # noqa: B018 - It raises the error.
            return self.checkout.revision[:12]
        assert self.package is not None
        try:
            return version(self.package)
        except PackageNotFoundError:
            raise MissingError(f"{self.package} is not installed") from None

    @property
    def day(self) -> str:
        """The day on which the version was released or the revision was made; empty if unknown."""
        if self.date is not None or self.package is None:
            return self.date or ""
        try:
            return RELEASED.get((self.package, self.version.partition("+")[0]), "")
        except MissingError:
            return ""

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

    def imported_from(self, folder: str, module: str) -> ModuleType:
        """A module of a folder, which is imported as a package without the packages above it.

        TIMM.imported_from("timm/layers", "attention")
        """
        alias = f"_precondattn_peer_{folder.replace('/', '_')}"
        if alias not in sys.modules:
            package = ModuleType(alias)
            package.__path__ = [str(self.folder / folder)]
            sys.modules[alias] = package
        return self.imported(f"{alias}.{module}")

    def excerpt(self, path: str, *names: str, imported: Mapping[str, object]) -> ModuleType:
        """Functions and classes of a file whose imports are not installed (`excerpt_of`)."""
        return excerpt_of(self.folder / path, *names, imported=imported)

    @cache  # noqa: B019 - There is one object for each project.
    def defined(
        self, path: str, name: str, *more: str, given: str = "torch", **others: Foreign
    ) -> Foreign:
        """A function or class of such a file, which calls `more` of its definitions.

        `given` has the libraries whose usual names it uses (`names_of`); `others` are more names.
        """
        imported = names_of(given) | others
        return getattr(self.excerpt(path, name, *more, imported=imported), name)


def on_github(source: str, date: str, title: str, name: str = "") -> Project:
    """A project that is not on a package index, from its source `"owner/name@revision"` on GitHub.

    Its name is by default its title, in lower case.
    """
    repository, _, revision = source.partition("@")
    name, url = name or title.lower().replace(" ", "-"), f"https://github.com/{repository}"
    return Project(name, title, url, checkout=Checkout(repository, revision), date=date)
