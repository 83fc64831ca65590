"""Compiles, without a GPU, the C modules with which Triton 3.6 calls kernels on the host.

There is a module for each signature of a kernel, and one for the driver. Triton compiles them with
the C compiler, which takes up to half a second each, and caches them by their text. A module that
can not be loaded on another machine, for example because of an older C library, is compiled again
there. Newer versions of Triton have one module for all signatures.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from precondattn_kernel_tools.foreign import CompiledKernel

LIBRARY = "libcuda.so.1"
"""NVIDIA's driver. The modules are linked to it by name, so an empty library suffices here."""


class HostCode:
    """Compiles the modules into Triton's cache. `folder` is for the empty library."""

    def __init__(self, folder: Path) -> None:
        source = folder / "empty.c"
        source.write_text("")
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY)]
        subprocess.run([*command, str(source)], check=True)
        self.folder = folder
        self.folders: set[str] = set()
        """The folders of the modules in the cache."""
        self._done: set[str] = set()

    def driver(self) -> None:
        """The module of the driver itself."""
        from triton.backends.nvidia import driver

        path = Path(driver.__file__).with_name("driver.c")
        self._compile(path.read_text(encoding="utf-8"), "cuda_utils")

    def launcher(self, kernel: CompiledKernel) -> None:
        """The module of a compiled kernel's signature, if this version of Triton has one."""
        from triton.backends.nvidia import driver

        if hasattr(driver, "make_launcher"):
            source, meta = kernel.src, getattr(kernel.metadata, "tensordesc_meta", None)
            text = driver.make_launcher(source.constants, source.signature, meta)
            self._compile(text, "__triton_launcher")

    def _compile(self, text: str, name: str) -> None:
        from triton.backends.nvidia import driver
        from triton.runtime import build

        if text in self._done:
            return
        self._done.add(text)
        load = build._load_module_from_path
        build._load_module_from_path = self._note  # Loading a module requires the driver.
        try:
            folders = [str(self.folder)]
            build.compile_module_from_src(
                text, name, folders, driver.include_dirs, driver.libraries
            )
        finally:
            build._load_module_from_path = load

    def _note(self, name: str, path: str) -> None:
        self.folders.add(Path(path).parent.name)
