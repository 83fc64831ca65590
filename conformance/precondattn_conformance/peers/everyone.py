"""All peers, and lookup by name. A project's module does not import the project itself."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from precondattn_conformance.peers.project import Peer

PROJECTS = (
    "equinox",
    "fla",
    "fla_kernels",
    "flash_attention",
    "flax",
    "gated_delta_in_jax",
    "gated_delta_nets",
    "haiku",
    "jax",
    "keras",
    "linear_attentions",
    "lucidrains",
    "mamba",
    "mlstm_kernels",
    "online_softmax",
    "onnx",
    "pytorch",
    "timm",
    "tokamax",
    "transformers",
    "vision",
    "x_transformers",
    "xformers",
    "xlstm",
)
"""The modules of this folder that define peers."""


@cache
def all_peers() -> dict[str, Peer]:
    """Every peer by its name, grouped by project."""
    peers: dict[str, Peer] = {}
    for name in PROJECTS:
        module = import_module(f"precondattn_conformance.peers.{name}")
        for project in module.ALL:
            peers |= project.peers
    return peers


def lines_to_check_out() -> str:
    """Shell lines that create every checkout in the folder named by `PRECONDATTN_CHECKOUTS`."""
    projects = {peer.project.name: peer.project for peer in all_peers().values()}
    checkouts = (project.checkout for project in projects.values())
    return "\n".join(checkout.lines for checkout in checkouts if checkout is not None)


def peer_named(name: str) -> Peer:
    """A peer by its name, such as `"fla/kda_chunk"`.

    Raises
    ------
    ValueError
        if there is no such peer; the message lists the project's peers.
    """
    peers = all_peers()
    if name not in peers:
        project = name.partition("/")[0]
        near = [each for each in peers if each.startswith(f"{project}/")]
        names = near or sorted({each.partition("/")[0] + "/..." for each in peers})
        raise ValueError(f"{name!r} is no peer; there are {', '.join(names)}")
    return peers[name]
