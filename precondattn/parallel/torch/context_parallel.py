"""Attention over sequences whose tokens are divided among the processes of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Array
from precondattn.cache import Cache
from precondattn.parallel.divided_mechanism import (
    CONTIGUOUS,
    HEADS,
    TOKENS,
    DividedMechanism,
    advice,
)
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.torch import cached, exchange, tokens
from precondattn.parallel.torch.cache_arguments import CacheStart, NewTokens, bind_new
from precondattn.parallel.torch.call import Bound, DividedCall, bind
from precondattn.parallel.torch.divided_cache import DividedCache
from precondattn.parallel.torch.processes import check_mesh, processes_of


def context_parallel(
    mechanism: Mechanism | str, mesh: DeviceMesh, *, layout: str | None = None
) -> ContextParallel:
    """The mechanism, to be called by every process of a mesh with its part of the tokens.

    Parameters
    ----------
    mechanism : Mechanism or str
        The mechanism to call, or its expression.
    mesh : DeviceMesh
        A mesh of one dimension. The tokens of process i follow those of process i − 1, unless the
        layout says otherwise.
    layout : str, optional
        How a call is divided (`precondattn.parallel`): by "heads"; or by tokens, in the order
        "contiguous", "zigzag" or "cyclic[block=B]" (`precondattn.parallel.layouts`). In the last
        two the tokens of a process are not consecutive. The default is "heads" if the number of
        heads can be divided among the processes, and "contiguous" otherwise. A process has the same
        tokens in both.

    Returns
    -------
    ContextParallel
        It is called like the mechanism. Inputs with tokens are given as this process's part, as
        tensors, or as DTensors with the placement `Shard` along the tokens. Other inputs, such as
        weights, are whole on every process, and so are `lengths` and `cu_seqlens`. The result is
        the output of this process's tokens, as a tensor or a DTensor.

    Raises
    ------
    TypeError, ValueError
        if `mesh` is not a DeviceMesh of one dimension, or the layout is unknown. In a call, on all
        processes: if arguments do not fit each other, on one process or between processes, if a
        process has no token, or if the layout can not divide the call.

    Notes
    -----
    The gradient of a token is that of the sum of all processes' losses. The gradient of a weight is
    this process's term of it, and data parallelism adds up the terms. A second derivative raises an
    error.

    Examples
    --------
    In each of four processes started by `torchrun`, with q, k and v (b, T / 4, heads, width):

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))  # doctest: +SKIP
    >>> attn = context_parallel("lucid", mesh["cp"])  # doctest: +SKIP
    >>> out = attn(q, k, v)  # doctest: +SKIP
    """
    return ContextParallel(mechanism, mesh, layout)


class ContextParallel(DividedMechanism):
    """A mechanism whose tokens are divided among processes; made by `context_parallel`."""

    outputs = {HEADS: exchange.output, TOKENS: tokens.output}  # noqa: RUF012

    def __init__(self, mechanism: Mechanism | str, mesh: DeviceMesh, layout: str | None) -> None:
        super().__init__(mechanism, layout)
        check_mesh(self.owner, mesh, "mesh['cp']")
        self.mesh, self.processes = mesh, processes_of(self.owner, mesh)

    def __repr__(self) -> str:
        return f"context_parallel({str(self.mechanism)!r}, {self.mesh}, layout={self.layout!r})"

    def __call__(self, *arrays: Array, backend: BackendNames = None, **named: Array) -> Tensor:
        """The output of this process's tokens."""
        call = self._bound(arrays, named, backend)
        return self._as_given(call, self.outputs[self._way(call)](call))

    def prefill(
        self,
        *arrays: Array,
        capacity: int | None = None,
        cache: Cache | None = None,
        backend: BackendNames = None,
        **named: Array,
    ) -> tuple[Tensor, DividedCache]:
        """The output of this process's tokens, and a cache of all tokens that is divided.

        Each process keeps the rows of its own tokens for softmax attention, LASER and LUCID. Every
        process gets the states of recurrences after all tokens.

        Parameters
        ----------
        *arrays, **named
            The arguments of a call: this process's tokens, and `lengths` or `key_mask`. A given key
            mask is stored in the cache.
        capacity : int
            The most tokens of a sequence, counted over all processes. It may be omitted if the
            cache consists of states.
        cache : Cache, optional
            An ordinary cache of earlier tokens, the same on every process. It must consist of
            states.

        Returns
        -------
        tuple
            The output, as in a call, and a `DividedCache` for `extend` and `redistribute`.

        Raises
        ------
        TypeError, ValueError
            on all processes: the errors of a call; for the layout "heads", packed sequences, and a
            mechanism that is not causal; for a capacity that is missing or too small; and for a
            `cache` with tokens, or of another mechanism.

        Notes
        -----
        Output and states are differentiable. The gradient of a state after all tokens is that of
        the sum of all processes' losses. The gradient of an initial state is on the first process,
        and 0 on the others.
        """
        start = CacheStart(self.mechanism, capacity, cache)
        call = self._bound(arrays, named, backend, start)
        of_cache, refused = cached.refusal(self.mechanism), self._refusal_by(self.order, call)
        if refused is not None:
            refused += advice({"contiguous": self._refusal_by(CONTIGUOUS, call) or of_cache})
        if refused or of_cache:
            raise ValueError(f"{self.owner}: {refused or of_cache}")
        out, divided = cached.prefill(call, self.mesh, capacity, cache)
        return self._as_given(call, out), divided

    def extend(
        self,
        cache: DividedCache,
        *arrays: Array,
        backend: BackendNames = None,
        donate: bool = False,
        **named: Array,
    ) -> tuple[Tensor, DividedCache]:
        """The output of new tokens after those in the cache, and the cache with them.

        Parameters
        ----------
        cache : DividedCache
            A cache from `prefill` or an earlier `extend`. It is not modified unless donated.
        *arrays, **named
            The new tokens, the same on every process, as tensors or as DTensors with the
            placement `Replicate`; and their `lengths` or `key_mask`. Processes compare the
            shapes, but not the entries.
        donate : bool
            Write into the cache's own buffers. The old cache must not be used again; using it
            raises an error.

        Returns
        -------
        tuple
            The output, the same on every process, and the cache. Each new token is stored by the
            process that has the fewest tokens of its sequence.

        Raises
        ------
        TypeError, ValueError
            on all processes: for invalid input, for a cache of another mechanism, mesh or layout,
            if the capacity is exceeded, and if a gradient would be needed.
        """
        layout, on = str(self.order or HEADS), "" if backend is None else f" on {backend!r}"

        def bound() -> NewTokens:
            if not isinstance(donate, bool):
                raise TypeError(f"donate must be true or false; found {donate!r}")
            return bind_new(self.mechanism, self.mesh, layout, cache, arrays, named, backend)

        new, _ = self.processes.agree_on(bound, lambda new: f"{new} after {cache}{on}")
        with torch.no_grad():
            out, after = cached.extend(new, self.processes, cache, donate=donate)
        if new.is_distributed:
            out = DTensor.from_local(out, self.mesh, [Replicate()], run_check=False)
        return out, after

    def _as_given(self, call: DividedCall, part: Tensor) -> Tensor:
        """The output, as a DTensor if the inputs were DTensors."""
        if not call.bound.is_distributed:
            return part
        pattern = self.mechanism.program.output
        whole = pattern.shape(call.sizes)
        time = HeadAxes.of_pattern(pattern, whole).time
        assert time is not None  # Every output has tokens.
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, [Shard(time)], run_check=False, shape=whole, stride=stride
        )

    def refusal(self, *arrays: Array, **named: Array) -> str | None:
        """The reason why the layout can not divide a call with these arguments; None if it can.

        All processes must call this together.
        """
        return self._way_of(self._bound(arrays, named, None))[1]

    def _bound(
        self,
        arrays: tuple[Array, ...],
        named: Mapping[str, Array],
        backend: BackendNames,
        start: CacheStart | None = None,
    ) -> DividedCall:
        """The call, after all processes have checked their arguments."""

        def checked() -> Bound:
            bound = bind(self.mechanism, self.mesh, arrays, named)
            if start is not None:
                start.check(self.order, bound)
            return bound

        def said(bound: Bound) -> str:
            on = "" if backend is None else f" on {backend!r}"
            text = f"{self.mechanism} in layout {self.layout!r}{on}: {bound}"
            return text if start is None else f"{text}; {start}"

        bound, everyone = self.processes.agree_on(checked, said, lambda bound: bound.tokens)
        by_letter = {letter: tuple(n[i] for n in everyone) for i, letter in enumerate("ts")}
        if min(map(min, by_letter.values())) < 1:
            raise ValueError(
                f"{self.owner}: every process must have a token; found numbers of queries "
                f"{by_letter['t']} and of keys {by_letter['s']}"
            )
        shapes = {name: bound.whole_shape(name, by_letter) for name in bound.inputs}
        sizes = self.mechanism.inputs.sizes(self.owner, shapes)
        return DividedCall(
            self.mechanism, self.processes, bound, by_letter, sizes, backend, self.order
        )
