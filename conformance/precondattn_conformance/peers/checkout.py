"""Checkouts of repositories that are not on a package index.

They are in the folder named by the environment variable `PRECONDATTN_CHECKOUTS`, each under the
name of its repository, at the revision for which its peers were written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from subprocess import run

from precondattn_conformance.peers.files import MissingError

FOLDER = "PRECONDATTN_CHECKOUTS"
"""The environment variable that names the folder of checkouts."""


@dataclass(frozen=True)
class Checkout:
    """A repository at a revision."""

    repository: str
    """ "owner/name" on GitHub."""
    revision: str

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]

    @property
    def folder(self) -> Path:
        """The folder of the checkout.

        Raises
        ------
        MissingError
            if it does not exist, or git reports another revision. A folder without git data is not
            checked.
        """
        root = os.environ.get(FOLDER)
        if root is None:
            raise MissingError(f"{FOLDER} names no folder with a checkout of {self.repository}")
        folder = Path(root) / self.name
        if not folder.is_dir():
            raise MissingError(f"there is no checkout of {self.repository} in {root}")
        if (folder / ".git").exists():
            found = _revision_of(folder)
            if found != self.revision:
                raise MissingError(
                    f"{folder} has revision {found[:12]} of {self.repository}; its peers are for "
                    f"{self.revision[:12]} (git -C {folder} checkout {self.revision})"
                )
        return folder

    @property
    def lines(self) -> str:
        """Shell lines that create the checkout."""
        folder = f'"${FOLDER}/{self.name}"'
        return (
            f"git clone --quiet --filter=blob:none https://github.com/{self.repository} {folder}\n"
            f"git -C {folder} checkout --quiet {self.revision}"
        )


def _revision_of(folder: Path) -> str:
    """The revision that git has checked out in a folder."""
    told = run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or f"unknown to git ({told.stderr.strip()})"
