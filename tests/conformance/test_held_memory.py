"""The memory that a process holds, by which the check `leaks` finds a leak."""

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from precondattn_conformance import libraries
from precondattn_conformance.memory import held_bytes

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(),
    reason="only Linux reports the memory of a process by kinds of pages; `held_bytes` is 0 here",
)

SIZE = 32 << 20
NUMPY = libraries.named("numpy")


def test_a_kept_array_is_held_until_it_is_released_whatever_the_system_drops(tmp_path):
    """Pages of a mapped file, such as a library, are dropped when memory is short."""
    path = tmp_path / "like_a_library"
    path.write_bytes(bytes(SIZE))
    gc.freeze()  # Each measurement would visit the objects of all tests.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # Each page is in memory now.
        before = held_bytes(NUMPY)
        kept = np.ones(SIZE, dtype=np.uint8)
        mapped.madvise(mmap.MADV_DONTNEED)
        assert held_bytes(NUMPY) - before == pytest.approx(kept.nbytes, rel=0.1)
        del kept
        assert held_bytes(NUMPY) - before < SIZE / 10
    gc.unfreeze()
