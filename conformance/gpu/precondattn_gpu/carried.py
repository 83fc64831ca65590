"""The assembler and the warm cache, which are carried to the GPU machine beside the wheels.

    python -m precondattn_gpu.carried pack FOLDER --wheel NVCC.whl --cache CACHE
    python -m precondattn_gpu.carried unpack FOLDER /tmp/precondattn

`pack` writes two compressed files into a folder: ptxas, the only program of the wheel
`nvidia-cuda-nvcc` that Triton needs, and the kernels that the last `precondattn_gpu.warm` used.
`unpack` makes of them the program `ptxas` and the folder `triton`, in which Triton finds kernels.
"""

from __future__ import annotations

import json
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from precondattn_kernel_tools.triton_cache import GROUP, build_of_triton, moved

PTXAS, CACHE = "ptxas", "triton"
"""The names of what is unpacked: a program, and a folder."""
PTXAS_FILE, CACHE_FILE = f"{PTXAS}.xz", f"{CACHE}_cache.tar.xz"
USED = "used.json"
"""The file of a cache that lists the folders which are carried, and says which Triton filled it."""
KEPT = (".cubin", ".json", ".so")
"""Endings of the files of a cache that are needed to launch a kernel."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 128 << 20}]
"""Kernels resemble each other, so the compressor looks back on all of them."""


def pack_ptxas(wheel: Path, folder: Path) -> None:
    """Write the assembler of a wheel into a folder, compressed.

    Raises
    ------
    ValueError
        if it is not the wheel `nvidia-cuda-nvcc`.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if PurePosixPath(n).parts[-2:] == ("bin", PTXAS)]
        if len(names) != 1:
            raise ValueError(
                f"--wheel has to be a wheel of nvidia-cuda-nvcc, with one bin/{PTXAS}; "
                f"{wheel.name} has {len(names)}"
            )
        with archive.open(names[0]) as program, _compressed(folder / PTXAS_FILE) as file:
            shutil.copyfileobj(program, file)


def pack_cache(cache: Path, folder: Path) -> int:
    """Write the used kernels of a cache into a folder, compressed; returns their number."""
    used = json.loads((cache / USED).read_text(encoding="utf-8"))["folders"]
    files = [path for name in used for path in (cache / name).iterdir() if path.suffix in KEPT]
    with (
        _compressed(folder / CACHE_FILE) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        # Files that resemble each other are side by side.
        for path in sorted(files, key=lambda path: (path.suffix, path.name, path.parent.name)):
            member = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
            member.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(member, content)
        archive.add(cache / USED, USED)
    return sum(path.name.startswith(GROUP) for path in files)


def unpack(folder: Path, to: Path) -> int:
    """Make the program and the cache; returns the number of kernels."""
    to.mkdir(parents=True, exist_ok=True)
    program = to / PTXAS
    with lzma.open(folder / PTXAS_FILE) as file, program.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    program.chmod(0o755)
    cache = to / CACHE
    with tarfile.open(folder / CACHE_FILE) as archive:
        archive.extractall(cache, filter="data")
    return moved(cache, cache.resolve())


def note_used(cache: Path, folders: Iterable[str]) -> None:
    """Save which folders of a cache are to be carried, and by which Triton they were filled."""
    content = {"folders": sorted(folders), "triton": build_of_triton()}
    (cache / USED).write_text(json.dumps(content), encoding="utf-8")


def is_of_this_triton(cache: Path) -> bool:
    """Whether the installed Triton filled a cache. Another Triton version finds no kernel there."""
    filled_by = json.loads((cache / USED).read_text(encoding="utf-8"))["triton"]
    return bool(filled_by == build_of_triton())


def _compressed(path: Path) -> lzma.LZMAFile:
    return lzma.open(path, "wb", filters=FILTERS)


app = typer.Typer(add_completion=False)


@app.command("pack")
def pack_command(
    folder: Annotated[Path, typer.Argument(help="the folder to carry")],
    wheel: Annotated[Path, typer.Option(help="the wheel nvidia-cuda-nvcc")],
    cache: Annotated[Path, typer.Option(help="the cache that precondattn_gpu.warm filled")],
) -> None:
    """Write the assembler and the cache into a folder, compressed."""
    pack_ptxas(wheel, folder)
    print(f"{pack_cache(cache, folder)} kernels are carried")


@app.command("unpack")
def unpack_command(
    folder: Annotated[Path, typer.Argument(help="the folder that was carried")],
    to: Annotated[Path, typer.Argument(help="a folder for the program and the cache")],
) -> None:
    """Make the program ptxas and Triton's cache in a folder."""
    count = unpack(folder, to)
    found = "" if is_of_this_triton(to / CACHE) else ", of another Triton than that here"
    print(f"{count} kernels are in {to / CACHE}{found}")


if __name__ == "__main__":
    app()
