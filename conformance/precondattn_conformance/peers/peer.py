"""One public implementation of a mechanism, as a backend, and for `bench`."""

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
    """A function of a project with our names of inputs, and how it wants its arrays."""

    name: str
    """ "project/function"."""
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
    """The conventions that it keeps."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """What its own documentation says that it does not compute, by the name of the check."""

    def backend(self) -> FunctionBackend:
        """The peer as a backend.

        Raises
        ------
        MissingError
            where the project, or a part of it, is not there.
        """
        self.project.version  # noqa: B018 - It raises the error.
        return self._backend()

    def function_of(self, mechanism: pa.Mechanism) -> Callable[..., Array]:
        """The function of our inputs by name that returns our output, without a backend's checks.

        Parameters
        ----------
        mechanism : Mechanism
            The peer's own, with any options that the function takes.
        """
        backend = self._backend()

        def output(**inputs: Array) -> Array:
            q, v = inputs["q"], inputs["v"]
            frame = full_frame(q.shape[1], v.shape[1], q)
            return backend.call(mechanism, inputs, frame)[0]

        return output

    def lacks_device(self, device: str) -> str:
        """Why it does not run on a device, such as `"cpu"` or `"cuda:1"`; empty if it may."""
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
