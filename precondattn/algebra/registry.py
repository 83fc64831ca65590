"""The registry of mechanisms that an expression can name.

A mechanism class registers itself when it is defined. Third-party mechanisms are found through the
entry-point group `precondattn.mechanisms`, whose entries name a class or a module that defines
classes.
"""

from __future__ import annotations

from dataclasses import Field
from threading import Lock
from typing import Any, ClassVar, Protocol

from precondattn.plug_ins import PlugIns

GROUP = "precondattn.mechanisms"

AnyMechanism = Any
"""A mechanism, in modules that can not import the class `Mechanism`."""
MechanismClass = Any
"""A class of mechanisms, in modules that can not import `Mechanism`."""


class Registered(Protocol):
    """The attributes of a mechanism class that the registry uses."""

    name: ClassVar[str]
    role: ClassVar[str]
    variants: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


classes: dict[str, type[Registered]] = {}
"""The classes by name, including pieces, without those of plug-ins that are not loaded."""
_lock = Lock()
_plug_ins = PlugIns(GROUP)

broken = _plug_ins.broken


def register(cls: type[Registered]) -> None:
    """Register a class under its name, which must not belong to another class."""
    with _lock:
        other = classes.setdefault(cls.name, cls)
        # A class may be defined twice, by reloading its module or by dataclass(slots=True).
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            owner = f"{other.__module__}.{other.__name__}"
            raise ValueError(f"the name {cls.name!r} is taken by {owner}")
        classes[cls.name] = cls


def unregister(name: str) -> None:
    """Remove a mechanism, for example to define its class again in a notebook.

    Raises
    ------
    ValueError
        if no mechanism has this name.
    """
    if name not in classes:
        raise ValueError(f"there is no mechanism {name!r}; known are {', '.join(sorted(classes))}")
    del classes[name]


def known(name: str) -> type[Registered] | None:
    """The class of this name, or None; without loading plug-ins."""
    return classes.get(name)


def find(name: str) -> type[Registered] | None:
    """The class of this name, or None; plug-ins are loaded if necessary."""
    if name not in classes:
        _plug_ins.load()
    return classes.get(name)


def registered() -> dict[str, type[Registered]]:
    """All known classes by name, including pieces."""
    _plug_ins.load()
    return dict(classes)


def nameable() -> dict[str, type[Registered]]:
    """The classes whose names an expression may have: all but pieces."""
    return {name: cls for name, cls in registered().items() if cls.role != "piece"}
