"""The folder to carry to a GPU machine without a network, checked before it is carried there.

    python -m precondattn_gpu.packing FOLDER --machine conformance/gpu/machine.txt --extra bench

Every requirement of every wheel has to be met by another wheel of the folder, or by a package of
the machine. The machine's packages are a file of requirements: `name==version`, or `name` where the
version is unknown. The extras are those of our own wheel. The assembler and the warm cache are in
the folder too (`carried`). The check downloads nothing.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from precondattn_gpu.carried import CACHE_FILE, PTXAS_FILE

OURS = "precondattn"
PYTHON = "3.12"
ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
"""Environment markers of the GPU machine, as used in requirements."""
MOST_BYTES = 44 << 20
"""The largest allowed size of the folder, in bytes."""

Machine = Mapping[str, Version | None]
"""The version of each package that the machine has; None if it is unknown."""


def machine_of(path: Path) -> Machine:
    """The packages listed in a file.

    Raises
    ------
    ValueError
        for a line that is neither `name` nor `name==version`.
    """
    packages: dict[str, Version | None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:==([^\s=,;]+))?", text)
        if match is None:
            raise ValueError(
                f"{path}, line {number}: expected name or name==version, found {text!r}"
            )
        packages[canonicalize_name(match[1])] = Version(match[2]) if match[2] else None
    return packages


def metadata_of(wheel: Path) -> Metadata:
    """The name, version and requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        return Metadata.from_email(archive.read(name), validate=False)


def problems(carried: Iterable[Metadata], machine: Machine, extras: Iterable[str]) -> list[str]:
    """The reasons why these wheels can not be used on the machine; empty if they can."""
    found: list[str] = []
    wheels: dict[str, Metadata] = {}
    name: str
    for wheel in carried:
        name = canonicalize_name(wheel.name)
        if name in wheels:
            found.append(f"{name}: versions {wheels[name].version} and {wheel.version} are carried")
        elif name in machine:
            version = machine[name] or "in an unknown version"
            found.append(f"{name}: is carried, and the machine has it: {version}")
        wheels[name] = wheel
    if OURS not in wheels:
        return [*found, f"{OURS}: no wheel of it is carried"]
    if unknown := {*extras} - {*(wheels[OURS].provides_extra or ())}:
        found.append(f"{OURS}: has no extra {', '.join(sorted(unknown))}")
    for name, wheel in wheels.items():
        if wheel.requires_python and PYTHON not in wheel.requires_python:
            found.append(f"{name}: requires Python {wheel.requires_python}, not {PYTHON}")
    asked = [(name, extra) for name in wheels for extra in ("", *(extras if name == OURS else ()))]
    seen = {*asked}
    while asked:
        name, extra = asked.pop()
        for need in _needs(wheels[name], extra):
            other = canonicalize_name(need.name)
            found.append(_unmet(name, need, wheels, machine))
            more = {(other, e) for e in need.extras} - seen if other in wheels else set()
            asked += more
            seen |= more
    return [*dict.fromkeys(problem for problem in found if problem)]


def _needs(wheel: Metadata, extra: str) -> Iterator[Requirement]:
    """The requirements of a wheel with one of its extras, or with none."""
    for need in wheel.requires_dist or ():
        if need.marker is None or need.marker.evaluate({**ENVIRONMENT, "extra": extra}):
            yield need


def _unmet(name: str, need: Requirement, wheels: Mapping[str, Metadata], machine: Machine) -> str:
    """The reason why a requirement is not met; empty if it is met or the version is unknown."""
    other = canonicalize_name(need.name)
    if other not in wheels and other not in machine:
        return f"{other}: {name} requires {need}, which is neither carried nor on the machine"
    version = wheels[other].version if other in wheels else machine[other]
    if version is None or need.specifier.contains(version, prereleases=True):
        return ""
    place = "carried" if other in wheels else "on the machine"
    return f"{other}: {name} requires {need}, and {version} is {place}"


def main(
    folder: Annotated[Path, typer.Argument(help="the folder of wheels")],
    machine: Annotated[Path, typer.Option(help="the file of the machine's packages")],
    extra: Annotated[list[str] | None, typer.Option(help="of our wheel; may be repeated")] = None,
) -> None:
    """Fail if a folder can not be used on the machine, and say why; else list its files."""
    wheels = sorted(folder.glob("*.whl"))
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    size = sum(sizes.values())
    found = problems(map(metadata_of, wheels), machine_of(machine), extra or ())
    found += [f"{name}: is not carried" for name in (PTXAS_FILE, CACHE_FILE) if name not in sizes]
    if size > MOST_BYTES:
        found.append(f"{folder}: {size} bytes, of {MOST_BYTES}")
    for problem in found:
        typer.echo(problem, err=True)
    if found:
        raise typer.Exit(1)
    for name, each in sizes.items():
        typer.echo(f"{each / 2**20:6.1f} MiB  {name}")
    typer.echo(f"{size / 2**20:6.1f} MiB, {len(wheels)} wheels: every requirement is met")


if __name__ == "__main__":
    typer.run(main)
