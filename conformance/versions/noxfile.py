"""Runs the tests with three sets of versions.

`lowest` are the lower bounds of `pyproject.toml`, `pinned` the versions of `constraints.txt`, and
`newest` what is released today. Each session has a new environment. With the pinned set everything
runs, as in CI; with the others, the tests that depend on a version.

    nox -f conformance/versions/noxfile.py                      everything
    nox -f conformance/versions/noxfile.py -s "numpy(lowest)"   one session
    nox -f conformance/versions/noxfile.py -- --save            and save it for docs/versions.md
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "measurements" / "versions" / "runs.json"

SETS = {
    "lowest": ("--resolution=lowest-direct",),
    "pinned": (f"--constraint={ROOT / 'constraints.txt'}",),
    "newest": (),
}
"""The uv options that choose the versions, by the name of the set."""

every_bound = nox.parametrize(
    ("python", "versions"),
    [("3.11", "lowest"), ("3.12", "newest"), ("3.13", "newest")],
    ids=["lowest", "newest-3.12", "newest-3.13"],
)

NAMED = [
    *("numpy", "array-api-compat", "torch", "triton", "jax", "ml_dtypes", "nvidia-cuda-nvrtc"),
    *("flax", "hypothesis", "pytest", "typer", "rich", "jinja2", "pytest-benchmark", "matplotlib"),
]
"""The packages whose versions are saved."""

SHOW = """
import json, platform, sys
from importlib import metadata

found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "versions": found}))
"""

BOTH_TIERS = ("-m=not slow",)
FIRST_TIER = "--first-tier"
"""The argument with which the session `numpy` leaves out the second tier, as in CI."""
SMOKE = ("precondattn", "conformance", "--level", "smoke")
COUNTS = re.compile(r"(\d+) passed, (\d+) failed, (\d+) unsupported")

nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = True
nox.options.envdir = str(ROOT / ".nox")


@nox.session
@every_bound
def numpy(session: nox.Session, versions: str) -> None:
    """NumPy without a framework: the suite with its own extra only, then the tests of the core."""
    tried = Tried(session, versions)
    tried.install("conformance")
    tried.smoke()
    # As in another project, since the options of this repository's tests need a newer pytest.
    tried.pytest(
        "--pyargs precondattn_conformance --precondattn-mechanism lucid",
        "--config-file=/dev/null",
        "--noconftest",
    )
    tried.install("test")
    tiers = () if FIRST_TIER in session.posargs else BOTH_TIERS
    tried.pytest("tests/core tests/mathematics", *tiers, "-n=auto", "--dist=loadfile")
    tried.finish()


@nox.session
@every_bound
def frameworks(session: nox.Session, versions: str) -> None:
    """PyTorch, JAX and Flax. The session `numpy` tests the mathematics."""
    tried = Tried(session, versions)
    tried.install("torch", "jax", "flax", "test")
    tried.smoke()
    folders = "tests/core tests/backends/jax tests/backends/portable"
    tried.pytest(folders, *BOTH_TIERS, "-n=auto", "--dist=loadfile")
    tried.pytest(
        "tests/backends/test_conformance.py tests/layers", *BOTH_TIERS, "-n=auto", "--dist=loadfile"
    )
    tried.finish()


@nox.session
@every_bound
def kernels(session: nox.Session, versions: str) -> None:
    """Interpreted kernels, and the tools that check them."""
    tried = Tried(session, versions)
    # The newest PyTorch has its own NVRTC, which is older than NVIDIA's newest.
    tried.install("triton" if versions == "newest" else "kernels", "jax", "test")
    for folder in ("tests/backends/pallas", "tests/backends/triton", "tests/kernel_tools"):
        tried.pytest(folder, *BOTH_TIERS, "-n=auto", "--dist=loadfile")
    tried.finish()


@nox.session
@nox.parametrize(("python", "versions"), [("3.11", "pinned")], ids=["pinned"])
def everything(session: nox.Session, versions: str) -> None:
    """The README's test command."""
    tried = Tried(session, versions)
    tried.install("dev")
    tried.pytest("", *BOTH_TIERS, "-n=auto", "--dist=loadfile", "--max-worker-restart=0")
    tried.finish()


class Tried:
    """The commands that one session ran, and their results."""

    def __init__(self, session: nox.Session, versions: str) -> None:
        self.session, self.versions = session, versions
        self.runs: list[dict[str, str | int]] = []

    def install(self, *extras: str) -> None:
        self.session.chdir(ROOT)
        self.session.install(*SETS[self.versions], "-e", f".[{','.join(extras)}]")

    def smoke(self) -> None:
        said = self.session.run(*SMOKE, silent=True, success_codes=(0, 1)) or ""
        self.session.log(said)
        passed, failed, skipped = map(int, COUNTS.findall(said)[-1])
        self._add(" ".join(SMOKE), passed, failed, skipped)

    def pytest(self, what: str, *options: str) -> None:
        results = Path(self.session.create_tmp()) / "results.xml"
        command = ["python", "-m", "pytest", "-q", f"--junitxml={results}", *options, *what.split()]
        # Code 1 means a failed test, which is counted. Any other code ends the session here.
        self.session.run(*command, success_codes=(0, 1))
        suite = ElementTree.parse(results).find("testsuite")
        assert suite is not None, results
        total, failures, errors, skipped = (
            int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
        )
        failed = failures + errors
        self._add(f"pytest {what}".strip(), total - failed - skipped, failed, skipped)

    def _add(self, what: str, passed: int, failed: int, skipped: int) -> None:
        self.session.log(f"{what}: {passed} passed, {failed} failed, {skipped} skipped")
        self.runs.append({"what": what, "passed": passed, "failed": failed, "skipped": skipped})

    def finish(self) -> None:
        """Save the record if `--save` is given, and fail if a test has failed."""
        name = re.sub(r"[()]+", " ", self.session.name.partition("-")[0]).strip()
        shown = self.session.run("python", "-c", SHOW, *NAMED, silent=True) or ""
        record = {
            "session": name.split()[0],
            "set": self.versions,
            "date": datetime.date.today().isoformat(),
            **json.loads(shown),
            "runs": self.runs,
        }
        if "--save" in self.session.posargs:
            records = json.loads(RECORDS.read_text(encoding="utf-8"))
            records = [x for x in records if _same_run(x) != _same_run(record)] + [record]
            records.sort(key=_same_run)
            RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
            # The next session tests the page.
            self.session.run("python", str(ROOT / "docs" / "make_pages.py"))
        if any(run["failed"] for run in self.runs) or not all(run["passed"] for run in self.runs):
            self.session.error("not everything passed")


def _same_run(record: dict[str, Any]) -> tuple[str, str, list[str]]:
    """What two records have in common if the later one replaces the earlier."""
    return record["session"], record["set"], record["python"].split(".")[:2]
