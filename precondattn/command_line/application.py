"""The application of the command line, to which the files of commands add theirs, and its errors.

An error of a command is one message and exit code 2, without a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


TRACEBACK = "PRECONDATTN_TRACEBACK"
"""The environment variable that, set to 1, shows the traceback of an error."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in a shell."""

EXPECTED = (ValueError, TypeError, ImportError, OSError)
"""The errors of arguments, files and missing packages, whose message is sufficient."""


@contextmanager
def reported() -> Iterator[None]:
    """Print the message of an error to stderr, and exit with code 2; after Ctrl-C with 130."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt:  # Typer's own exit code for it is 1.
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if os.environ.get(TRACEBACK, "0") not in ("", "0"):
            raise
        message = str(error) if isinstance(error, EXPECTED) else ""
        if not message:
            message = f"{type(error).__name__}: {error} ({TRACEBACK}=1 shows where)"
        Console(file=sys.stderr).print(message, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
