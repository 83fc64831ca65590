"""The parts of a layer's weights on each device in tensor parallelism.

Each of P devices has some of the heads, the inner channels of the MLP and the vocabulary's rows:

    attention, MLP:  y = Σ_r W_r f_r(x)      f_r: the heads or channels of device r
    embedding:       E[tokens] = Σ_r E_r[tokens], with 0 for rows of other devices

If there are fewer key/value heads than devices, each device stores all and computes with one.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.layers.maps import HEADS, Weight
from precondattn.layers.plan import LayerPlan, plan_of
from precondattn.parallel.heads import refusal, share

EVEN = ("mlp", "vocab")
"""The usual names of axes whose size P must divide."""


class Share(NamedTuple):
    """One device's part of a weight."""

    axis: int | None
    """The divided axis; None if every device has the whole weight."""
    indices: slice
    """The indices along the axis that the device computes with."""
    is_sharded: bool
    """Whether a device stores only these indices."""


ALL = Share(None, slice(None), False)


def share_of(name: str, weight: Weight, devices: int, device: int) -> Share:
    """The part of a weight that a device computes with."""
    axes = [i for i, usual in enumerate(weight.names) if usual in (*HEADS, *EVEN)]
    if not axes:
        return ALL
    if len(axes) > 1:
        names = " and ".join(str(weight.names[i]) for i in axes)
        raise ValueError(f"{name} has the axes {names}; one of them can be divided")
    axis = axes[0]
    grain = weight.grain[axis] if weight.grain else 1
    count, usual = weight.shape[axis] // grain, weight.names[axis]
    if usual in EVEN and count % devices:
        argument = {"mlp": "hidden", "vocab": "vocabulary"}[str(usual)]
        raise ValueError(
            f"{argument} must be a multiple of {devices} devices; found {argument}={count}"
        )
    of_device = share(count, devices, device)
    return Share(axis, slice(of_device.start * grain, of_device.stop * grain), count % devices == 0)


def plan_of_device(plan: LayerPlan, devices: int) -> LayerPlan:
    """The plan of the layer with one device's heads."""
    sizes = plan.sizes
    refused = refusal(plan.mechanism, sizes.by_letter, devices)
    if devices > 1 and refused is not None:
        raise ValueError(f"{plan.mechanism} {refused}")
    few = {
        letter: max(1, count // devices) if sizes.names.get(letter) in HEADS else count
        for letter, count in sizes.by_letter.items()
    }
    inputs = plan.mechanism.inputs
    of_keys = sizes.by_letter[inputs["k" if "k" in inputs else "v"].axes[-2].letter]
    for entry in plan.entries:
        joins = entry.recipe.joins
        if devices > 1 and (joins == "all" or (joins == "keys" and of_keys % devices)):
            what = "all heads" if joins == "all" else "heads that share keys"
            raise ValueError(
                f"{plan.mechanism}: the recipe of {entry.name} computes {what} together, and each "
                f"of {devices} devices has some: {entry.recipe.printed}"
            )
    return plan_of(plan.mechanism, plan.width, plan.entries, sizes._replace(by_letter=few))
