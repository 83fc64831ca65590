"""A public implementation of a mechanism, usable as a backend and in `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import precondattn as pa
from precondattn.arrays import Array
from precondattn.frame import full_frame
from precondattn_conformance.functions.backend import (
    FunctionBackend,
    backend_from_function,
    lacks_device,
)
from precondattn_conformance.functions.parameters import State

if TYPE_CHECKING:
    from precondattn_conformance.peers.project import Project

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
            q, v = inputs["q"], inputs["v"]
            frame = full_frame(q.shape[1], v.shape[1], q)
            return backend.call(mechanism, inputs, frame)[0]

        return output

    def lacks_device(self, device: str) -> str:
        """The reason why the peer does not run on a device, such as `"cuda:1"`; empty if it may."""
        return lacks_device(self.devices, device)

    def _backend(self) -> FunctionBackend:
        return backend_from_function(
            self.function,
            self.mechanism,
            name=self.name,
            library=self.library,
            layout=self.layout,
            heads=self.heads,
            multiple=self.multiple,
            widths=self.widths,
            dtypes=self.dtypes,
            gradient=self.gradient,
            state=self.state,
            devices=self.devices,
            promises=self.promises,
        )
