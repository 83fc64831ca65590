"""The names that public files import, for excerpts of them (`excerpt_of`)."""

from __future__ import annotations

import functools
import math

from precondattn_conformance.peers.files import MissingError


def of_pytorch() -> dict[str, object]:
    """The names of PyTorch: torch, nn, F, …"""
    import torch

    return {
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "Tensor": torch.Tensor,
        "einsum": torch.einsum,
        "math": math,
    }


def of_jax() -> dict[str, object]:
    """The names of JAX: jax, jnp, lax, …"""
    import jax

    return {
        "jax": jax,
        "jnp": jax.numpy,
        "lax": jax.lax,
        "einsum": jax.numpy.einsum,
        "partial": functools.partial,
        "math": math,
    }


def of_einops() -> dict[str, object]:
    """The names of einops: rearrange, repeat and reduce.

    Raises
    ------
    MissingError
        if einops is not installed.
    """
    try:
        from einops import rearrange, reduce, repeat
    except ImportError:
        raise MissingError("einops is not installed") from None
    return {"rearrange": rearrange, "repeat": repeat, "reduce": reduce}
