"""What `import precondattn` imports, and the package's metadata and docstrings."""

import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import precondattn as pa
from precondattn.version import numbers_of

ROOT = Path(__file__).parents[2]

IMPORTED = """
import sys
import numpy, array_api_compat
before = set(sys.modules)
import precondattn
new = {name.partition(".")[0] for name in set(sys.modules) - before}
frameworks = {"torch", "jax", "jaxlib", "cupy", "array_api_strict", "typer", "rich", "pytest"}
assert not new & frameworks, new & frameworks
assert new - {"precondattn"} <= set(sys.stdlib_module_names) | {"org"}, new
slow = {"importlib.metadata", "email", "asyncio"} & (set(sys.modules) - before)
assert not slow, slow
late = {"precondattn.execution.run", "precondattn.dispatch.plan"} & set(sys.modules)
assert not late, late
"""


def test_importing_the_package_imports_no_framework_and_no_slow_module():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


EVERY_VERB = """
import sys
import {library} as xp
import precondattn as pa

x = xp.ones((3, 1, 2, 1, 4))
for mechanism in (pa.Lucid(), pa.Linear()):
    mechanism(*x)
    mechanism.vjp(*x)[1](x[0])
    cache = mechanism.init_cache(*x, capacity=4)
    mechanism.extend(cache, *x)
    if isinstance(mechanism, pa.Linear):
        mechanism.extend_vjp(cache, *x)[2](x[0])
    if "jax" in sys.modules:
        sys.modules["jax"].jit(lambda x: mechanism.extend(cache, *x))(x)
found = {others} & set(sys.modules)
assert not found, found
"""


@pytest.mark.parametrize(
    ("library", "others"),
    [("numpy", {"torch", "jax", "cupy"}), ("jax.numpy", {"torch", "cupy"})],
    ids=["numpy", "jax"],
)
def test_no_verb_needs_another_framework(library, others):
    pytest.importorskip(library)
    program = EVERY_VERB.format(library=library, others=others)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough(but=("recipes-numpy-torch, jax",))
@pytest.mark.parametrize(
    ("layers", "needs", "others"),
    [
        ("torch", "torch", "jax, flax"),
        ("flax", "flax", "torch"),
        ("recipes", "numpy", "torch, jax"),
    ],
)
def test_layers_of_one_framework_import_no_other(layers, needs, others):
    pytest.importorskip(needs)
    program = (
        f"import sys, precondattn.layers.{layers}\n"
        f"found = set('{others}'.split(', ')) & set(sys.modules)\n"
        f"assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_oracle_has_array_api_functions_only():
    """No framework is imported, found in `sys.modules` or distinguished from another."""
    framework = re.compile(r"\b(torch|jax|cupy|lax|sys\.modules|library_of|import numpy)\b")
    for path in (ROOT / "precondattn" / "spec").glob("*.py"):
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text())
        assert framework.search(code) is None, path


def test_the_core_imports_neither_backends_nor_conformance():
    for path in (ROOT / "precondattn").rglob("*.py"):
        if not path.name.endswith("commands.py"):  # They load what a subcommand needs.
            assert "precondattn_" not in re.sub(r"\"precondattn_\w+\"", "", path.read_text()), path


def test_the_distribution_and_the_changelog_have_the_version_of_the_package():
    assert metadata.version("precondattn") == pa.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"] == {"path": "precondattn/version.py"}
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert pa.__version__ in headings


def test_the_version_is_written_once():
    written = re.compile(rf"[\"']{re.escape(pa.__version__)}[\"']")
    files = [ROOT / "pyproject.toml", ROOT / "docs" / "conf.py"]
    files += (ROOT / "precondattn").rglob("*.py")
    assert [path.name for path in files if written.search(path.read_text())] == ["version.py"]


def test_the_docs_have_the_version_of_the_package():
    pytest.importorskip("sphinx")
    pytest.importorskip("sphinx-mathjax-offline")
    configured = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert configured["version"] == configured["release"] == pa.__version__
    assert pa.__version__ in configured["html_title"]


def test_a_saved_cache_has_the_version_of_the_package():
    q = np.zeros((1, 2, 1, 4))
    saved = pa.Lucid().init_cache(q, q, q, capacity=2).state_dict()
    assert tuple(saved["version"]) == numbers_of(pa.__version__)


def test_every_public_name_has_an_example_or_a_sentence():
    for name in pa.__all__:
        assert getattr(pa, name).__doc__, name
