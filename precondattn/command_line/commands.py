"""The subcommands of `precondattn`. Each imports its dependencies when it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import precondattn as pa
from precondattn.command_line.errors import INTERRUPTED, reported
from precondattn.installed import is_installed

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
def conformance(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="the backend to compare; repeat to add backends for other pieces"),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="a public implementation, such as fla/kda_chunk")
    ] = None,
    import_: Annotated[
        str | None,
        typer.Option("--import", help="a backend, or a function of --mechanism, as module:name"),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="with --import: the order of the function's axes")
    ] = "bthd",
    heads: Annotated[
        str, typer.Option(help="with --import: grouped or equal numbers of heads")
    ] = "grouped",
    multiple: Annotated[
        int, typer.Option(help="with --import: it takes multiples of so many tokens", min=1)
    ] = 1,
    widths: Annotated[
        str, typer.Option(help="with --import: any width of values, or equal to that of keys")
    ] = "any",
    gradient: Annotated[
        bool, typer.Option(help="with --import: whether it can be differentiated")
    ] = True,
    level: Annotated[str, typer.Option(help="smoke, full or stress")] = "smoke",
    device: Annotated[str | None, typer.Option(help="as the array library names it")] = None,
    library: Annotated[
        list[str] | None, typer.Option(help="only this array library; may be repeated")
    ] = None,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="only this mechanism or piece; may be repeated")
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="only this check, such as outputs; may be repeated")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="only this dtype; may be repeated")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="only this case, by its id; may be repeated")
    ] = None,
    xfail: Annotated[
        Path | None, typer.Option(help="file of cases that are expected to fail, with reasons")
    ] = None,
    skip: Annotated[Path | None, typer.Option(help="file of cases to skip, with reasons")] = None,
    declines: Annotated[
        list[str] | None,
        typer.Option(
            help='what the backend declines on purpose: "float64: why", or a check, mask, verb; '
            "may be repeated"
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="seconds after which a case has hung: 300; with --devices 25, or 120 of JAX",
            min=0.5,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="processes; 0 runs all cases in this one", min=0),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="compare sequences that so many processes of this machine divide; --check is then "
            "heads, contiguous, zigzag or cyclic",
        ),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="write a JSON record here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page here")] = None,
    junit: Annotated[Path | None, typer.Option(help="write JUnit XML here")] = None,
    design: Annotated[
        bool,
        typer.Option(
            "--design", help="print factors and levels, and the rows of each --mechanism, and exit"
        ),
    ] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="plant faults, and check that the suite finds them")
    ] = False,
    mutate: Annotated[
        list[str] | None,
        typer.Option(
            help="change this module, package or .cu file token by token: what is not noticed? "
            "may be repeated"
        ),
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option(
            help="with --mutate or --devices: a context manager for all cases, module:function"
        ),
    ] = None,
    equivalent: Annotated[
        Path | None,
        typer.Option(help="with --mutate: a list of mutants that compute the same, with reasons"),
    ] = None,
    most_cases: Annotated[
        int | None,
        typer.Option(help="with --mutate: the largest number of cases of a mutant", min=1),
    ] = None,
) -> None:
    """Compare backends with the oracle, by every check on every mechanism; report the errors."""
    with reported():
        if not (self_test or design or mutate):  # Before imports, which take a while.
            console.print(f"choosing the cases of level {level}", highlight=False)
        from precondattn_conformance.command import conformance as run
        from precondattn_conformance.session import Session
        from precondattn_conformance.source import source_of

        if self_test:
            from precondattn_conformance.faults.selftest import self_test as test

            raise typer.Exit(test(console))
        if design:
            from precondattn_conformance.design.table import print_design

            blocks = Session(backend=tuple(backend or ())).blocks
            chosen = library[0] if library else "numpy"
            print_design(console, tuple(mechanism or ()), chosen, blocks)
            return
        source = source_of(
            peer,
            import_,
            mechanism or (),
            layout=layout,
            heads=heads,
            multiple=multiple,
            widths=widths,
            gradient=gradient,
        )
        if source is not None:
            backend = [source.register().name, *(backend or ())]
            mechanism = mechanism or list(source.mechanisms)
            library = library or sorted(source.backend.libraries)
        session = Session(
            backend=tuple(backend or ()),
            level=level,
            device=device,
            libraries=tuple(library or ()),
            mechanisms=tuple(mechanism or ()),
            checks=tuple(check or ()),
            dtypes=tuple(dtype or ()),
            ids=tuple(case or ()),
            xfail=xfail,
            skip=skip,
            declines=tuple(declines or ()),
            timeout=timeout,
            jobs=jobs,
            devices=devices,
            source=source,
            inside=None if mutate else inside,
        )
        if mutate:
            from precondattn_conformance.mutation.command import mutate as run_mutants

            files = {"--html": html, "--junit": junit, "--xfail": xfail, "--skip": skip}
            cases = {"--devices": devices, "--declines": declines or None}
            for option, value in {**files, **cases}.items():
                if value is not None:
                    raise ValueError(f"{option} does not go with --mutate")
            code = run_mutants(
                session,
                mutate,
                console,
                inside=inside,
                record=record,
                equivalent=equivalent,
                most_cases=most_cases,
            )
            raise typer.Exit(code)
        if inside is not None and devices is None:
            raise ValueError("--inside needs --mutate or --devices")
        for option, value in {"--equivalent": equivalent, "--most-cases": most_cases}.items():
            if value is not None:
                raise ValueError(f"{option} needs --mutate")
        raise typer.Exit(run(session, console, record=record, html=html, junit=junit))


@app.command()
def ecosystem(
    peer: Annotated[
        list[str] | None,
        typer.Option(help="only rows of this name, such as 'fla/*'; may be repeated"),
    ] = None,
    level: Annotated[str, typer.Option(help="smoke, full or stress")] = "smoke",
    jobs: Annotated[int, typer.Option(help="rows that run at a time", min=1)] = 2,
    timeout: Annotated[
        float, typer.Option(help="seconds after which a row has hung", min=0.5)
    ] = 300,
    record: Annotated[Path | None, typer.Option(help="write the table here, as JSON")] = None,
    page: Annotated[Path | None, typer.Option(help="write a page here, as Markdown")] = None,
    install: Annotated[
        bool, typer.Option("--install", help="print commands that install what it compares")
    ] = False,
) -> None:
    """Compare public implementations, and our backends, by every check: one table of all."""
    with reported():
        if install:
            from precondattn_conformance.ecosystem.installation import commands

            print(commands())
            return
        from precondattn_conformance.ecosystem.command import ecosystem as run

        run(
            console,
            patterns=tuple(peer or ()),
            level=level,
            jobs=jobs,
            seconds=timeout,
            record=record,
            page=page,
        )


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
        from precondattn_conformance.report import command

        code = command.compare(old, new, threshold=threshold, growth=growth, console=console)
        raise typer.Exit(code)


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(help="the name of the package and of the backend")],
    library: Annotated[str, typer.Option(help="torch, jax, numpy or cupy")] = "torch",
    mechanism: Annotated[
        str, typer.Option(help="lucid_solve, gated_delta or softmax: what it computes")
    ] = "lucid_solve",
    directory: Annotated[
        Path | None, typer.Option(help="the folder to create; by default one of that name")
    ] = None,
) -> None:
    """Write the package of a new backend: complete, correct, and to be replaced by your kernel."""
    with reported():
        from precondattn_conformance.new_backend import new_backend as write

        files = write(name, library, directory, mechanism)
    for file in files:
        console.print(file, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"\nNow install it, and compare it with the oracle:\n\n"
        f"  pip install -e {files[0].parent}\n"
        f"  precondattn conformance --backend {name} --library {library} --mechanism {mechanism}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
