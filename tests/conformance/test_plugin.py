"""The pytest plugin in a separate pytest run, and its imports if it is not used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BAD_BACKENDS = Path(__file__).parent / "bad_backends"
THIRD_PARTY = Path(__file__).parents[1] / "third_party"

BARE = """
import sys, _pytest.config, pytest
before = set(sys.modules)

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "precondattn_conformance":
            raise ImportError(f"the plugin imports {name}")

sys.meta_path.insert(0, Refuse())
import precondattn_conformance.plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert new <= sys.stdlib_module_names | {"precondattn_conformance"}, new
"""


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pytest_run(folder, *arguments, **environment):
    return run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        *arguments,
        **environment,
    )


SUITE = (
    "--pyargs", "precondattn_conformance", "--precondattn-library=numpy",
    "--precondattn-mechanism=lucid", "--precondattn-dtype=float64",
)  # fmt: skip


def test_the_plugin_imports_the_standard_library_only():
    done = run("-c", BARE)
    assert done.returncode == 0, done.stderr


def test_without_its_flags_the_plugin_is_inert(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other():\n"
        "    assert 'precondattn_conformance.plugin' in sys.modules\n"
        "    assert not {'precondattn', 'numpy', 'torch', 'jax'} & set(sys.modules)\n"
    )
    done = pytest_run(tmp_path, "-p", "no:hypothesispytest", str(tmp_path / "test_other.py"))
    assert "1 passed" in done.stdout, done.stdout


def test_the_flags_run_the_suite(tmp_path):
    done = pytest_run(tmp_path, *SUITE, "--precondattn-backend=reference")
    assert done.returncode == 0, done.stdout
    assert "reference: 33 cases compared" in done.stdout


@pytest.mark.thorough
def test_a_third_party_backend_is_compared_with_the_oracle_on_the_piece_it_claims(tmp_path):
    done = pytest_run(
        tmp_path, *SUITE,
        "--precondattn-mechanism=lucid_solve", "--precondattn-backend=third_party",
        PYTHONPATH=str(THIRD_PARTY),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "third_party: 34 cases compared" in done.stdout


CHOOSY = (
    "--pyargs", "precondattn_conformance", "--precondattn-library=numpy",
    "--precondattn-mechanism=softmax", "--precondattn-backend=choosy", "--precondattn-in-process",
)  # fmt: skip


def test_a_backend_that_declines_most_of_a_check_fails_unless_it_is_declared(tmp_path):
    path = {"PYTHONPATH": os.pathsep.join([str(BAD_BACKENDS), os.environ.get("PYTHONPATH", "")])}
    done = pytest_run(tmp_path, *CHOOSY, **path)
    assert done.returncode == 1
    assert "choosy: 2 cases compared\noutputs: 1 of 9 compared; takes a key head" in done.stdout
    assert "too little was compared, less than half: outputs 1 of 8, " in done.stdout
    declared = "--precondattn-declines=grouped_heads: a head of its own each"
    done = pytest_run(tmp_path, *CHOOSY, declared, **path)
    assert done.returncode == 0, done.stdout
    assert "outputs: 1 of 9 compared; a head of its own each, as declared (7)" in done.stdout
    assert "too little" not in done.stdout


@pytest.mark.thorough
def test_a_named_backend_without_a_compared_case_fails(tmp_path):
    done = pytest_run(
        tmp_path, "--pyargs", "precondattn_conformance", "--precondattn-library=numpy",
        "--precondattn-mechanism=laser", "--precondattn-backend=third_party",
        PYTHONPATH=str(THIRD_PARTY),
    )  # fmt: skip
    assert "skipped" in done.stdout
    assert "third_party: 0 cases compared" in done.stdout
    assert done.returncode == 1
