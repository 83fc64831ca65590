"""Faults of processes that divide sequences. Each affects the calls of one mechanism."""

import os
import signal
import time
from contextlib import contextmanager
from unittest.mock import patch

from precondattn.parallel.torch import ContextParallel
from precondattn.parallel.torch.ring import RingCall

passed_on = RingCall.passed_on
call = ContextParallel.__call__


def passed_in_disorder(ring, held, source):
    """Deliver the keys in another order than their values, for softmax with a cap."""
    received = passed_on(ring, held, source)
    if ring.piece.leaf.softcap is None:
        return received
    return [received[0].flip(1), *received[1:]]


def called(attn, *arrays, **named):
    if attn.processes.rank == 1:
        match attn.mechanism.name:
            case "gla":
                os.kill(os.getpid(), signal.SIGKILL)
            case "linear":
                time.sleep(600)
            case "ssd":
                raise MemoryError("no room for the keys")
    return call(attn, *arrays, **named)


@contextmanager
def faults():
    with (
        patch.object(RingCall, "passed_on", passed_in_disorder),
        patch.object(ContextParallel, "__call__", called),
    ):
        yield
