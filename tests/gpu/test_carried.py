"""The files that are carried to a GPU machine beside the wheels are packed and unpacked."""

import json
import os
import zipfile

import pytest

pytest.importorskip("triton")

from typer.testing import CliRunner

from precondattn_gpu import carried


@pytest.fixture
def cache(tmp_path):
    """A cache of two kernels and a module, as Triton and `precondattn_gpu.warm` leave it."""
    folder = tmp_path / "cache"
    for name in ("USED", "UNUSED"):
        kernel = folder / name
        kernel.mkdir(parents=True)
        files = {file: str(kernel / file) for file in ("f.cubin", "f.json", "f.source")}
        for path in files.values():
            with open(path, "w") as file:
                file.write(name)
        (kernel / "__grp__f.json").write_text(json.dumps({"child_paths": files}))
    (folder / "MODULE").mkdir()
    (folder / "MODULE" / "launcher.cpython-312-x86_64-linux-gnu.so").write_text("module")
    carried.note_used(folder, {"USED", "MODULE"})
    return folder


def wheel_at(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"#!/bin/sh\necho {name}")
    return path


def test_what_is_unpacked_is_the_program_and_the_used_kernels_with_paths_of_their_new_folder(
    tmp_path, cache
):
    folder, to = tmp_path / "folder", tmp_path / "to"
    folder.mkdir()
    nvcc = wheel_at(tmp_path / "nvcc.whl", "nvidia/cu13/bin/ptxas", "nvidia/cu13/bin/nvcc")
    carried.pack_ptxas(nvcc, folder)
    assert carried.pack_cache(cache, folder) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["ptxas.xz", "triton_cache.tar.xz"]
    assert carried.unpack(folder, to) == 1
    assert os.access(to / "ptxas", os.X_OK)
    assert "bin/ptxas" in (to / "ptxas").read_text()
    names = sorted(path.name for path in (to / "triton").iterdir())
    assert names == ["MODULE", "USED", "used.json"]
    kernel = to / "triton" / "USED"
    listed = json.loads((kernel / "__grp__f.json").read_text())["child_paths"]
    # Triton skips listed files that do not exist: the source is not needed to launch a kernel.
    assert {name for name, path in listed.items() if os.path.exists(path)} == {"f.cubin", "f.json"}
    assert listed["f.cubin"] == str(kernel / "f.cubin")


def test_it_is_said_if_the_kernels_are_of_another_triton(tmp_path, cache, monkeypatch):
    nvcc = wheel_at(tmp_path / "nvcc.whl", "nvidia/cu13/bin/ptxas")
    carried.pack_ptxas(nvcc, tmp_path)
    carried.pack_cache(cache, tmp_path)
    command = ["unpack", str(tmp_path), str(tmp_path / "to")]
    said = CliRunner().invoke(carried.app, command).output
    assert said.strip().replace("\n", "").endswith("to/triton")
    monkeypatch.setattr(carried, "build_of_triton", lambda: "another")
    said = CliRunner().invoke(carried.app, command).output
    assert "1 kernels are in" in said
    assert "of another Triton than that here" in said


def test_a_wheel_without_the_assembler_is_refused(tmp_path):
    wheel = wheel_at(tmp_path / "other.whl", "nvidia/lib/ptxas")
    with pytest.raises(ValueError, match=r"one bin/ptxas; other\.whl has 0"):
        carried.pack_ptxas(wheel, tmp_path)
