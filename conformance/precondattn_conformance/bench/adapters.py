"""Functions of other projects as peers: adapters of `precondattn_conformance.peers`, by mechanism.

What an adapter does to the inputs, such as to repeat shared heads, is in the time.
"""

from __future__ import annotations

from typing import NamedTuple

import precondattn as pa
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import Computation, entry_for
from precondattn_conformance.peers.everyone import peer_named
from precondattn_conformance.peers.files import MissingError
from precondattn_conformance.peers.peer import Peer


class Adapted(NamedTuple):
    """A peer of the benchmarks that is another project's."""

    name: str
    adapters: dict[str, str]
    """The adapters by the mechanism's expression in its shortest form."""
    works: tuple[str, ...] = ("forward", "forward_backward")

    def fits(self, mechanism: pa.Mechanism) -> bool:
        return entry_for(self.adapters, mechanism) is not None

    def adapter(self, mechanism: pa.Mechanism) -> Peer:
        name = entry_for(self.adapters, mechanism)
        assert name is not None  # The peer is one of those that fit.
        return peer_named(name)

    def lack(self, case: BenchCase, device: str) -> str:
        """Why it is not measured on this device; empty if it is."""
        adapter = self.adapter(pa.parse(case.mechanism))
        try:
            adapter.project.version  # noqa: B018 - It raises the error.
        except MissingError as error:
            return str(error)
        if reason := adapter.lacks_device(device):
            return reason
        if case.work not in self.works:
            return f"is measured in {' and '.join(self.works)}, and not in {case.work}"
        if adapter.dtypes is not None and case.dtype not in adapter.dtypes:
            return f"{adapter.name} does not support {case.dtype}"
        return ""

    def computation(self, mechanism: pa.Mechanism, backend: str | None = None) -> Computation:
        """What the adapter of a mechanism computes, which may be a composition with it."""
        adapter = self.adapter(mechanism)
        computed = pa.parse(adapter.mechanism)
        return Computation(self.name, computed, adapter.function_of(computed))


# References of flash-linear-attention, chunked ones where there are any. Others loop over the
# tokens: the gradient of a loop would keep every state, so only forward passes are measured.
NAIVE = Adapted(
    "naive_fla",
    {
        "ssd": "fla/simple_gla_chunk",
        "kda": "fla/kda_chunk",
        "gdn2": "fla/gdn2_chunk",
        "comba": "fla/comba_chunk",
        "delta_product": "fla/delta_product_recurrent",
        "atk": "fla/atk_recurrent",
        "atk(kda)": "fla/atk_kda_recurrent",
        "mesa": "fla/mesa_exact",
        "deltaformer": "fla/deltaformer",
    },
    works=("forward",),
)
FLA = ("linear", "retention", "gla", "gsa", "delta", "gated_delta", "kda", "path")
"""Mechanisms that have a kernel there, in Triton on a GPU."""
KERNELS = Adapted("fla", {name: f"fla/kernel_{name}" for name in FLA})
OF_TRANSFORMERS = Adapted(
    "transformers",
    {"gated_delta": "transformers/gated_delta_chunk", "nystrom": "transformers/nystromformer"},
)
