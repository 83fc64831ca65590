"""The memory that a process holds, by which the check `leaks` finds a leak."""

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


def test_an_array_that_is_kept_is_held_until_it_is_released():
    before = held_bytes(NUMPY)
    kept = np.ones(SIZE, dtype=np.uint8)
    held = held_bytes(NUMPY)
    assert held - before == pytest.approx(SIZE, rel=0.1)
    del kept
    assert held_bytes(NUMPY) - before < SIZE / 10


def test_pages_of_a_file_that_the_system_drops_hide_no_kept_array(tmp_path):
    path = tmp_path / "like_a_library"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # Each page is in memory now.
        before = held_bytes(NUMPY)
        kept = np.ones(SIZE, dtype=np.uint8)
        mapped.madvise(mmap.MADV_DONTNEED)  # As the system does when memory is short.
        assert held_bytes(NUMPY) - before == pytest.approx(kept.nbytes, rel=0.1)
