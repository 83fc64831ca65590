"""Mamba-2's state space model: the references of Mamba's kernels, and mamba2-minimal."""

from __future__ import annotations

from functools import cache, partial

from precondattn.arrays import Array, upcast
from precondattn_conformance.peers import given
from precondattn_conformance.peers.arrays import HALF32, Foreign, in_one_dtype
from precondattn_conformance.peers.project import Project, on_github

MAMBA = on_github(
    "state-spaces/mamba@e9594ce1c732d97440f0332fdc43170a2294dbfa", "2026-07-23", "Mamba"
)
MINIMAL = on_github(
    "tommyip/mamba2-minimal@4f4413731f24303b4e046962bce6ca5b6a3b13d6",
    "2024-06-17",
    "mamba2-minimal",
)
ALL = (MAMBA, MINIMAL)

CHUNK = 64


@cache
def _names() -> dict[str, object]:
    return given.of_pytorch() | given.of_einops()


@cache
def _reference(kernel: str) -> Foreign:
    path = f"mamba_ssm/ops/triton/ssd_{kernel}.py"
    return getattr(MAMBA.excerpt(path, f"{kernel}_ref", imported=_names()), f"{kernel}_ref")


@cache
def _minimal(project: Project, path: str, name: str) -> Foreign:
    return getattr(project.excerpt(path, "segsum", name, imported=_names()), name)


def _ssd(
    where: tuple[Project, str, str],
    *arrays: Array,
    initial_state: Array | None = None,
    output_final_state: bool = False,
) -> tuple[Array, Array]:
    q, k, v, g = arrays
    before = None if initial_state is None else initial_state.mT[:, None]
    x, g, k, q = in_one_dtype(v, g, k, q)
    out, after = _minimal(*where)(x, g, k, q, CHUNK, before)
    return out.to(v.dtype), after.mT


for _project, _path, _name in (
    (MAMBA, "mamba_ssm/modules/ssd_minimal.py", "ssd_minimal_discrete"),
    (MINIMAL, "mamba2.py", "ssd"),
):
    _load: Foreign = partial(partial, _ssd, (_project, _path, _name))
    _takes = "q k v g initial_state=? output_final_state=?"
    _arrangement: Foreign = {"library": "torch", "heads": "equal", "multiple": CHUNK}
    _project.direct(_name, "ssd", _load, _takes, **_arrangement)


@MAMBA.peer("ssd", library="torch", multiple=CHUNK)
def ssd_chunk_refs(q: Array, k: Array, v: Array, g: Array) -> Array:
    """The references of Mamba's kernels, called as `ssd_chunk_scan_combined_ref` calls them.

    That function has one A for each head, g = dt A, and multiplies values by dt; here dt is 1.
    """
    import torch

    sums = upcast(g).unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2).cumsum(-1)
    one = torch.ones_like(sums)
    states = _reference("chunk_state")(k, v, one, sums)
    before = _reference("state_passing")(states.flatten(-2), sums[..., -1])[0]
    before = before.unflatten(-1, states.shape[-2:])
    return _reference("chunk_scan")(k, q, v, one, sums, before)


def _of_steps(v: Array, g: Array) -> tuple[Array, Array]:
    """x and dt with x dt = v and A dt = g for A = −1; for a decay of 1, dt is almost 0."""
    dt = (-g).clamp(min=1e-26)[..., None]
    return v / dt, dt.expand_as(v)


@MAMBA.peer("ssd", library="torch", dtypes=HALF32[:1], gradient=False)
def selective_scan_ref(q: Array, k: Array, v: Array, g: Array) -> Array:
    """Mamba-1's reference, with the same step and decay for all channels of a head."""
    import torch

    path = "mamba_ssm/ops/selective_scan_interface.py"
    scan = MAMBA.excerpt(path, "selective_scan_ref", imported=_names()).selective_scan_ref
    x, dt = (a.flatten(2).mT for a in _of_steps(v, g))
    decay = -torch.ones(x.shape[1], q.shape[-1])
    out = scan(x, dt, decay, k.permute(0, 2, 3, 1), q.permute(0, 2, 3, 1))
    return out.mT.unflatten(2, v.shape[2:])


@MAMBA.peer("ssd", library="torch", dtypes=HALF32[:1], gradient=False)
def selective_state_update_ref(
    q: Array, k: Array, v: Array, g: Array, initial_state: Array | None = None
) -> tuple[Array, Array]:
    """Computes one token after the other, changing the state in place."""
    import torch

    path = "mamba_ssm/ops/triton/selective_state_update.py"
    update = MAMBA.excerpt(path, "selective_state_update_ref", imported=_names())
    shape = (*v[:, 0].shape, q.shape[-1])
    state = torch.zeros(shape) if initial_state is None else initial_state.mT.clone()
    decay, (x, dt) = -torch.ones(shape[1:]), _of_steps(v, g)
    tokens = [
        update.selective_state_update_ref(state, x[:, t], dt[:, t], decay, k[:, t], q[:, t])
        for t in range(q.shape[1])
    ]
    return torch.stack(tokens, 1), state.mT
