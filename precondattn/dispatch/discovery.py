"""The backends of this process, from entry points and `register_backend`."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

from precondattn.backend import CONVENTIONS, Backend
from precondattn.dispatch.reference import Reference
from precondattn.method_backend import DECLARED, MethodBackend, Methods
from precondattn.plug_ins import PlugIns

GROUP = "precondattn.backends"
REFERENCE = Reference()


class Discovered(NamedTuple):
    """Every backend of this process."""

    backends: tuple[Backend, ...]
    broken: tuple[tuple[str, str], ...]
    """(name, error) of the entry points that could not be imported."""

    def named(self, name: str) -> Backend:
        for backend in self.backends:
            if backend.name == name:
                return backend
        for broken, error in self.broken:
            if broken == name:
                raise ImportError(f"backend {name!r} could not be imported: {error}")
        names = ", ".join(backend.name for backend in self.backends)
        raise ValueError(f"unknown backend {name!r}; known are {names}")


_plug_ins = PlugIns(GROUP)
_registered: dict[str, Backend] = {}
_discovered: Discovered | None = None
changes = 0
"""The number of times that the set of backends has changed."""
_lock = RLock()
"""The lock for changes of `_registered` and `_discovered`; no plug-in is imported under it."""

chosen_names: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "precondattn_backends", default=None
)


def discover() -> Discovered:
    """All backends; entry points are loaded once per process."""
    global _discovered
    discovered = _discovered
    if discovered is not None:
        return discovered
    _plug_ins.load(_checked, _add)
    with _lock:
        ordered = sorted(_registered.values(), key=lambda b: (-b.preference, b.name))
        broken = tuple(sorted(_plug_ins.broken.items()))
        discovered = Discovered((*ordered, REFERENCE), broken)
        if _plug_ins.complete:
            _discovered = discovered
        return discovered


def register_backend(backend: Backend | Methods) -> None:
    """Register a backend, or an instance of a backend class, in this process.

    The effect is that of an entry point in the group `precondattn.backends`. An object with
    `supports` and `forward` in place of `prepare` is registered through `MethodBackend`.

    Raises
    ------
    TypeError
        if it lacks a name, a required method, or data that `Backend` declares.
    ValueError
        if its name is taken, if it promises an unknown convention, or if it lacks a convention and
        is not `only_by_name`.
    """
    _add(_checked(backend))


def _checked(backend: Backend | Methods) -> Backend:
    """The backend, or an instance of the class; raises a TypeError if it is not a backend."""
    if isinstance(backend, type):
        backend = backend()
    # A method that is inherited from `Backend` does not count as defined.
    has_prepare = getattr(type(backend), "prepare", None) not in (None, Backend.prepare)
    has_methods = hasattr(backend, "supports")
    if has_prepare and has_methods:
        raise TypeError(f"{backend!r} has prepare and supports, of which a backend has only one")
    missing = [] if isinstance(getattr(backend, "name", None), str) else ["name"]
    if has_methods:
        missing += [] if hasattr(backend, "runner") or hasattr(backend, "forward") else ["forward"]
    else:
        missing += [] if has_prepare else ["prepare"]
        missing += [name for name in DECLARED if not hasattr(backend, name)]
    if missing:
        raise TypeError(f"{backend!r} is not a backend: it lacks {', '.join(missing)}")
    checked: Backend = MethodBackend(backend) if has_methods else backend
    name, promises = checked.name, checked.promises
    if not isinstance(promises, set | frozenset) or not promises <= CONVENTIONS:
        raise ValueError(
            f"backend {name!r}: promises must be a set of conventions, of "
            f"{', '.join(sorted(CONVENTIONS))}; found {promises!r}"
        )
    lacking = ", ".join(sorted(CONVENTIONS - promises))
    if lacking and not checked.only_by_name:
        raise ValueError(
            f"backend {name!r} does not promise {lacking}, on which calls that name no backend "
            f"rely: it must set only_by_name = True"
        )
    return checked


def _add(backend: Backend) -> None:
    global _discovered, changes
    with _lock:
        if backend.name in {REFERENCE.name, *_registered}:
            raise ValueError(f"the backend name {backend.name!r} is taken")
        _registered[backend.name] = backend
        _discovered, changes = None, changes + 1


def unregister_backend(name: str) -> None:
    """Remove a backend that was added by `register_backend`.

    Raises
    ------
    ValueError
        if no backend of this name is registered.
    """
    global _discovered, changes
    with _lock:
        if name not in _registered:
            raise ValueError(f"no backend {name!r} is registered; there are {[*_registered]}")
        del _registered[name]
        _discovered, changes = None, changes + 1


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """A context in which calls use only these backends, in this order of preference.

    A backend for a larger group of leaf calls is still preferred to one for a smaller group. Like
    the argument `backend` of a call, it is strict: a piece that none of the backends supports
    raises `UnsupportedError`. A function compiled by `torch.compile` or `jax.jit` keeps the
    backends that were selected when it was traced; in compiled functions, pass `backend=` to the
    call.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q = k = v = np.ones((1, 3, 1, 4))
    >>> with pa.use_backend("reference"):
    ...     out = pa.lucid(q, k, v)
    """
    _check_names(names)
    token = chosen_names.set(names)
    try:
        yield
    finally:
        chosen_names.reset(token)


def allowed_backends(backend: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The names that a call is restricted to by its `backend=` or by `use_backend`, or None."""
    if backend is None:
        return chosen_names.get()
    names = (backend,) if isinstance(backend, str) else backend
    _check_names(names)
    return tuple(names)


def _check_names(names: tuple[str, ...]) -> None:
    is_sequence = isinstance(names, tuple | list)
    if not is_sequence or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"backend must be a name or a tuple of names; found {names!r}")
    for name in names:
        discover().named(name)
