"""The subcommands of `precondattn`. Each imports its dependencies when it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import precondattn as pa
from precondattn.command_line import suite_commands  # noqa: F401, it adds its commands.
from precondattn.command_line.application import INTERRUPTED, app, console, reported
from precondattn.installed import is_installed


@app.command("list")
def list_all(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Mechanisms with their inputs, and backends."""
    with reported():
        from precondattn.command_line import listing

        if as_json:
            print(json.dumps(listing.data(), indent=1))
        else:
            listing.print_lists(console)


@app.command()
def explain(
    mechanism: Annotated[str, typer.Argument(help="an expression, such as 'lucid(laser)'")],
    library: Annotated[str, typer.Option(help="the array library")] = "numpy",
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16")] = "float32",
    device: Annotated[
        str | None, typer.Option(help="such as cpu or cuda; this machine need not have it")
    ] = None,
    verb: Annotated[str, typer.Option(help="forward, vjp, extend or extend_vjp")] = "forward",
    sizes: Annotated[
        str,
        typer.Option(help="sizes by letter, such as t=4096,h=8; those not named keep a default"),
    ] = "b=1,t=128,h=4,d=64",
    others: Annotated[
        bool, typer.Option("--all", help="backends of other array libraries too")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Which backend would run which piece of a call, and why not the others."""
    from precondattn.dispatch.described import explain_described

    with reported():
        explained = explain_described(
            pa.parse(mechanism), library, dtype, device, verb, read_sizes(sizes)
        )
        if as_json:
            print(json.dumps(explained.as_dict(), indent=1))
            return
        text = explained.text(others=others)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if not is_installed(library):
            console.print(f"{library} is not installed here", markup=False, soft_wrap=True)


def read_sizes(text: str) -> dict[str, int]:
    """The sizes by letter, from a text such as `"t=4096,h=8"`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        letter, _, size = (word.strip() for word in part.partition("="))
        if not (size.isascii() and size.isdecimal() and len(size) < 19) or letter in sizes:
            raise ValueError(f"sizes are written as t=4096,h=8, each once; found {part!r}")
        sizes[letter] = int(size)
    return sizes


@app.command()
def bench(
    name: Annotated[
        list[str] | None, typer.Argument(help="cases by name, * matches any text; all by default")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="print the cases and exit")] = False,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="this backend, or several for one run: mine,torch; may be repeated"),
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
    peers: Annotated[bool, typer.Option(help="measure the peers too")] = True,
    peer: Annotated[list[str] | None, typer.Option(help="only this peer; may be repeated")] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(help="such as b=1,t=4096,h=8,n=8,d=64,e=64; repeat it for a curve"),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 by default")] = None,
    rounds: Annotated[int | None, typer.Option(help="as many as fit in seconds by default")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="measure peak memory too, in separate processes")
    ] = False,
    neighbours: Annotated[
        int, typer.Option(help="other processes that are busy meanwhile", min=0)
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes, as a test")] = False,
    instructions: Annotated[
        bool,
        typer.Option(
            "--instructions",
            help="count instructions by valgrind instead; fail where a count is above its record",
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="write the rows to this JSON file, or the counts of --instructions"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw figures into this folder")] = None,
    benchmark_json: Annotated[
        Path | None,
        typer.Option(
            help="write pytest-benchmark's own record, with peers as rows and every round"
        ),
    ] = None,
) -> None:
    """Measure time, error, FLOP/s, bytes/s and memory of each case, and the time of peers."""
    with reported():
        from precondattn_conformance.bench import command

        if list_:
            command.list_cases(console)
            return
        if peer and not peers:
            raise ValueError("--peer and --no-peers exclude each other")
        if instructions:
            of_runs = (backend, device, library, mechanism, work, peer, sizes, dtype, rounds)
            if any((*of_runs, not peers, memory, neighbours, quick, plot, benchmark_json)):
                raise ValueError("--instructions is combined with rows and --save only")
            from precondattn_conformance.bench import instructions as gate

            try:
                code = gate.run(tuple(name or ()), save, console)
            except KeyboardInterrupt:
                console.print("[red]interrupted[/red]: nothing was judged or saved")
                code = INTERRUPTED
            raise typer.Exit(code)
        code = command.bench(
            names=tuple(name or ()),
            backends=tuple(backend or ()),
            device=device,
            libraries=tuple(library or ()),
            mechanisms=tuple(mechanism or ()),
            works=tuple(work or ()),
            sizes=tuple(sizes or ()),
            dtype=dtype,
            peers=(tuple(peer) if peer else None) if peers else (),
            rounds=rounds,
            memory=memory,
            neighbours=neighbours,
            quick=quick,
            save=save,
            plot=plot,
            benchmark_json=benchmark_json,
            console=console,
        )
        raise typer.Exit(code)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="a record of conformance, or of `bench --save`")],
    new: Annotated[Path, typer.Argument(help="a later one, of the same kind")],
    threshold: Annotated[
        float,
        typer.Option(
            help="for benchmarks: the fraction by which a ratio to a peer, or peak memory, may grow"
        ),
    ] = 0.1,
    growth: Annotated[
        float, typer.Option(help="for conformance: the factor by which an error may grow")
    ] = 3.0,
) -> None:
    """Report what is worse in the later of two saved runs; exit code 1 if anything is.

    Of benchmarks: ratios to peers, peak memory and correctness. Times are shown, and not judged.
    """
    with reported():
        from precondattn_conformance.report.compare import compare as compared

        code = compared(old, new, threshold=threshold, growth=growth, console=console)
        raise typer.Exit(code)
