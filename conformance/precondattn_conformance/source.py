"""The source of a backend under test that is not installed: a module or a peer.

    --import my_kernels:chunk_kda --mechanism kda
    --peer fla/kda_chunk

Each process of a run registers the backend from the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import precondattn as pa
from precondattn.dispatch.discovery import register_backend
from precondattn_conformance.functions.backend import FunctionBackend, backend_from_function
from precondattn_conformance.peers.everyone import peer_named

Option = Any
"""A text, number or flag that says how a function is called."""
Arrangement = dict[str, Any]
"""Such options by name."""


@dataclass(frozen=True)
class Source:
    """A peer by its name, or a function, backend or class as "module:name"."""

    text: str
    mechanism: str | None = None
    """The mechanism that a function computes; a peer or a backend declares it itself."""
    layout: str = "bthd"
    heads: str = "grouped"
    multiple: int = 1
    widths: str = "any"
    gradient: bool = True

    def register(self) -> pa.Backend:
        """Register the backend in this process and return it."""
        backend = self.backend
        if isinstance(backend, FunctionBackend):
            backend.registered_by = self._code
        register_backend(backend)
        return backend

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism that a function computes; empty for a backend."""
        backend = self.backend
        return (str(backend.mechanism),) if isinstance(backend, FunctionBackend) else ()

    @cached_property
    def backend(self) -> pa.Backend:
        """The backend.

        Raises
        ------
        ValueError
            if the text names nothing, or a function is given without a mechanism.
        ImportError
            if the module, or a peer's project, can not be imported.
        """
        if ":" not in self.text:
            return peer_named(self.text).backend()
        found = self._imported()
        if hasattr(found, "prepare") or hasattr(found, "supports"):
            backend: pa.Backend = found() if isinstance(found, type) else found
            return backend
        if not callable(found):
            raise ValueError(
                f"{self.text} must be a function or a backend; found {type(found).__name__}"
            )
        if self.mechanism is None:
            raise ValueError(f"--import {self.text} is a function: --mechanism says of what")
        arrangement: Arrangement = {name: getattr(self, name) for name in ARRANGEMENT}
        return backend_from_function(found, self.mechanism, **arrangement)

    def _imported(self) -> Any:
        module, _, name = self.text.partition(":")
        folder = str(Path.cwd())
        if folder not in sys.path:  # As with `python -m`.
            sys.path.insert(0, folder)
        found: Any = import_module(module)
        for part in name.split("."):
            if not hasattr(found, part):
                raise ValueError(f"{module} has no {name!r}")
            found = getattr(found, part)
        return found

    @property
    def _code(self) -> str:
        """Python code that registers the backend again, for a snippet."""
        if ":" not in self.text:
            return (
                "from precondattn_conformance.peers.everyone import peer_named\n\n"
                f"register_backend(peer_named({self.text!r}).backend())\n"
            )
        module, _, name = self.text.partition(":")
        differing = (
            f", {key}={getattr(self, key)!r}"
            for key in ARRANGEMENT
            if getattr(self, key) != getattr(Source, key)
        )
        arguments = "".join((f"{name}, {self.mechanism!r}", *differing))
        return (
            f"from {module} import {name}\n"
            "from precondattn_conformance import backend_from_function\n\n"
            f"register_backend(backend_from_function({arguments}))\n"
        )


ARRANGEMENT = ("layout", "heads", "multiple", "widths", "gradient")
"""The fields of `Source` that are options of `backend_from_function`."""


def source_of(
    peer: str | None, imported: str | None, mechanisms: Sequence[str], **arrangement: Option
) -> Source | None:
    """The source that command-line options name, with its `ARRANGEMENT`; None if they name none.

    Raises
    ------
    ValueError
        if options can not be combined.
    """
    if peer is not None and imported is not None:
        raise ValueError(f"--peer {peer} does not go with --import {imported}: one is under test")
    if imported is None:
        for name, value in arrangement.items():
            if value != getattr(Source, name):
                raise ValueError(f"--{name} needs --import; found {value!r}")
        return None if peer is None else Source(peer)
    if ":" not in imported:
        raise ValueError(f"--import is given as module:name; found {imported!r}")
    if len(mechanisms) > 1:
        raise ValueError(f"--import needs one mechanism; found {', '.join(mechanisms)}")
    mechanism = mechanisms[0] if mechanisms else None
    return Source(imported, mechanism, **arrangement)
