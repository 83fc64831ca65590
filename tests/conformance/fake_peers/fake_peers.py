"""Peers of a fake project: each produces one kind of cell of the table, or ends its process.

They are for tests that run rows in separate processes, which import this module by its name.
"""

import os
import signal
import time
from dataclasses import dataclass

import numpy as np

from precondattn_conformance.ecosystem.contenders import OfProject
from precondattn_conformance.peers.project import Project

FAKE = Project("fake", "Fake", "https://fake.example", package="numpy", date="2026-01-02")
ABSENT = Project("absent", "Absent", "https://absent.example", package="no-such-package")

arranged = {"library": "numpy", "layout": "bhtd", "heads": "equal", "gradient": False}


@dataclass(frozen=True)
class Fake(OfProject):
    @property
    def peer(self):
        return (FAKE.peers | ABSENT.peers)[self.name]


def attend(q, k, v, scale, offset=None):
    """Softmax attention with the last query aligned with the last key."""
    t, s = q.shape[2], k.shape[2]
    hidden = np.arange(s) > np.arange(t)[:, None] + (s - t if offset is None else offset)
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ np.where(np.isnan(v), 0, v)


@FAKE.peer("softmax", **arranged)
def right(q, k, v, scale):
    return attend(q, k, v, scale)


@FAKE.peer("softmax", **arranged)
def first_aligned(q, k, v, scale):
    return attend(q, k, v, scale, offset=0)


@FAKE.peer("softmax", **arranged)
def dies(q, k, v, scale):
    if abs(q).max() > 1e3:  # Only inputs of the check `stability` are so large.
        os.kill(os.getpid(), signal.SIGKILL)
    return attend(q, k, v, scale)


@FAKE.peer("softmax", **arranged)
def hangs(q, k, v, scale):
    if abs(q).max() > 1e3:
        time.sleep(600)
    return attend(q, k, v, scale)


@FAKE.peer("softmax", **arranged)
def fails(q, k, v, scale):
    raise RuntimeError("needs another machine")


@ABSENT.peer("softmax", **arranged)
def absent(q, k, v, scale):
    return attend(q, k, v, scale)
