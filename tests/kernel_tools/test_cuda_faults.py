"""The CUDA simulator detects planted faults in any thread order, and names their line."""

import re

import numpy as np
import pytest

from precondattn_kernel_tools.cuda_simulator import (
    KernelError,
    OutOfBoundsError,
    RaceError,
    SynchronizationError,
    UninitializedError,
    checked,
)
from tests.kernel_tools.cuda_examples.launches import (
    EXAMPLES,
    ORDERS,
    faults,
    normal,
    turns,
    unwritten,
)
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator

LINES = (EXAMPLES / "faults.cu").read_text().split("\n")


def lines_of(name):
    return [i for i, line in enumerate(LINES, 1) if line.endswith(f"// here {name}")]


FAULTS = [
    ("missing_barrier", UninitializedError, r"byte \d+ of row, .* no thread of the block"),
    ("missing_second_barrier", RaceError, "with no barrier between them"),
    ("missing_syncwarp", RaceError, "of row, .* with no barrier between them"),
    ("two_write", RaceError, r"writes element \d+ of args\[1\], .* has written"),
    ("two_blocks_write", RaceError, "a thread of another block, number 0 to run, has written"),
    ("missing_fence", RaceError, "with no fence between them"),
    ("divergent_barrier", SynchronizationError, "a barrier is divergent"),
    ("barrier_after_return", SynchronizationError, r"thread \(\d+, 0, 0\) has returned"),
    ("uneven_loop", SynchronizationError, "has returned"),
    ("barrier_in_a_part_of_a_warp", SynchronizationError, "a deadlock: .* waits in __syncwarp"),
    ("read_behind", OutOfBoundsError, r"reads 4 bytes at element 64 of args\[0\], float32"),
    ("read_before", OutOfBoundsError, r"reads 4 bytes at element -[12] of args\[0\]"),
    ("read_far", OutOfBoundsError, r"at element 262\d+ of args\[0\], .* which has 64"),
    ("write_behind", OutOfBoundsError, r"writes 4 bytes at element \d+ of args\[1\]"),
    ("update_behind", OutOfBoundsError, r"writes 4 bytes at element 64 of args\[1\]"),
    ("copy_behind", OutOfBoundsError, r"reads 260 bytes at element 0 of args\[0\]"),
    ("null_pointer", OutOfBoundsError, "which is in no array of the call"),
    ("shared_behind", OutOfBoundsError, r"writes 4 bytes at byte \d+ of row, which has 256"),
    ("dynamic_behind", OutOfBoundsError, "of dynamic shared memory, which has 128"),
    ("row_behind", OutOfBoundsError, r"index \d+ is outside of an array of type 'float \[9\]'"),
    ("local_behind", OutOfBoundsError, r"index \d+ is outside of an array of type 'float \[4\]'"),
    ("misaligned", OutOfBoundsError, "float4. is used at byte 4 of .* no multiple of 16"),
    ("misaligned_in_shared", OutOfBoundsError, "float4. is used at byte 0 of row"),
    ("uninitialized", UninitializedError, "reads byte 252 of row"),
    ("uninitialized_sum", UninitializedError, "reads byte 0 of sum"),
    ("left_from_another_block", UninitializedError, "no thread of the block has written"),
    ("mask_without_itself", SynchronizationError, "the mask 0x0000ffff does not name it"),
    ("mask_without_the_source", SynchronizationError, "lane .* mask 0x0000ffff does not name that"),
    ("lane_returned", SynchronizationError, r"reads lane 20 in a shuffle, .* which has returned"),
    ("lane_elsewhere", SynchronizationError, "lanes of the mask .* wait at different places"),
    ("masks_that_differ", SynchronizationError, "a deadlock: .* with the mask 0x"),
    ("waits_for_ever", SynchronizationError, "does not come to an end"),
    ("divides_by_zero", KernelError, "an integer is divided by zero"),
    ("overflows", KernelError, "an integer overflows"),
    ("asserts", KernelError, "an assertion fails: threadIdx.x < 63"),
    ("needs_much_stack", KernelError, "needs more than 128 KiB for its local variables"),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "kind", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_planted_fault_is_detected_at_its_line(name, kind, says, order):
    if name == "missing_barrier" and order is not None:
        kind, says = (RaceError, UninitializedError), "of row"
    x, y = normal(64), unwritten(64)
    with checked(order), pytest.raises(kind, match=says) as error:
        faults().get_function(name)((2,), (64,), (x, y, np.int32(64)), shared_mem=128)
    named = {int(line) for line in re.findall(r"line (\d+) of faults.cu", str(error.value))}
    assert named <= set(lines_of(name))
    assert bool(named) == bool(lines_of(name))
    assert str(error.value).startswith(f"{name}: ")
    assert re.search(r"thread \(\d+, 0, 0\) of block \([01], 0, 0\)", str(error.value))
    assert np.isnan(y).all()  # A failed launch writes no results.


def test_every_fault_has_a_test():
    text = "\n".join(LINES)
    assert re.findall(r"(?m)^FAULT (\w+)\(", text) == [name for name, *_ in FAULTS]


def test_after_a_fault_the_simulator_still_works():
    for _ in range(3):
        with pytest.raises(SynchronizationError):
            faults().get_function("divergent_barrier")(
                (1,), (64,), (normal(64), unwritten(64), np.int32(64))
            )
        assert turns(None) == list(range(12))
