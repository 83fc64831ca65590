"""The subcommands of `precondattn`. Each imports what it needs when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import precondattn as pa

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Preconditioned attention: mechanisms, backends, conformance, benchmarks.",
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


@app.command()
def bench(
    name: Annotated[
        list[str] | None, typer.Argument(help="cases by name, * for anything; all by default")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="name the cases, and stop")] = False,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="this backend alone, or helped by others: mine,torch; may be repeated"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="as the array library names it")] = None,
    library: Annotated[
        list[str] | None, typer.Option(help="only this array library; may be repeated")
    ] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="any expression, instead of the named cases; may be repeated"),
    ] = None,
    work: Annotated[
        list[str] | None,
        typer.Option(help="only forward, forward_backward, decode or memory; may be repeated"),
    ] = None,
    peers: Annotated[bool, typer.Option(help="beside what a user would run instead")] = True,
    sizes: Annotated[
        list[str] | None,
        typer.Option(help="such as b=1,t=4096,h=8,n=8,d=64,e=64; repeat it for a curve"),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 by default")] = None,
    rounds: Annotated[int | None, typer.Option(help="as many as fit in seconds by default")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="peak memory too, in processes of their own")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes: does it run?")] = False,
    save: Annotated[Path | None, typer.Option(help="write the rows to this JSON file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw figures into this folder")] = None,
    benchmark_json: Annotated[
        Path | None, typer.Option(help="write pytest-benchmark's own record, with every round")
    ] = None,
) -> None:
    """Measure: time beside peers, error, FLOP/s, bytes/s and memory of each case."""
    from precondattn_conformance.bench import command

    if list_:
        command.list_cases(console)
        return
    try:
        code = command.bench(
            names=tuple(name or ()),
            backends=tuple(backend or ()),
            device=device,
            libraries_=tuple(library or ()),
            mechanisms=tuple(mechanism or ()),
            works=tuple(work or ()),
            sizes=tuple(sizes or ()),
            dtype=dtype,
            peers=peers,
            rounds=rounds,
            memory=memory,
            quick=quick,
            save=save,
            plot=plot,
            benchmark_json=benchmark_json,
            console=console,
        )
    except (ValueError, TypeError, ImportError) as error:
        _stop(error)
    raise typer.Exit(code)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="a file that `bench --save` wrote")],
    new: Annotated[Path, typer.Argument(help="a later one, of the same machine")],
    threshold: Annotated[float, typer.Option(help="how much slower is too much")] = 0.1,
) -> None:
    """What has become slower between two saved runs, beyond noise; exit code 1 where something."""
    from precondattn_conformance.bench import command

    try:
        code = command.compare(old, new, threshold, console)
    except ValueError as error:
        _stop(error)
    raise typer.Exit(code)


def _stop(error: Exception) -> None:
    """Say what is wrong with the arguments, and leave with the exit code for that."""
    Console(stderr=True).print(str(error), markup=False, soft_wrap=True)
    raise typer.Exit(2) from None
