"""Faulty backends with one fault each, which otherwise run the definition of a leaf.

They are for tests that run the suite in separate processes; the entry points are beside this file.
"""

import multiprocessing
import os
import signal
import time

import numpy as np

import precondattn as pa
from precondattn.method_backend import MethodRunner


class Definition(pa.Backend):
    """Supports single leaves, and runs their definition."""

    libraries = frozenset({"numpy", "torch"})
    declines = ("extend: does full calls only",)

    def prepare(self, piece, request):
        if len(piece.program.calls) > 1:
            return "does leaves only"
        if request.verb not in ("forward", "vjp"):
            return "does full calls only"
        return MethodRunner(self, piece)

    def forward(self, mechanism, inputs, frame):
        return mechanism.forward(inputs, frame)

    def backward(self, mechanism, inputs, frame, out, residuals, cotangent):
        return mechanism.backward(inputs, frame, out, residuals, cotangent)


def changed(change, base=Definition):
    """A backend whose outputs are `change(backend, output, inputs, frame)`."""

    class Changed(base):
        def forward(self, mechanism, inputs, frame):
            out, residuals = super().forward(mechanism, inputs, frame)
            return change(self, out, inputs, frame), residuals

    return Changed


class Zeros(changed(lambda self, out, inputs, frame: 0 * out)):
    name = "zeros"


class Shuffles(changed(lambda self, out, inputs, frame: np.roll(out, 1, axis=0))):
    """Returns the output of the next sequence."""

    name = "shuffles"


class Pretends(changed(lambda self, out, inputs, frame: out.astype("float32").astype(out.dtype))):
    """Returns float64 with the precision of float32."""

    name = "pretends"


class Refuses(Definition):
    name = "refuses"

    def prepare(self, piece, request):
        return "not today"


class Raises(Definition):
    name = "raises"

    def forward(self, mechanism, inputs, frame):
        raise RuntimeError("launch failed")


class Hangs(Definition):
    """Hangs on packed sequences."""

    name = "hangs"

    def forward(self, mechanism, inputs, frame):
        if frame.k_segment is not None:
            time.sleep(600)
        return super().forward(mechanism, inputs, frame)


class Crashes(Definition):
    """Kills its process on packed sequences."""

    name = "crashes"

    def forward(self, mechanism, inputs, frame):
        if frame.k_segment is not None:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(mechanism, inputs, frame)


def kept(self, out, inputs, frame):
    self.kept = [*getattr(self, "kept", ()), out + 0]
    return out


class Leaking(changed(kept)):
    name = "leaks"


class Locks(Definition):
    """Uses a lock between processes, as a pool of compilers does."""

    name = "locks"

    def __init__(self):
        self.lock = None

    def forward(self, mechanism, inputs, frame):
        self.lock = self.lock or multiprocessing.get_context("spawn").Lock()
        return super().forward(mechanism, inputs, frame)


class Narrow(Definition):
    """Is right, but lacks float64."""

    name = "narrow"

    def prepare(self, piece, request):
        if request.dtype == "float64":
            return "has no float64"
        return super().prepare(piece, request)


class Choosy(Narrow):
    """Is right in the few cases that it does not decline."""

    name = "choosy"

    def prepare(self, piece, request):
        shapes = dict(request.shapes)
        if shapes["q"][2] != shapes["k"][2]:
            return "takes a key head for each query head"
        return super().prepare(piece, request)


def odd_calls_differ(self, out, inputs, frame):
    self.is_odd = not getattr(self, "is_odd", False)
    return np.nextafter(out, 2 * out) if self.is_odd else out


class Varies(changed(odd_calls_differ, Narrow)):
    """Returns a result that differs in its last bit in every other call."""

    name = "varies"


class Quadratic(Definition):
    """Declares linear memory, but stores every pair of query and key."""

    name = "quadratic"
    memory = "linear"


class Late(Definition):
    """Declares a coverage floor that it does not meet."""

    name = "late"
    covers = frozenset({"softmax", "lucid_solve"})

    def prepare(self, piece, request):
        if piece.name == "lucid_solve":
            return "not yet"
        return super().prepare(piece, request)


class Keyed(Definition):
    """Caches a compiled kernel by the shapes of its inputs, ignoring the options."""

    name = "keyed"

    def __init__(self):
        self.compiled = {}

    def forward(self, mechanism, inputs, frame):
        shapes = tuple(array.shape for array in inputs.values())
        compiled = self.compiled.setdefault(shapes, mechanism)
        return compiled.forward(inputs, frame)


def wrong_once(self, out, inputs, frame):
    if frame.k_segment is None or os.path.exists(os.environ["WAS_WRONG"]):
        return out
    open(os.environ["WAS_WRONG"], "w").close()
    return 2 * out


class Sometimes(changed(wrong_once)):
    """Is wrong in the first process that runs it, and right in all others."""

    name = "sometimes"
