"""A model of the time that sequences divided among devices take: compute, bytes and latency.

A device computes one thing at a time and receives while it computes. `Constants` are all the
assumptions about it. None of them was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

LAYOUTS = ("contiguous", "zigzag", "cyclic")


@dataclass(frozen=True)
class Constants:
    """One device, its link, and the attention that is computed."""

    flops: float = 989e12
    share: float = 0.5
    """The share of `flops` that attention and the solve reach."""
    recurrent_share: float = 0.25
    tiles: int = 132
    """Fewer tiles of `tile` rows of one head leave multiprocessors idle; 0: never."""
    tile: int = 128
    near: float = 450e9
    """Bytes per second and direction, up to `node` devices."""
    far: float = 50e9
    node: int = 8
    link_share: float = 0.8
    message: float = 10e-6
    launch: float = 3e-6
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    number: int = 2
    """Bytes per number of the inputs."""
    backward_work: float = 2.5
    backward_bytes: float = 3.0
    """Keys and values once more, and their gradients in float32."""
    chunk: int = 64

    def compute(self, pairs: float, heads: float, rows: float) -> float:
        """Seconds for two products of each pair of `heads` heads, of `rows` rows."""
        filled = min(1.0, rows * heads / self.tile / self.tiles) if self.tiles else 1.0
        work = 4 * self.width * pairs * heads
        return work / (self.flops * self.share * filled) if work else 0.0

    def transfer(self, size: float, devices: int) -> float:
        """Seconds to receive `size` bytes."""
        rate = self.near if devices <= self.node else self.far
        return size / (rate * self.link_share)

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's key and value."""
        return 2 * self.width * self.kv_heads * self.number


def owners(layout: str, blocks: int, devices: int) -> np.ndarray:
    """The device of each block."""
    block = np.arange(blocks)
    if layout == "cyclic":
        return block % devices
    parts = devices * (2 if layout == "zigzag" else 1)
    part = block * parts // blocks
    return np.minimum(part, 2 * devices - 1 - part) if layout == "zigzag" else part


