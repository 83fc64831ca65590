"""The cases of a run by what it names, from nothing to a mechanism; processes, first output."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from precondattn.algebra import registry
from precondattn_conformance.cases import case_of, cases
from precondattn_conformance.command import conformance
from precondattn_conformance.declared import expressions
from precondattn_conformance.isolation import lanes_of
from precondattn_conformance.libraries import SHARING, installed
from precondattn_conformance.process_settings import FLAGS, compiling_quickly, quick_flags
from precondattn_conformance.report.record import load
from precondattn_conformance.session import Session

FIRST_LINE = """
import sys
from precondattn.command_line import commands

def first(text, **options):
    slow = {"torch", "jax", "precondattn_conformance.checks"}
    print(text, *slow.intersection(sys.modules))
    raise SystemExit

commands.console.print = first
commands.app(["conformance"])
"""


@pytest.fixture(scope="module")
def every():
    """The cases of smoke, if every library has all of them."""
    return list(cases("smoke"))


@pytest.fixture(scope="module")
def shared():
    return Session().cases()


def test_a_run_of_everything_has_every_check_of_a_library_and_every_mechanism(every, shared):
    assert set(shared) < set(every)
    assert {(c.library, c.check) for c in shared} == {
        (c.library, c.check) for c in every if c.library != "jax" or c.check == "outputs"
    }
    outputs = {(c.library, c.mechanism) for c in shared if c.check == "outputs"}
    main = [library for library in SHARING if library in installed()]
    assert {(library, text) for library in main for text in expressions()} <= outputs
    for library in installed():
        declared = {c.mechanism for c in every if c.library == library and c.check == "outputs"}
        assert {(library, m) for m in declared & set(registry.registered())} <= outputs


def test_what_a_run_of_everything_leaves_out_on_one_library_it_has_on_another(every, shared):
    pytest.importorskip("torch")

    def data_of(chosen):
        return {
            replace(c, library="any")
            for c in chosen
            if c.library in SHARING and not c.layout.block  # Rows of the design are left out.
        }

    assert data_of(shared) == data_of(every)
    of_options = [c for c in shared if not c.mechanism.isidentifier() and c.check == "caching"]
    counts = {name: sum(c.library == name for c in of_options) for name in ("numpy", "torch")}
    assert min(counts.values()) > 0.8 * max(counts.values())


@pytest.mark.parametrize("named", [{"backend": ("portable",)}, {"libraries": ("numpy",)}])
def test_a_run_that_names_something_has_all_cases(named):
    chosen = {"only_libraries": named.get("libraries", ()), "only_mechanisms": ("softmax",)}
    session = Session(**{"mechanisms": ("softmax",), **named})
    assert session.cases() == list(cases("smoke", **chosen, blocks=session.blocks))


@pytest.mark.parametrize("mechanism", ["gla", "lucid(path)", "softmax[window=3]"])
def test_full_has_a_part_of_options_and_compositions_unless_one_is_named(mechanism):
    chosen = {"only_libraries": ("numpy",), "only_mechanisms": (mechanism,)}
    everything = list(cases("full", **chosen))
    part = list(cases("full", **chosen, named="library"))
    if mechanism.isidentifier():
        assert part == everything
        return
    smoke = set(cases("smoke", **chosen, named="library"))
    assert smoke <= set(part) < set(everything)
    assert len(part) - len(smoke) < len(everything) / 6
    assert len({case.check for case in set(part) - smoke}) > 3


def test_of_several_processes_one_begins_with_what_is_compiled():
    pytest.importorskip("jax")
    ids = ("outputs-numpy", "lucid"), ("outputs-jax", "lucid"), ("gradients-jax", "lucid")
    ids = (*ids, ("outputs-numpy", "laser"))
    todo = [case_of(f"{check}-float32-plain-clustered-{name}") for check, name in ids]
    eager, compiled = lanes_of(todo, 2)
    assert list(eager) == [todo[:1], todo[3:]]
    assert list(compiled) == [todo[1:3]]
    (alone,) = lanes_of(todo, 1)
    assert [case for group in alone for case in group] == todo


@pytest.mark.thorough(but=("numpy",))
@pytest.mark.parametrize("other", ["numpy", "jax"])
def test_two_processes_find_what_one_finds_in_the_same_order(tmp_path, other):
    pytest.importorskip(other)
    found, path = {}, tmp_path / "record.json"
    libraries = tuple({"numpy", other})
    chosen = {"mechanisms": ("l2_norm", "unit_rows"), "libraries": libraries}
    for jobs in (0, 2):
        session = Session(**chosen, checks=("outputs",), dtypes=("float32",), jobs=jobs)
        printed = io.StringIO()
        assert conformance(session, Console(file=printed, width=120), record=path) == 0
        record = load(path)
        assert [result.id for result in record.outcomes] == [case.id for case in session.cases()]
        found[jobs] = [replace(result, seconds=0.0) for result in record.outcomes]
        assert "Every mechanism that was computed here agrees" in printed.getvalue()
    assert {result.library for result in found[2]} == {*libraries}
    assert found[2] == found[0]


def test_what_is_done_is_said_before_anything_slow_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.stdout == "choosing the cases of level smoke\n", done.stderr


def test_an_interrupt_while_cases_are_chosen_has_the_exit_code_of_one(monkeypatch):
    from typer.testing import CliRunner

    from precondattn.command_line.commands import app

    def cases(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "cases", cases)
    done = CliRunner().invoke(app, ["conformance"])
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")


def test_a_process_compiles_quickly_unless_its_user_has_chosen_options(monkeypatch):
    monkeypatch.delenv(FLAGS, raising=False)
    with compiling_quickly():
        assert os.environ[FLAGS] == quick_flags()
    assert FLAGS not in os.environ
    monkeypatch.setenv(FLAGS, "--xla_dump_to=x")
    with compiling_quickly():
        assert os.environ[FLAGS] == "--xla_dump_to=x"


def of_library(library, **named):
    return [c for c in Session(**named).cases() if c.library == library]


@pytest.mark.parametrize("mechanism", ["lucid"])
def test_a_mechanism_and_a_library_have_in_jax_every_check_that_they_have_in_pytorch(mechanism):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    found, expected = (
        of_library(library, mechanisms=(mechanism,), libraries=(library,))
        for library in ("jax", "torch")
    )
    missing = {c.check for c in expected} - {c.check for c in found}
    assert missing <= {"strides", "autocast", "threads"}
    assert len([c for c in found if c.layout.block]) > 2


@pytest.mark.parametrize("mechanism", ["softmax", "gated_delta", "lucid(path)"])
def test_only_a_mechanism_has_in_jax_outputs_gradients_and_caches_in_one_size(mechanism):
    pytest.importorskip("jax")
    chosen = of_library("jax", mechanisms=(mechanism,))
    assert {"outputs", "gradients", "caching"} <= {c.check for c in chosen}
    masks = {None, "lengths"} if mechanism.isidentifier() else {None}
    assert {c.layout.mask for c in chosen if c.check == "gradients"} >= masks
    assert not any(c.layout.block for c in chosen)


def test_a_named_library_has_all_masks_and_gradients_in_jax_in_one_size():
    pytest.importorskip("jax")
    chosen = [c for c in of_library("jax", libraries=("jax",)) if c.mechanism == "softmax"]
    checks = {c.check for c in chosen}
    assert {"outputs", "gradients", "packing", "padding", "future", "stability"} <= checks
    assert {"lengths", "segment_ids", "key_mask", None} == {c.layout.mask for c in chosen}
    assert len({(c.layout.b, c.layout.t, c.layout.h) for c in chosen}) == 1


def test_a_run_of_everything_has_no_more_of_jax_than_outputs(shared):
    pytest.importorskip("jax")
    chosen = [c for c in shared if c.library == "jax"]
    assert {(c.check, c.layout.name, c.dtype) for c in chosen} == {("outputs", "plain", "float32")}
    assert len({c.mechanism for c in chosen}) == len(chosen)


def test_without_float64_the_cases_of_jax_are_in_float32():
    pytest.importorskip("jax")
    only = {"only_mechanisms": ("softmax",), "only_libraries": ("jax",)}
    chosen = cases("smoke", **only, is_narrow=lambda expression, library: True)
    of_masks = [c for c in chosen if c.check == "outputs" and c.layout.name == "masked"]
    assert {c.dtype for c in of_masks} == {"float32"}
