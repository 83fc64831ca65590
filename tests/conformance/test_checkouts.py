"""Projects that are not on a package index: their checkouts, and excerpts of their files."""

import subprocess

import pytest

from precondattn_conformance.peers.checkout import FOLDER, Checkout
from precondattn_conformance.peers.everyone import lines_to_check_out
from precondattn_conformance.peers.files import MissingError, excerpt_of, module_of
from precondattn_conformance.peers.project import Project

FILE = """
import a_package_that_nobody_has

@a_package_that_nobody_has.compiled
def doubled(x: a_package_that_nobody_has.Array):
    return factor * same(x)

def same(x):
    return x

raise RuntimeError("a statement of the module")
"""


def project(revision="0" * 40):
    url = "https://github.com/someone/fast"
    return Project("fast", "Fast", url, repository="someone/fast", revision=revision)


def git(folder, *arguments):
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    told = subprocess.run(
        ["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "fast").mkdir()
    return tmp_path / "fast"


def test_an_excerpt_has_definitions_without_their_imports_and_decorators(folder):
    (folder / "ops.py").write_text(FILE)
    excerpt = project().excerpt("ops.py", "doubled", "same", imported={"factor": 2})
    assert excerpt.doubled(3) == 6


def test_what_a_file_lacks_is_named(folder):
    (folder / "ops.py").write_text(FILE)
    with pytest.raises(MissingError, match=r"ops\.py defines no tripled"):
        excerpt_of(folder / "ops.py", "same", "tripled", imported={})
    with pytest.raises(MissingError, match=r"there is no file .*other\.py"):
        project().imported("other.py")
    with pytest.raises(MissingError, match="a_package_that_nobody_has"):
        project().imported("ops.py")


def test_a_file_is_a_module_once(folder):
    (folder / "ops.py").write_text("loaded = []")
    assert module_of(folder / "ops.py") is project().imported("ops.py")


def test_a_checkout_at_another_revision_is_reported(folder):
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "first")
    assert project(git(folder, "rev-parse", "HEAD")).folder == folder
    with pytest.raises(MissingError, match=r"its peers are for 000000000000 .*git -C .* checkout"):
        project().version  # noqa: B018 - It raises the error.


def test_a_missing_checkout_is_named(folder, monkeypatch):
    other = Checkout("someone/slow", "0" * 40)
    with pytest.raises(MissingError, match="no checkout of someone/slow"):
        other.folder  # noqa: B018 - It raises the error.
    monkeypatch.delenv(FOLDER)
    with pytest.raises(MissingError, match=f"{FOLDER} names no folder"):
        other.folder  # noqa: B018 - It raises the error.


def test_lines_make_every_checkout_at_its_revision():
    lines = lines_to_check_out().splitlines()
    clones = [line for line in lines if line.startswith("git clone")]
    assert len(lines) == 2 * len(set(clones))
    assert any("https://github.com/state-spaces/mamba " in line for line in clones)
    assert any('mamba" checkout --quiet e9594ce1c732' in line for line in lines)
