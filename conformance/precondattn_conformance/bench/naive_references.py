"""flash-linear-attention's naive references, plain PyTorch in float32, as peers on any device.

They are loaded by their files: the package around them imports Triton. Chunked ones are taken where
there are any, others loop over the tokens. Gradients of a loop would keep every state, so that only
forward passes are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from math import gcd
from types import ModuleType
from typing import NamedTuple

import precondattn as pa
from precondattn.arrays import Array, Arrays
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import Computation, entry_for

DISTRIBUTION = "fla-core"
NAME = "naive_fla"


class NaiveReference(NamedTuple):
    """A function of flash-linear-attention, and how it is called."""

    operation: str
    function: str
    arguments: Callable[[Arrays], Arrays] = dict
    """Its arguments, from our inputs."""
    computes: str | None = None
    """The expression that it computes, if another."""


def _steps_in_a_row(x: Arrays) -> Arrays:
    """Several steps of a token (b, s, n, …) as (b, s n, …)."""
    rows = {name: x[name].flatten(1, 2) for name in ("k", "v", "beta")}
    scale, steps = x["q"].shape[-1] ** -0.5, x["k"].shape[2]
    return {**x, **rows, "scale": scale, "num_householder": steps}


def _of_mesa(x: Arrays) -> Arrays:
    beta = x["g"].new_ones(x["g"].shape)
    rows = {name: x[name] for name in "qkvg"}
    return {**rows, "beta": beta, "lamb": x["lam_mesa"]}


def _of_ssd(x: Arrays) -> Arrays:
    """Queries and keys of one group, repeated for each value head."""
    heads = x["v"].shape[2]
    repeated = {name: x[name].repeat_interleave(heads // x[name].shape[2], 2) for name in "qk"}
    return {**x, **repeated, "scale": 1.0}


def _of_kda(x: Arrays) -> Arrays:
    """It takes whole chunks only; they have 64 tokens where these divide all."""
    return {**x, "chunk_size": gcd(x["q"].shape[1], 64)}


REFERENCES = {
    "ssd": NaiveReference("simple_gla", "naive_chunk_simple_gla", _of_ssd),
    "kda": NaiveReference("kda", "naive_chunk_kda", _of_kda),
    "gdn2": NaiveReference("gdn2", "naive_chunk_gdn2"),
    "comba": NaiveReference("comba", "naive_chunk_comba"),
    "delta_product": NaiveReference(
        "gated_delta_product", "naive_recurrent_gated_delta_product", _steps_in_a_row
    ),
    "atk": NaiveReference(
        "precond_gated_delta_rule",
        "naive_recurrent_precond_gated_delta_rule",
        computes="qk_norm[norm=l2](atk)",
    ),
    "atk(kda)": NaiveReference("precond_kda", "naive_recurrent_precond_kda"),
    "mesa": NaiveReference("mesa_net", "naive_mesa_net_exact", _of_mesa),
    "deltaformer": NaiveReference("deltaformer", "naive_deltaformer_attn"),
}
"""By the mechanism's expression in its shortest form."""


def is_installed() -> bool:
    try:
        distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return False
    return True


@cache
def module_of(operation: str, file: str = "naive") -> ModuleType:
    """The file of an operation that has its references."""
    source = distribution(DISTRIBUTION).locate_file(f"fla/ops/{operation}/{file}.py")
    spec = spec_from_file_location(f"fla_{operation}_{file}", str(source))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lack(case: BenchCase) -> str:
    """Why the reference of a case is not measured; empty if it is."""
    if not is_installed():
        return f"{DISTRIBUTION} is not installed"
    return "" if case.work == "forward" else "is measured in forward passes"


def naive_reference(mechanism: pa.Mechanism) -> Computation:
    """What the reference of a mechanism computes."""
    reference = entry_for(REFERENCES, mechanism)
    assert reference is not None  # The peer is one of those that have it.

    def forward(**x: Array) -> Array:
        function = getattr(module_of(reference.operation), reference.function)
        result = function(**reference.arguments(x))
        return result[0] if isinstance(result, tuple) else result

    computed = mechanism if reference.computes is None else pa.parse(reference.computes)
    return Computation(NAME, computed, forward)
