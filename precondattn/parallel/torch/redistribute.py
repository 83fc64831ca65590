"""A divided cache gathered into an ordinary one, on one process or on all."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from precondattn.arrays import fresh, wants_gradient
from precondattn.cache import Cache
from precondattn.cache.capacity import grown
from precondattn.cache.kinds import holding
from precondattn.given import Given, whole_number
from precondattn.parallel.torch.cache_arguments import check_not_donated
from precondattn.parallel.torch.divided_cache import DividedCache
from precondattn.parallel.torch.exchange import exchanged
from precondattn.parallel.torch.processes import processes_of


def redistribute(
    cache: DividedCache, *, to: int | None = None, capacity: int | None = None
) -> Cache | None:
    """The ordinary cache of all tokens, for `Mechanism.extend`, from a divided cache.

    All processes of the mesh must call this together. Many processes can thus read a long prompt,
    and fewer of them continue.

    Parameters
    ----------
    cache : DividedCache
        A cache from `ContextParallel.prefill` or `extend`. It is not modified.
    to : int, optional
        The rank in the mesh of the process that gets the cache; all processes by default.
    capacity : int, optional
        The capacity of the result; by default that of the divided cache.

    Returns
    -------
    Cache or None
        The cache that one process would have computed from all tokens; None on a process that does
        not get it.

    Raises
    ------
    TypeError, ValueError
        for an argument that is not a divided cache; and on all processes, for a cache that was
        donated, a rank that does not exist, a capacity that is too small, arguments that differ
        between processes, and if a gradient with respect to tokens would be needed.

    Examples
    --------
    In each of four processes started by `torchrun`, with their tokens of a prompt:

    >>> from precondattn.parallel.torch import context_parallel, redistribute
    >>> attn = context_parallel("lucid", mesh["cp"], layout="zigzag")  # doctest: +SKIP
    >>> out, cache = attn.prefill(q, k, v, capacity=200_000)  # doctest: +SKIP
    >>> cache = redistribute(cache, to=0)  # doctest: +SKIP
    >>> if cache is not None:  # doctest: +SKIP
    ...     out, cache = pa.Lucid().extend(cache, *new_token)
    """
    if not isinstance(cache, DividedCache):
        raise TypeError(
            f"redistribute: the cache must be a DividedCache from prefill; found "
            f"{type(cache).__name__}"
        )
    owner = f"redistribute(a cache of {cache.mechanism})"
    processes = processes_of(owner, cache.mesh)
    rank, devices = processes.rank, processes.devices
    arguments = partial(_checked, owner, cache, devices, to, capacity)
    (to, capacity), _ = processes.agree_on(
        arguments, lambda checked: f"{cache} to {checked[0]}, for {checked[1]} tokens"
    )
    is_given = to in (None, rank)
    if not cache.token_buffers:
        states = {name: fresh(state) for name, state in cache.part.store.items()}
        return holding(cache.part, cache.length, states) if is_given else None
    tensors = [cache.position, *(cache.part.store[name] for name in cache.token_buffers)]

    def rows_of(process: int, reader: int) -> int:
        return cache.rows_of(process) if to in (None, reader) else 0

    received = [
        exchanged(
            processes.group,
            rank,
            [x[:, : rows_of(rank, reader)].contiguous() for reader in range(devices)],
            [(x.shape[0], rows_of(process, rank), *x.shape[2:]) for process in range(devices)],
        )
        for x in tensors
    ]
    return processes.together(lambda: _joined(cache, received, capacity) if is_given else None)


def _joined(cache: DividedCache, received: list[list[Tensor]], capacity: int | None) -> Cache:
    """The cache with all rows in place, from the positions and each buffer's rows by process."""
    part, most = cache.part, cache.capacity if capacity is None else capacity
    assert most is not None  # The cache has token buffers.
    no_rows = {n: x[:, :0] if n in cache.token_buffers else x for n, x in part.store.items()}
    whole = grown(holding(part, cache.length, no_rows), most)
    for counts, (position, *tensors) in zip(cache.held, zip(*received, strict=True), strict=True):
        row = torch.arange(position.shape[1], device=position.device)
        count = torch.tensor(counts, device=position.device)
        sequence, row = (row < count[:, None]).nonzero(as_tuple=True)
        at = position[sequence, row].long()
        for name, x in zip(cache.token_buffers, tensors, strict=True):
            whole.store[name][sequence, at] = x[sequence, row]
    return whole


def _checked(
    owner: str, cache: DividedCache, devices: int, *arguments: Given
) -> tuple[int | None, int | None]:
    """`to` and `capacity` as Python's numbers."""
    check_not_donated(owner, cache)
    to, capacity = map(whole_number, arguments)
    for name, number, found in (("to", to, arguments[0]), ("capacity", capacity, arguments[1])):
        if number is None and found is not None:
            raise TypeError(f"{name} must be a whole number or None; found {found!r}")
    if to is not None and not 0 <= to < devices:
        raise ValueError(f"to must be a process, 0 to {devices - 1}, or None for all; found {to}")
    if cache.token_buffers and capacity is not None and capacity < max(cache.lengths):
        raise ValueError(
            f"capacity must be {max(cache.lengths)} or above, the number of tokens of the longest "
            f"sequence; found {capacity}"
        )
    if cache.token_buffers and wants_gradient(*cache.part.store.values()):
        raise ValueError(
            "tokens that are sent to other processes have no gradient; call it under "
            "torch.no_grad()"
        )
    return to, capacity
