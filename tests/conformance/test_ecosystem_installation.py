"""Packages and checkouts that have to be installed for the ecosystem's table."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from precondattn_conformance.ecosystem import installation
from precondattn_conformance.peers.everyone import all_peers

ROOT = Path(__file__).parents[2]
FRAMEWORKS = {"flax", "jax", "torch", "transformers"}


def test_the_extra_has_every_package_of_a_peer_with_its_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = extras["optional-dependencies"][installation.EXTRA]
    assert all("==" in text for text in listed)
    names = {text.partition("==")[0] for text in listed}
    packages = {peer.project.package for peer in all_peers().values()} - {None, *FRAMEWORKS}
    assert packages <= names


def test_the_commands_install_packages_alone_and_make_checkouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ["torch>=2; extra == 'torch'", 'keras==3.15.1; extra == "ecosystem"', "numpy>=2"]
    monkeypatch.setattr(installation, "requires", lambda name: found)
    first, *others = installation.commands().splitlines()
    assert first == "pip install --no-deps keras==3.15.1"
    assert any("git" in line for line in others)