def idle_share(layout: str, tokens: int, devices: int, block: int = 1) -> float:
    """The share of idle work: 1 − mean / max of the pairs that devices have, counted."""
    if layout != "cyclic":
        block = tokens // (devices * (2 if layout == "zigzag" else 1))
    owner = owners(layout, tokens // block, devices)
    first = np.arange(len(owner), dtype=float) * block
    pairs = np.bincount(owner, block * first + block * (block + 1) / 2, devices)
    return float(1 - pairs.mean() / pairs.max())


def closed_idle_share(layout: str, tokens: int, devices: int, block: int = 1) -> float:
    """The share of idle work in closed form, for equal numbers of blocks.

    contiguous: the last device has c (N − (c − 1)/2) pairs, with c = N / P; cyclic: it has
    B (P − 1) / 2 keys more than the mean for each of its queries.
    """
    mean = (tokens + 1) / 2
    if layout == "zigzag":
        return 0.0
    more = (tokens - tokens / devices) / 2 if layout == "contiguous" else block * (devices - 1) / 2
    return more / (mean + more)


def ring(c: Constants, tokens: int, devices: int, layout: str, backward: bool = False) -> float:
    """Softmax attention to keys that go around, in rounds."""
    work, size = (c.backward_work, c.backward_bytes) if backward else (1.0, 1.0)
    part = tokens / devices
    own = work * c.compute(part**2 / 2, c.heads, part) + c.launch
    pairs = part**2 / 2 if layout == "zigzag" else part**2
    other = work * c.compute(pairs, c.heads, part) + c.launch
    passed = c.transfer(size * part * c.key_bytes, devices) + c.message
    if devices == 1:
        return own
    # Keys of the next round are received during this one.
    return max(own, passed) + (devices - 2) * max(other, passed) + other


def by_heads(
    c: Constants, tokens: int, devices: int, solve: bool = False, backward: bool = False
) -> float | None:
    """Tokens exchanged for heads; None where devices do not divide the heads."""
    if c.heads % devices:
        return None
    work = c.backward_work if backward else 1.0
    heads, kv_heads = c.heads / devices, max(1.0, c.kv_heads / devices)
    # q and the output, and key/value heads as often as devices need them.
    sent = 2 * c.width * (c.heads + kv_heads * devices) * c.number * tokens / devices
    seconds = work * c.compute(tokens**2 / 2, heads, tokens) + c.launch
    if solve:
        seconds += work * c.compute(tokens**2 / 2, kv_heads, tokens) + c.launch
    if devices > 1:
        size = sent * (devices - 1) / devices * (2 if backward else 1)
        seconds += c.transfer(size, devices) + 2 * (devices - 1) * c.message
    return seconds


def scan(c: Constants, tokens: int, devices: int, backward: bool = False) -> float:
    """The gated delta rule: tokens computed twice, and states scanned between."""
    d, rounds = c.width, ceil(log2(devices))
    each = c.heads * (6 * d * d + 8 * c.chunk * d)  # FLOPs of a token in one pass.
    passes = 1 if devices == 1 else 3  # The first pass has values of 2 d channels.
    work = (c.backward_work if backward else 1.0) * passes * each * tokens / devices
    rate = c.flops * c.recurrent_share
    combine = c.heads * 4 * d**3 / rate + c.launch
    moved = c.transfer(c.heads * 2 * d * d * 4, devices) + c.message
    return work / rate + passes * c.launch + rounds * (combine + moved)


def gathered(c: Constants, tokens: int, devices: int, backward: bool = False) -> float:
    """LUCID: all keys and values gathered, every device solves all, then balanced attention."""
    work, size = (c.backward_work, c.backward_bytes) if backward else (1.0, 1.0)
    seconds = work * c.compute(tokens**2 / 2, c.kv_heads, tokens)
    seconds += work * c.compute(tokens**2 / 2 / devices, c.heads, tokens / devices) + 2 * c.launch
    if devices > 1:
        other = size * tokens * c.key_bytes * (devices - 1) / devices
        seconds += c.transfer(other, devices) + (devices - 1) * c.message
    return seconds


@dataclass(frozen=True)
class Pipelined:
    """The seconds of a pipelined solve, and its busy and idle shares of all devices' time."""

    seconds: float
    busy: float
    """The mean over devices."""
    idle_by_device: np.ndarray
    idle_over_time: np.ndarray
    """The idle share in each of ten consecutive parts of the solve."""


def pipelined(
    c: Constants, tokens: int, devices: int, layout: str, block: int, backward: bool = False
) -> Pipelined:
    """LUCID: blocks solved in order by their owners, broadcast, and used by all.

    A device processes blocks in the order of arrival. The owner of the next block first updates
    and solves the rows of that block (look-ahead), then updates its later rows and its attention.
    """
    work, size = (c.backward_work, c.backward_bytes) if backward else (1.0, 1.0)
    blocks = tokens // block
    owner = owners(layout, blocks, devices)
    later = np.bincount(owner, minlength=devices).astype(float)
    # Diagonal blocks are inverted beforehand, all at once: 2/3 B² FLOPs for each row and head.
    begin = work * c.compute(tokens / devices * block / 6 / c.width, c.kv_heads, tokens / devices)
    free, idle = np.full(devices, begin), np.zeros(devices)
    over_time = np.zeros(10)

    apply = work * c.compute(block**2 / 2, c.kv_heads, block) + c.launch
    update = work * c.compute(block**2, c.kv_heads, block) + c.launch
    carried = c.transfer(size * block * c.key_bytes, devices) if devices > 1 else 0.0
    hops = ceil(log2(devices)) * c.message

    def rows(count: np.ndarray, pairs: np.ndarray, heads: int) -> np.ndarray:
        full = count * block * heads / c.tile
        filled = np.minimum(1, full / c.tiles) if c.tiles else np.ones(devices)
        seconds = work * 4 * c.width * pairs * heads / (c.flops * c.share)
        return np.where(pairs > 0, seconds / np.maximum(filled, 1e-9) + c.launch, 0)

    solved, link = begin + apply, 0.0
    free[owner[0]] += apply
    for j, source in enumerate(owner):
        sent = max(solved, link)
        link = sent + carried
        arrived = np.full(devices, sent + carried + hops)
        arrived[source] = solved
        later[source] -= 1
        attending = later.copy()
        attending[source] += 1
        pairs = later * float(block**2)
        own = pairs.copy()
        own[source] += block**2 / 2
        updating, at_once = later.copy(), np.zeros(devices)
        if j + 1 < blocks:
            updating[owner[j + 1]] -= 1
            at_once[owner[j + 1]] = update + apply
        seconds = at_once + rows(updating, updating * float(block**2), c.kv_heads)
        seconds += rows(attending, own, c.heads)
        # A device without later rows is done, not waiting; its idle time is counted at the end.
        start = np.where(seconds > 0, np.maximum(free, arrived), free)
        idle += start - free
        over_time[10 * j // blocks] += (start - free).mean()
        free = start + seconds
        if j + 1 < blocks:
            solved = start[owner[j + 1]] + update + apply
    end = float(free.max())
    over_time[9] += (end - free).mean()
    idle += end - free
    return Pipelined(end, float(1 - idle.mean() / end), idle / end, over_time / end)
