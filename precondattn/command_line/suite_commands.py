"""The subcommands of the conformance suite. Each imports it when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from precondattn.command_line.application import app, console, reported


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
    self_test: Annotated[
        bool, typer.Option("--self-test", help="plant faults, and check that the suite finds them")
    ] = False,
    inside: Annotated[
        str | None,
        typer.Option(help="with --devices: a context manager for all cases, module:function"),
    ] = None,
) -> None:
    """Compare backends with the oracle, by every check on every mechanism; report the errors."""
    with reported():
        if not self_test:  # Before imports, which take a while.
            console.print(f"choosing the cases of level {level}", highlight=False)
        from precondattn_conformance.command import conformance as run
        from precondattn_conformance.session import Session
        from precondattn_conformance.source import source_of

        if self_test:
            from precondattn_conformance.faults.selftest import self_test as test

            raise typer.Exit(test(console))
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
            inside=inside,
        )
        if inside is not None and devices is None:
            raise ValueError("--inside needs --devices")
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
            from precondattn_conformance.peers.everyone import lines_to_install

            print(lines_to_install())
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
