"""A warm call, the second of its signature, takes few Python calls in few files."""

import sys

import numpy as np
import pytest

import precondattn as pa

LIMITS = {  # Python calls, and the files that they are in
    (pa.Softmax, "numpy"): (90, 15),
    (pa.Lucid, "numpy"): (180, 20),
    (pa.Softmax, "torch"): (20, None),
    (pa.Lucid, "torch"): (65, None),
}


def traced(call):
    """The code of every Python function of this project that a call enters."""
    codes = []

    def note(frame, event, _):
        is_ours = frame.f_globals.get("__name__", "").startswith("precondattn")
        if event == "call" and is_ours and frame.f_code.co_filename != "<string>":
            codes.append(frame.f_code)  # The methods of dataclasses are not in a file.

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return codes


@pytest.mark.parametrize(("cls", "library"), LIMITS)
def test_a_warm_call_takes_few_calls_in_few_files(cls, library):
    asarray = pytest.importorskip(library).asarray
    q, k, v = map(
        asarray, np.random.default_rng(0).normal(size=(3, 1, 64, 2, 16)).astype("float32")
    )
    mechanism = cls()
    mechanism(q, k, v)
    codes = traced(lambda: mechanism(q, k, v))
    most_calls, most_files = LIMITS[cls, library]
    files = {code.co_filename for code in codes}
    listed = "\n".join(sorted(f"{code.co_filename}: {code.co_qualname}" for code in codes))
    assert len(codes) <= most_calls, listed
    assert most_files is None or len(files) <= most_files, listed


def test_a_call_with_arrays_of_numpy_enters_no_file_of_another_framework():
    q = np.random.default_rng(0).normal(size=(1, 6, 2, 4))
    codes = traced(lambda: pa.lucid(q, q, q))
    assert codes
    assert not [c for c in codes if "/torch/" in c.co_filename or "/jax/" in c.co_filename]
