"""Shared parts of the ahead-of-time compilers: command line, processes and reports.

A variant has a key: a hash of its code without comments, its configuration, its target and the
version of the compiler. A report keeps the keys. With `--known REPORT` a variant whose key is in
that report, and which compiled there, is not compiled again: its resources would be the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from precondattn_kernel_tools.resources import Resources, line

AnyVariant = Any
"""A variant for Triton, CUDA or Pallas, which has a `name`."""


class CompileTask(NamedTuple):
    """A variant to compile for a target."""

    name: str
    target: str
    key: str
    arguments: tuple[object, ...]
    """Arguments of the function that compiles it, which are pickled."""


def key_of(*parts: object) -> str:
    """The hash of all parts, each of which is identified by its text."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def parsed(
    language: str, targets: Iterable[str], example: str, arguments: Sequence[str] | None
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for reporting later errors, and the parsed arguments of a language's compiler."""
    parser = argparse.ArgumentParser(description=f"Compile a package's {language} kernels.")
    parser.add_argument("module", help="the module whose variants(target) are compiled")
    parser.add_argument("--target", action="append", default=[], choices=tuple(targets))
    parser.add_argument("--match", default="", help="only variants whose name contains this")
    parser.add_argument("--list", action="store_true", help="list the variants' names and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="concurrent processes")
    parser.add_argument("--save", type=Path, help="a JSON file for the report")
    parser.add_argument(
        "--known", type=Path, help="a saved report: variants that it has are not compiled again"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs has to be at least 1, not {options.jobs}")
    if not options.target:
        parser.error(f"--target is needed: {example} …")
    if options.known and not options.known.is_file():
        parser.error(f"--known: there is no file {options.known}")
    return parser, options


def variants_of(module: str, target: str) -> dict[str, AnyVariant]:
    """The variants that a module ships for a target, by name.

    Raises
    ------
    ValueError
        if two have the same name.
    """
    variants = list(importlib.import_module(module).variants(target))
    counts = Counter(variant.name for variant in variants)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"{module} has more than one variant of the name {', '.join(duplicates)}")
    return {variant.name: variant for variant in variants}


def selected(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> list[tuple[AnyVariant, str]]:
    """The (variant, target) pairs that the command line selects; an error if there are none."""
    try:
        pairs = [
            (variant, target)
            for target in options.target
            for variant in variants_of(options.module, target).values()
            if options.match in variant.name
        ]
    except ValueError as error:
        parser.error(str(error))
    if not pairs:
        parser.error(no_variant(options))
    return pairs


def no_variant(options: argparse.Namespace) -> str:
    """The error of a command line that selects no variant."""
    return f"{options.module} has no variant with {options.match!r} in its name"


def print_names(pairs: Iterable[tuple[AnyVariant, str]]) -> None:
    """Print the name of each variant once."""
    print("\n".join(dict.fromkeys(variant.name for variant, _ in pairs)))


def compiled_in_processes(
    compile_one: Callable[..., Resources],
    tasks: Iterable[CompileTask | Resources],
    jobs: int,
    reported: Mapping[str, Resources],
) -> Iterator[Resources]:
    """The resources of every task, in order; `Resources` among the tasks are passed through.

    Tasks are submitted as the iterable yields them. If a process dies, only the variant that killed
    it fails.
    """
    running: list[tuple[CompileTask | None, Resources | None, Future[Resources] | None]] = []
    with processes(jobs) as pool:
        for task in tasks:
            if isinstance(task, Resources):
                running.append((None, task, None))
            elif task.key in reported:
                # A copy, since variants with equal keys have different names.
                running.append((None, replace(reported[task.key], name=task.name), None))
            else:
                running.append((task, None, pool.submit(compile_one, *task.arguments)))
        for submitted, resources, future in running:
            if submitted is not None and future is not None:
                try:
                    resources = future.result()
                except BrokenProcessPool:  # This task or a concurrent one killed the process.
                    resources = _compiled_alone(compile_one, submitted)
                resources.key = submitted.key
            assert resources is not None
            yield resources


def _compiled_alone(compile_one: Callable[..., Resources], task: CompileTask) -> Resources:
    with processes(1) as pool:
        try:
            return pool.submit(compile_one, *task.arguments).result()
        except BrokenProcessPool:
            return Resources(task.name, task.target, failures=["the compiler's process died"])


def processes(count: int) -> ProcessPoolExecutor:
    """New processes, which share no compiler with this one."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def known_resources(path: Path | None) -> dict[str, Resources]:
    """Resources of the variants that compiled in a saved report, by key; empty without a report."""
    if path is None:
        return {}
    saved = json.loads(path.read_text(encoding="utf-8"))["variants"]
    return {v["key"]: Resources(**v) for v in saved if v.get("key") and not v["failures"]}


def run(
    options: argparse.Namespace,
    compile_one: Callable[..., Resources],
    tasks: Iterable[CompileTask | Resources],
    versions: Mapping[str, str],
) -> int:
    """Compile, print a line for each variant and save the report; returns 1 if a variant failed."""
    reported = known_resources(options.known)
    resources = []
    for each in compiled_in_processes(compile_one, tasks, options.jobs, reported):
        resources.append(each)
        if each.key not in reported:
            print(line(each), flush=True)
    if options.known:
        compiled = sum(each.key not in reported for each in resources)
        print(f"{compiled} compiled, {len(resources) - compiled} known from {options.known}")
    if options.save:
        report = {
            **versions,
            "python": platform.python_version(),
            "variants": [asdict(each) for each in resources],
        }
        options.save.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(each.failures for each in resources))
