"""The hash of a kernel's code: the module of its class, and the package modules it imports.

The hash includes the JSON files and the CUDA sources that these modules name, with their headers,
but no comments, docstrings and empty lines.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

CUDA_FOLDER = "cuda"
"""The name of a package's folder with CUDA sources."""
INCLUDE = re.compile(r'#include "([\w.]+)"')
CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
DIGITS = 12


@cache
def code_of(entry: str) -> str:
    """The hash of the code of a kernel class `"module:Class"`.

    Examples
    --------
    >>> len(code_of("json.decoder:JSONDecoder"))
    12
    """
    module = entry.partition(":")[0]
    digest = hashlib.sha256()
    for name, text in sorted(_sources(module).items()):
        digest.update(f"{name}\n{text}\n".encode())
    return digest.hexdigest()[:DIGITS]


def _sources(module: str) -> dict[str, str]:
    """The text of each file of the package that the module depends on, by file name."""
    package = module.partition(".")[0]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"there is no package {package!r}, whose kernels are to be read")
    root = Path(spec.origin).parent
    texts: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _path(root, name)
        if name in texts or path is None:
            continue
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        texts[name] = _stripped(source, tree)
        waiting += [each for each in _imported(tree) if each.partition(".")[0] == package]
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        names = {each for each in strings if isinstance(each, str)}
        texts |= _cuda_sources(root / CUDA_FOLDER, names)
        for data in (path.parent / each for each in names if each.endswith(".json")):
            if data.is_file():
                texts[data.name] = json.dumps(json.loads(data.read_text(encoding="utf-8")))
    return texts


def _path(root: Path, module: str) -> Path | None:
    """The file of a module of the package in `root`; None for a function or a class."""
    path = root.joinpath(*module.split(".")[1:])
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def _imported(tree: ast.AST) -> Iterator[str]:
    """All modules that are imported anywhere in a file, and imported names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _stripped(source: str, tree: ast.AST) -> str:
    """A Python file without comments, docstrings and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _cuda_sources(folder: Path, names: set[str]) -> dict[str, str]:
    """The CUDA sources that a module names in its strings, and all files that they include."""
    waiting = [f"{each}.cu" for each in names if each.isidentifier()]
    texts: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in texts or not (folder / name).is_file():
            continue
        source = (folder / name).read_text(encoding="utf-8")
        lines = CUDA_COMMENT.sub("", source).splitlines()
        texts[name] = "\n".join(line.rstrip() for line in lines if line.strip())
        waiting += INCLUDE.findall(source)
    return texts
