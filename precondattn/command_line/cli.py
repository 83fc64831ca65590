"""The entry point of the command `precondattn`."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> None:
    """The entry point; it names the extra to install if a dependency is missing."""
    if isinstance(sys.stdout, TextIOWrapper):  # A pipe or a terminal without UTF-8.
        sys.stdout.reconfigure(errors="replace")
    try:
        from precondattn.command_line import commands  # noqa: F401, it adds the commands.
        from precondattn.command_line.application import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"precondattn: the command line needs {error.name}, which is not installed; "
            "install precondattn with its extra 'conformance'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app()
