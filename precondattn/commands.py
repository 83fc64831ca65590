"""The subcommands of `precondattn`. Each imports what it needs when it is asked for."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import precondattn as pa

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Preconditioned attention: mechanisms, backends, conformance.",
)
# A report in a file or a pipe keeps whole lines; only a terminal is as narrow as it is.
console = Console() if Console().is_terminal else Console(width=120)


@app.command("list")
def list_all() -> None:
    """Mechanisms with their inputs, and backends."""
    from precondattn.discovery import discover

    table = Table("mechanism", "kind", "inputs", title="mechanisms", title_justify="left")
    for name, cls in sorted(pa.mechanisms().items()):
        mechanism = pa.parse(name)
        inputs = ", ".join(f"{n} ({pattern.text})" for n, pattern in mechanism.inputs.items())
        table.add_row(name, cls.role, inputs)
    console.print(table)
    found = discover()
    table = Table("backend", "arrays of", "made for", title="backends", title_justify="left")
    for backend in found.backends:
        libraries = ", ".join(sorted(backend.libraries)) or "any library"
        table.add_row(backend.name, libraries, ", ".join(sorted(backend.accelerates)) or "–")
    for name, error in found.broken:
        table.add_row(name, "[red]could not be imported[/red]", error)
    console.print(table)


@app.command()
def explain(
    mechanism: Annotated[str, typer.Argument(help="an expression, such as 'lucid(laser)'")],
    library: Annotated[str, typer.Option(help="whose arrays")] = "numpy",
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16")] = "float32",
    device: Annotated[str | None, typer.Option(help="as the library names it")] = None,
    verb: Annotated[str, typer.Option(help="forward, vjp or extend")] = "forward",
    sizes: Annotated[
        str, typer.Option(help="sizes by letter: batch, times, heads, widths")
    ] = "b=1,t=128,s=128,h=4,n=4,d=64,e=64",
) -> None:
    """Which backend would run which piece of a call, and why not the others."""
    from precondattn_conformance import libraries
    from precondattn_conformance.inputs import Layout, make_inputs

    try:
        chosen = {name: int(size) for name, _, size in (s.partition("=") for s in sizes.split(","))}
        parsed, arrays_of = pa.parse(mechanism), libraries.named(library, device)
        with arrays_of.precision(dtype):
            made = make_inputs(parsed, Layout("explain", **chosen), "random")
            arrays = {name: arrays_of.array(array, dtype) for name, array in made.items()}
            if verb == "extend":
                cache = parsed.init_cache(**arrays, capacity=chosen["s"])
                explanation = parsed.explain(**arrays, cache=cache)
            else:
                explanation = parsed.explain(**arrays, verb=verb)
        console.print(str(explanation), markup=False, soft_wrap=True)
    except (ValueError, TypeError) as error:
        _stop(error)


@app.command()
def conformance(
    backend: Annotated[
        list[str] | None, typer.Option(help="hold this backend to the oracle; may be repeated")
    ] = None,
    level: Annotated[str, typer.Option(help="smoke or full")] = "smoke",
    device: Annotated[str | None, typer.Option(help="as the array library names it")] = None,
    library: Annotated[
        list[str] | None, typer.Option(help="only this array library; may be repeated")
    ] = None,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="only this expression; may be repeated")
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="only outputs, gradients or caching; may be repeated")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="only this dtype; may be repeated")
    ] = None,
) -> None:
    """Hold backends to the oracle: outputs, gradients and caching of every mechanism."""
    from precondattn.discovery import discover
    from precondattn_conformance.command import conformance as run

    try:
        for name in backend or ():
            discover().named(name)
        code = run(
            backend=tuple(backend or ()),
            level=level,
            device=device,
            libraries=tuple(library or ()),
            mechanisms=tuple(mechanism or ()),
            checks=tuple(check or ()),
            dtypes=tuple(dtype or ()),
            console=console,
        )
    except (ValueError, TypeError, ImportError) as error:
        _stop(error)
    raise typer.Exit(code)


def _stop(error: Exception) -> None:
    """Say what is wrong with the arguments, and leave with the exit code for that."""
    Console(stderr=True).print(str(error), markup=False, soft_wrap=True)
    raise typer.Exit(2) from None
