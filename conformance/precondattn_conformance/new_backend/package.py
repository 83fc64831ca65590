"""The package: its files, their templates, and where they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from precondattn_conformance.new_backend.names import checked

TEMPLATES = Path(__file__).with_name("templates")


class TemplateLibrary(NamedTuple):
    """What differs between the array libraries."""

    title: str
    requirement: str
    solve: str
    """The file name of the template of the solve."""
    dtypes: tuple[str, ...]


WIDE = ("float32", "float64")
HALF = ("float16", "bfloat16")

LIBRARIES = {
    "torch": TemplateLibrary("PyTorch", "torch>=2.6", "lucid_solve_torch.py.j2", WIDE + HALF),
    "jax": TemplateLibrary("JAX", "jax>=0.6", "lucid_solve_jax.py.j2", WIDE + HALF),
    "numpy": TemplateLibrary("NumPy", "numpy>=2.0", "lucid_solve_numpy.py.j2", WIDE),
    "cupy": TemplateLibrary("CuPy", "cupy-cuda13x>=14", "lucid_solve_numpy.py.j2", WIDE),
}


def new_backend(name: str, library: str = "torch", directory: Path | None = None) -> list[Path]:
    """Write the package of a new backend, and return its files.

    Parameters
    ----------
    name : str
        The name of the distribution, of the backend and, with underscores, of the module.
    library : {"torch", "jax", "numpy", "cupy"}
        The library whose arrays it supports.
    directory : Path, optional
        The folder to write to; by default one of that name in the current folder. It must be empty
        or not exist.

    Raises
    ------
    ValueError
        if the name is invalid or taken, the library is unknown, or the directory is not empty.
        Nothing has been written then.
    ImportError
        if Jinja2 is not installed.
    """
    if library not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}; found {library!r}")
    checked(name)
    root = Path(name) if directory is None else directory
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} exists and is no directory")
    if root.is_dir() and any(root.iterdir()):
        raise ValueError(f"the directory {root} is not empty, and nothing is overwritten")
    files = {root / path: text for path, text in _rendered(name, library)}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return list(files)


def _rendered(name: str, library: str) -> Iterator[tuple[str, str]]:
    """Every file: its path in the package, and its text."""
    names, chosen = checked(name), LIBRARIES[library]
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
        autoescape=False,  # It writes Python, TOML and YAML.
    )
    words = {**names._asdict(), **chosen._asdict(), "library": library}
    source = f"src/{names.module}"
    for path, template in {
        "pyproject.toml": "pyproject.toml.j2",
        "README.md": "README.md.j2",
        ".gitignore": "gitignore.j2",
        f"{source}/__init__.py": "init.py.j2",
        f"{source}/backend.py": "backend.py.j2",
        f"{source}/lucid_solve.py": chosen.solve,
        "conformance/xfail.txt": "xfail.txt.j2",
        "conformance/skip.txt": "skip.txt.j2",
        ".github/workflows/conformance.yml": "workflow.yml.j2",
    }.items():
        yield path, environment.get_template(template).render(words)
