"""The files of the generated package, and their templates."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from precondattn.dispatch.discovery import discover
from precondattn_conformance import libraries

TEMPLATES = Path(__file__).with_name("templates")
FORM = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
"""One name for pip, for `import` (with underscores) and for `--backend`."""


class TemplateLibrary(NamedTuple):
    """The texts that depend on the array library."""

    title: str
    requirement: str
    dtypes: tuple[str, ...]
    solve: str
    """The template of LUCID's solve, which reads and writes blocks differently in each library."""


WIDE = ("float32", "float64")
HALF = ("float16", "bfloat16")

LIBRARIES = {
    "torch": TemplateLibrary("PyTorch", "torch>=2.11", WIDE + HALF, "lucid_solve_torch.py.j2"),
    "jax": TemplateLibrary("JAX", "jax>=0.10", WIDE + HALF, "lucid_solve_jax.py.j2"),
    "numpy": TemplateLibrary("NumPy", "numpy>=2.0", WIDE, "lucid_solve_numpy.py.j2"),
    "cupy": TemplateLibrary("CuPy", "cupy-cuda13x>=14", WIDE, "lucid_solve_numpy.py.j2"),
}


class TemplateMechanism(NamedTuple):
    """The README's texts for each mechanism."""

    computes: str
    used_by: str
    example: str


MECHANISMS = {
    "lucid_solve": TemplateMechanism(
        "solves LUCID's triangular system, $y = (I + \\operatorname{stril} Φ)^{-1} v$",
        "`lucid`, `lucid(laser)` and every other mechanism that contains the solve",
        "pa.lucid(q, k, v, ",
    ),
    "gated_delta": TemplateMechanism(
        "computes the gated delta rule, with steps from one state to the next",
        "`gated_delta`, `ccq(gated_delta)` and every other mechanism that contains it",
        "pa.gated_delta(q, k, v, g=g, beta=beta, ",
    ),
    "softmax": TemplateMechanism(
        "computes softmax attention",
        "`softmax`, `lucid` and every other mechanism that contains it",
        "pa.softmax(q, k, v, ",
    ),
}


def new_backend(
    name: str,
    library: str = "torch",
    directory: Path | None = None,
    mechanism: str = "lucid_solve",
) -> list[Path]:
    """Write the package of a new backend, and return its files.

    Parameters
    ----------
    name : str
        The name of the distribution, of the backend and, with underscores, of the module.
    library : {"torch", "jax", "numpy", "cupy"}
        The library whose arrays it supports.
    directory : Path, optional
        The folder to write to; by default a folder with that name in the current folder. It must be
        empty or not exist.
    mechanism : {"lucid_solve", "gated_delta", "softmax"}
        The mechanism or piece that it computes; the template has a plain algorithm.

    Raises
    ------
    ValueError
        if the name is invalid or taken, the library or the mechanism is unknown, or the directory
        is not empty. Nothing is written in these cases.
    ImportError
        if Jinja2 is not installed.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}; found {library!r}")
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}; found {mechanism!r}")
    spellings(name)
    root = Path(name) if directory is None else directory
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} exists and is no directory")
    if root.is_dir() and any(root.iterdir()):
        raise ValueError(f"the directory {root} is not empty, and nothing is overwritten")
    files = {root / path: text for path, text in _rendered(name, library, mechanism)}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return list(files)


def spellings(name: str) -> dict[str, str]:
    """A name as the backend and the distribution have it, as a module, and as a class.

    Raises
    ------
    ValueError
        if the name is not valid for a distribution and a module, or is already used.
    """
    if not FORM.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid name for a backend: use lower-case letters and digits, "
            f"with single hyphens or underscores between them, beginning with a letter"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module):
        raise ValueError(f"{name!r} is a Python keyword, and can not be imported")
    installed = discover()
    if name in [*(b.name for b in installed.backends), *(broken for broken, _ in installed.broken)]:
        raise ValueError(f"the backend name {name!r} is taken by an installed backend")
    taken, spec = sys.stdlib_module_names | {cls.module for cls in libraries.ALL}, find_spec(module)
    if module in taken or (spec is not None and spec.origin is not None):  # A folder has no origin.
        raise ValueError(f"{name!r} would hide the module {module!r}, or be hidden by it")
    class_name = "".join(part.capitalize() for part in re.split("[-_]", name))
    return {"name": name, "module": module, "class_name": class_name}


def _rendered(name: str, library: str, mechanism: str) -> Iterator[tuple[str, str]]:
    """The path in the package and the text of each file."""
    names, chosen = spellings(name), LIBRARIES[library]
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise ImportError(
            "new-backend needs jinja2, which is not installed; "
            "install precondattn with its extra 'conformance'"
        ) from None
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # The templates are of Python, TOML and YAML.
    )
    words = {
        **names,
        **chosen._asdict(),
        **MECHANISMS[mechanism]._asdict(),
        "library": library,
        "mechanism": mechanism,
    }
    computation = chosen.solve if mechanism == "lucid_solve" else f"{mechanism}.py.j2"
    source = f"src/{names['module']}"
    for path, template in {
        "pyproject.toml": "pyproject.toml.j2",
        "README.md": "README.md.j2",
        ".gitignore": "gitignore.j2",
        f"{source}/__init__.py": "init.py.j2",
        f"{source}/backend.py": f"{mechanism}_backend.py.j2",
        f"{source}/{mechanism}.py": computation,
        "conformance/xfail.txt": "xfail.txt.j2",
        "conformance/skip.txt": "skip.txt.j2",
        ".github/workflows/conformance.yml": "workflow.yml.j2",
    }.items():
        yield path, environment.get_template(template).render(words)
