"""Which part of a layer's weights each device has, where its heads are divided among devices.

With P devices, of which each has some heads, inner channels of the MLP and rows of the vocabulary:

    attention, MLP:  y = Σ_r W_r f_r(x)      f_r of the heads or channels of device r
    embedding:       E[tokens] = Σ_r E_r[tokens], 0 for rows of other devices

Key/value heads that are fewer than devices are whole on each, and each computes with its one.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.layers.maps import HEADS, Weight
from precondattn.layers.plan import LayerPlan, PlanEntry, plan_of
from precondattn.parallel.heads import refusal, share

EVEN = ("mlp", "vocab")
"""The usual names of axes that P must divide."""


class Share(NamedTuple):
    """Of one weight."""

    axis: int | None
    """The axis that is divided; None where every device has all of the weight."""
    own: slice
    """The indices along it that a device computes with."""
    is_sharded: bool
    """Whether each device stores these alone."""


ALL = Share(None, slice(None), False)


def share_of(name: str, weight: Weight, devices: int, device: int) -> Share:
    """The part of a weight that a device computes with.

    Raises
    ------
    ValueError
        for a size that the number of devices does not divide.
    """
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
    own = share(count, devices, device)
    return Share(axis, slice(own.start * grain, own.stop * grain), count % devices == 0)


def plan_of_device(plan: LayerPlan, devices: int) -> LayerPlan:
    """The plan of the layer that each device computes: that of its heads.

    Raises
    ------
    ValueError
        for heads that can not be divided like this, and recipes that compute several together.
    """
    sizes = plan.sizes
    refused = refusal(plan.mechanism, sizes.by_letter, devices)
    if devices > 1 and refused is not None:
        raise ValueError(f"{plan.mechanism} {refused}")
    few = {
        letter: max(1, count // devices) if sizes.names.get(letter) in HEADS else count
        for letter, count in sizes.by_letter.items()
    }
    for entry in plan.entries:
        _check_recipe(plan, entry, devices)
    return plan_of(plan.mechanism, plan.width, plan.entries, sizes._replace(by_letter=few))


def _check_recipe(plan: LayerPlan, entry: PlanEntry, devices: int) -> None:
    joins = entry.recipe.joins
    inputs = plan.mechanism.inputs
    of_keys = plan.sizes.by_letter[inputs["k" if "k" in inputs else "v"].axes[-2].letter]
    if devices > 1 and (joins == "all" or (joins == "keys" and of_keys % devices)):
        what = "all heads" if joins == "all" else "heads that share keys"
        raise ValueError(
            f"{plan.mechanism}: the recipe of {entry.name} computes {what} together, and each of "
            f"{devices} devices has some: {entry.recipe.equation}"
        )
