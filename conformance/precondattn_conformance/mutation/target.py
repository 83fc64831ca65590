"""The files named by `--mutate MODULE`: a module, a package, or the path of a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from precondattn_conformance.mutation.cuda_mutants import cuda_mutants
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.python_mutants import python_mutants

CUDA = (".cu", ".cuh")


@dataclass(frozen=True)
class Target:
    """A file whose text is mutated."""

    name: str
    """The target's name: `mykernel.lucid_solve`, or for CUDA `mykernel/cuda/solve.cu`."""
    file: Path
    package: Path
    """The folder of its top-level package."""

    @property
    def is_cuda(self) -> bool:
        return self.file.suffix in CUDA

    @property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    def mutants(self) -> list[Mutant]:
        """The mutants in the order of the text."""
        found = cuda_mutants(self.text) if self.is_cuda else python_mutants(self.text)
        return [replace(mutant, target=self.name) for mutant in found]


def targets(module: str) -> list[Target]:
    """The target of a module's name or a file's path; for a package, those of all its modules.

    Raises
    ------
    ValueError
        if there is no such file, or it is neither Python nor CUDA, or belongs to no package.
    """
    first = _target(module)
    if first.file.name != "__init__.py":
        return [first]
    files = sorted(first.file.parent.rglob("*.py"))
    return [_target(str(file)) for file in files]


def _target(module: str) -> Target:
    expected = "expected the name of a module, or the path of a .py, .cu or .cuh file of a package"
    file = Path(module)
    if file.suffix not in (".py", *CUDA):
        file = _file_of_module(module, expected)
    if not file.is_file():
        raise ValueError(f"there is no file {module!r}; {expected}")
    file = file.resolve()
    package = _package(file)
    if package is None:
        raise ValueError(f"{module!r} is in no package, a folder with __init__.py; {expected}")
    inside = file.relative_to(package.parent)
    if file.suffix in CUDA:
        return Target(inside.as_posix(), file, package)
    parts = inside.with_suffix("").parts
    return Target(".".join(parts[:-1] if parts[-1] == "__init__" else parts), file, package)


def _file_of_module(name: str, expected: str) -> Path:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"there is no Python module {name!r}; {expected}")
    return Path(spec.origin)


def _package(file: Path) -> Path | None:
    """The outermost package folder above a file; folders between may lack `__init__.py`."""
    folders = [folder for folder in file.parents if (folder / "__init__.py").is_file()]
    if not folders:
        return None
    top = folders[0]
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return top
