"""Wheels for a machine: every requirement is met there, or the check names the unmet one."""

import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from typer.testing import CliRunner

from precondattn_gpu import packing

MACHINE = {"numpy": packing.Version("2.5.2"), "pytest": None}


def wheel(name="precondattn", version="1.0", needs=(), extras=(), python=">=3.11"):
    lines = [f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {need}" for need in needs]
    return Metadata.from_email("\n".join(["Metadata-Version: 2.4", *lines]), validate=False)


def problems(*wheels, extras=()):
    return packing.problems(wheels, MACHINE, extras)


def test_requirements_are_met_by_the_machine_and_by_carried_wheels():
    ours = wheel(needs=["numpy>=2", "Array_API.compat>=1.12", "pytest>=8"])
    assert problems(ours, wheel("array-api-compat", "1.16")) == []


def test_a_requirement_that_is_nowhere_is_named():
    (problem,) = problems(wheel(needs=["einops"]))
    assert problem == (
        "einops: precondattn requires einops, which is neither carried nor on the machine"
    )


@pytest.mark.parametrize("extras", [(), ("bench",)])
def test_requirements_of_an_extra_count_if_it_is_asked_for(extras):
    needs = ['precondattn[conformance]; extra == "bench"', 'rich>=13; extra == "conformance"']
    found = problems(wheel(needs=needs, extras=["bench", "conformance"]), extras=extras)
    assert [problem.split(":")[0] for problem in found] == ["rich"] * len(extras)


def test_versions_of_the_machine_and_of_wheels_have_to_fit():
    found = problems(wheel(needs=["numpy>=3", "fla-core==0.6.0"]), wheel("fla-core", "0.7.0"))
    assert sorted(found) == [
        "fla-core: precondattn requires fla-core==0.6.0, and 0.7.0 is carried",
        "numpy: precondattn requires numpy>=3, and 2.5.2 is on the machine",
    ]


def test_markers_are_those_of_the_machine():
    needs = ["a; python_version < '3.12'", "b; sys_platform == 'win32'", "c; os_name == 'posix'"]
    (problem,) = problems(wheel(needs=needs))
    assert problem.startswith("c: ")


@pytest.mark.parametrize(
    ("wheels", "problem"),
    [
        ([], "precondattn: no wheel of it is carried"),
        ([wheel(), wheel(version="2.0")], "precondattn: versions 1.0 and 2.0 are carried"),
        ([wheel(), wheel("NumPy", "2.6")], "numpy: is carried, and the machine has it: 2.5.2"),
        ([wheel(python=">=3.13")], "precondattn: requires Python >=3.13, not 3.12"),
    ],
)
def test_what_is_wrong_with_the_wheels_is_a_problem(wheels, problem):
    assert problems(*wheels) == [problem]


def test_an_extra_that_does_not_exist_is_a_problem():
    assert problems(wheel(extras=["bench"]), extras=["benches"]) == [
        "precondattn: has no extra benches"
    ]


def test_the_list_of_the_machine_has_names_with_and_without_versions(tmp_path):
    path = tmp_path / "machine.txt"
    path.write_text("# packages\nML_dtypes\nnumpy==2.5.2  # a version\n\n")
    assert packing.machine_of(path) == {"ml-dtypes": None, "numpy": packing.Version("2.5.2")}
    path.write_text("numpy>=2")
    with pytest.raises(ValueError, match="line 1: expected name or name==version, found 'numpy>=2"):
        packing.machine_of(path)


def test_the_command_fails_and_says_why(tmp_path, monkeypatch):
    listed = tmp_path / "machine.txt"
    listed.write_text("numpy==2.5.2")
    for name, needs in (("precondattn", "numpy"), ("other", "numpy<2")):
        metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\nRequires-Dist: {needs}\n"
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}-1.dist-info/METADATA", metadata)
    app = packing.typer.Typer()
    app.command()(packing.main)
    done = CliRunner().invoke(app, [str(tmp_path), "--machine", str(listed)])
    assert done.exit_code == 1
    assert "numpy: other requires numpy<2, and 2.5.2 is on the machine" in done.output
    assert "ptxas.xz: is not carried" in done.output
    Path(tmp_path / "other-1-py3-none-any.whl").unlink()
    for name in ("ptxas.xz", "triton_cache.tar.xz"):
        (tmp_path / name).write_bytes(b"x" * 2**18)
    done = CliRunner().invoke(app, [str(tmp_path), "--machine", str(listed)])
    assert done.exit_code == 0, done.output
    assert "every requirement is met" in done.output
    assert "0.2 MiB  ptxas.xz" in done.output
    monkeypatch.setattr(packing, "MOST_BYTES", 2**19)
    done = CliRunner().invoke(app, [str(tmp_path), "--machine", str(listed)])
    assert done.exit_code == 1
    assert "bytes, of 524288" in done.output
