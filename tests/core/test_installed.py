"""Whether a package is installed."""

import pytest

from precondattn.installed import is_installed


@pytest.mark.parametrize("name", ["numpy", "json"])
def test_a_package_with_code_is_installed(name):
    assert is_installed(name)


def test_a_folder_without_code_is_no_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_folder").mkdir()
    assert not is_installed("a_folder")
    assert not is_installed("a_folder_that_is_missing")


def test_code_behind_a_folder_of_the_same_name_is_found(tmp_path, monkeypatch):
    for place in ("without", "with"):
        (tmp_path / place / "a_package").mkdir(parents=True)
    (tmp_path / "with" / "a_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "with")
    monkeypatch.syspath_prepend(tmp_path / "without")
    assert is_installed("a_package")
