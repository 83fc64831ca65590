"""Files of public projects: checkouts of repositories, and single files.

Checkouts are in the folder named by the environment variable `PRECONDATTN_CHECKOUTS`, each under
the name of its repository, at the revision for which its peers were written. The packages of single
files may import modules that are not installed.
"""

from __future__ import annotations

import ast
import functools
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from subprocess import run
from threading import Lock
from types import CodeType, ModuleType


class MissingError(ImportError):
    """Raised if a project is not installed, or a part of it can not be imported."""


def module_of(file: Path) -> ModuleType:
    """A file imported as a module, with its imports."""
    name = f"_precondattn_peer{file.with_suffix('').as_posix().replace('/', '_').replace('.', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, _there(file))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


ONE_PARSES = Lock()
"""A lock for parsing. CPython counts the depth of syntax trees per interpreter, not per thread: if
two threads parse at the same time, one raises a SystemError."""


def excerpt_of(file: Path, *names: str, imported: Mapping[str, object]) -> ModuleType:
    """Selected functions and classes of a file whose imports are not installed.

    Only these definitions are executed, unchanged; the file's imports and other statements are not.
    Decorators are left out, since they compile or register. Annotations are not evaluated.

    Parameters
    ----------
    file : Path
    *names : str
        The names of top-level definitions, including those that they call.
    imported : mapping
        Other objects that they use, by the names in the file: `{"torch": torch}`.

    Returns
    -------
    module
        A module with the definitions as its attributes.

    Raises
    ------
    MissingError
        if there is no such file, or a definition is missing.
    """
    module = ModuleType(f"excerpt of {file.name}")
    vars(module).update(imported)
    exec(_code_of(file, names), vars(module))
    return module


@cache
def _code_of(file: Path, names: tuple[str, ...]) -> CodeType:
    """The compiled definitions of an excerpt, cached because adapters request them in each call."""
    text = _there(file).read_text(encoding="utf-8")
    with ONE_PARSES:
        parsed = ast.parse(text)
    defined = {
        node.name: node for node in parsed.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    missing = [name for name in names if name not in defined]
    if missing:
        raise MissingError(f"{file} defines no {', '.join(missing)}")
    body: list[ast.stmt] = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0)]
    for name in names:
        defined[name].decorator_list = []
        body.append(defined[name])
    with ONE_PARSES:
        return compile(ast.fix_missing_locations(ast.Module(body, [])), file, "exec")


def _there(file: Path) -> Path:
    if not file.is_file():
        raise MissingError(f"there is no file {file}")
    return file


FOLDER = "PRECONDATTN_CHECKOUTS"
"""The environment variable that names the folder of checkouts."""


@dataclass(frozen=True)
class Checkout:
    """A repository at a revision."""

    repository: str
    """ "owner/name" on GitHub."""
    revision: str

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]

    @property
    def folder(self) -> Path:
        """The folder of the checkout.

        Raises
        ------
        MissingError
            if it does not exist, or git reports another revision. A folder without git data is not
            checked.
        """
        root = os.environ.get(FOLDER)
        if root is None:
            raise MissingError(f"{FOLDER} names no folder with a checkout of {self.repository}")
        folder = Path(root) / self.name
        if not folder.is_dir():
            raise MissingError(f"there is no checkout of {self.repository} in {root}")
        if (folder / ".git").exists():
            found = _revision_of(folder)
            if found != self.revision:
                raise MissingError(
                    f"{folder} has revision {found[:12]} of {self.repository}; its peers are for "
                    f"{self.revision[:12]} (git -C {folder} checkout {self.revision})"
                )
        return folder

    @property
    def lines(self) -> str:
        """Shell lines that create the checkout."""
        folder = f'"${FOLDER}/{self.name}"'
        return (
            f"git clone --quiet --filter=blob:none https://github.com/{self.repository} {folder}\n"
            f"git -C {folder} checkout --quiet {self.revision}"
        )


def _revision_of(folder: Path) -> str:
    """The revision that git has checked out in a folder."""
    told = run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or f"unknown to git ({told.stderr.strip()})"


def names_of(libraries: str) -> dict[str, object]:
    """The names that public files import, for excerpts of them: `"torch einops"`.

    Raises
    ------
    MissingError
        if einops is not installed.
    """
    names: dict[str, object] = {"math": math}
    if "torch" in libraries:
        import torch

        names |= {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
        names |= {"Tensor": torch.Tensor, "einsum": torch.einsum}
    if "jax" in libraries:
        import jax

        names |= {"jax": jax, "jnp": jax.numpy, "lax": jax.lax, "einsum": jax.numpy.einsum}
        names["partial"] = functools.partial
    if "einops" in libraries:
        try:
            from einops import rearrange, reduce, repeat
        except ImportError:
            raise MissingError("einops is not installed") from None
        names |= {"rearrange": rearrange, "repeat": repeat, "reduce": reduce}
    return names
