"""The application of the command line, to which the files of commands add theirs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

import precondattn as pa

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Preconditioned attention: mechanisms, backends, conformance, benchmarks.",
)
# Reports in files and pipes have a fixed width; a terminal has its own.
console = Console(width=None if Console().is_terminal else 120, emoji=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"precondattn {pa.__version__}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="print the version and exit", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before a subcommand."""
