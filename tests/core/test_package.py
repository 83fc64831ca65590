"""What `import precondattn` and its verbs import; the package's version."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import precondattn as pa
from precondattn.installed import is_installed
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
late = {"execution.run", "execution.parameters_of_calls", "dispatch.plan"}
late = {f"precondattn.{name}" for name in late} & set(sys.modules)
assert not late, late
"""
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
import precondattn.layers.{layers}
found = {{{others}}} & set(sys.modules)
assert not found, found
"""
NEEDED = [
    ("numpy", "recipes", "'torch', 'jax', 'cupy'"),
    ("torch", "torch", "'jax', 'flax', 'cupy', 'torch.utils.flop_counter'"),
    ("jax.numpy", "flax", "'torch', 'cupy'"),
]


@pytest.mark.thorough(but=("numpy",))
@pytest.mark.parametrize(("library", "layers", "others"), NEEDED, ids=["numpy", "torch", "jax"])
def test_nothing_imports_a_framework_that_it_does_not_need(library, layers, others):
    for name in (library, "flax" if layers == "flax" else library):
        pytest.importorskip(name)
    program = EVERY_VERB.format(library=library, layers=layers, others=others)
    program = IMPORTED + program if library == "numpy" else program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_written_once_and_is_that_of_the_distribution_and_the_changelog():
    assert metadata.version("precondattn") == pa.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"] == {"path": "precondattn/version.py"}
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert pa.__version__ in headings
    written = re.compile(rf"[\"']{re.escape(pa.__version__)}[\"']")
    files = [ROOT / "pyproject.toml", ROOT / "docs" / "conf.py"]
    files += (ROOT / "precondattn").rglob("*.py")
    assert [path.name for path in files if written.search(path.read_text())] == ["version.py"]
    q = np.zeros((1, 2, 1, 4))
    saved = pa.Lucid().init_cache(q, q, q, capacity=2).state_dict()
    assert tuple(saved["version"]) == numbers_of(pa.__version__)


def test_a_package_with_code_is_installed_and_a_folder_without_is_not(tmp_path, monkeypatch):
    (tmp_path / "without" / "a_folder").mkdir(parents=True)
    for place in ("without", "with"):
        (tmp_path / place / "a_package").mkdir(parents=True)
    (tmp_path / "with" / "a_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "with")
    monkeypatch.syspath_prepend(tmp_path / "without")  # A folder of the same name is before it.
    names = ("numpy", "json", "a_package", "a_folder", "a_folder_that_is_missing")
    assert [is_installed(name) for name in names] == [True, True, True, False, False]
