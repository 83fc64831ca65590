"""The description of a timed row in pytest-benchmark: its columns, its group and its name.

Rows of one group stand in one table. The group has neither the library nor the device in it, so
that a peer, another library and another machine stand beside the row that they are compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from precondattn_conformance.bench.cases import BenchCase

if TYPE_CHECKING:
    from precondattn_conformance.bench.peers import TimedPeer


class Columns(NamedTuple):
    """The parameters of a row, all of them texts."""

    mechanism: str
    """The mechanism that is compared. A peer may compute another one, as `sdpa` does."""
    library: str
    backend: str
    """A backend as it was named, `default`, or the name of a peer."""
    device: str
    work: str
    sizes: str
    dtype: str

    @property
    def group(self) -> str:
        """The name of the table in which the row stands."""
        return f"{self.mechanism} {self.work} {self.sizes} {self.dtype}"

    def id(self, computed: str = "") -> str:
        """The row in the brackets of a test's name; `computed` is what a peer computes."""
        parts = self._asdict()
        if computed not in ("", self.mechanism, self.backend):
            parts["backend"] = f"{self.backend}({computed})"
        if self.dtype == "float32":
            del parts["dtype"]
        return "-".join(parts.values())


def columns_of(case: BenchCase, peer: TimedPeer | None = None) -> Columns:
    """The columns of a case, or of a peer beside it."""
    library = (peer and peer.library) or case.library
    work = f"packed_{case.work}" if case.packed else case.work
    backend = peer.name if peer else case.backend or "default"
    device = device_on(library, case.device)
    where = (library, backend, device, work, sizes_of(case), case.dtype)
    return Columns(str(case.parsed), *where)


def device_on(library: str, device: str | None) -> str:
    """The device of a library's arrays if this one is requested: NumPy's are always on a CPU."""
    if library in ("numpy", "array_api_strict"):
        return "cpu"
    return "cuda" if library == "cupy" else device or "cpu"


def sizes_of(case: BenchCase) -> str:
    """The sizes as `--sizes` takes them: `t=1024,h=4,d=64`.

    A batch of one, as many key heads as query heads, and values as wide as keys are not written.
    """
    sizes = case.layout.sizes
    has_slots = any("m" in pattern.letters for pattern in case.parsed.inputs.values())
    left_out = {"b": sizes["b"] == 1, "n": sizes["n"] == sizes["h"], "m": not has_slots}
    left_out["e"] = sizes["e"] == sizes["d"]
    return ",".join(f"{x}={sizes[x]}" for x in "bthndem" if not left_out.get(x))
