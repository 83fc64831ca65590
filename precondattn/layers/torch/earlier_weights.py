"""The conversion of weights and optimizer states saved before linear maps were modules.

The weight of a linear map was then a parameter `inputs.q.weight` with the axes (x, h, d). Now it is
the matrix `q_proj.weight` (h · d, x). `load_state_dict` of a layer reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from precondattn.layers.torch.module import Declared, Earlier


class Before(NamedTuple):
    """A parameter of a model as an earlier version saved it."""

    name: str
    now: str
    """The parameter's present name."""
    shape: tuple[int, ...]
    moved: Earlier | None
    """The change of its storage; None if nothing has changed."""


def from_earlier(
    state: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """A state saved by an earlier version, with the present names and shapes of a model.

    `load_state_dict` of a model reads an earlier `state_dict` by itself. This function is for
    states of optimizers, and for states saved by `torch.distributed.checkpoint`.

    Parameters
    ----------
    state : dict
        A `state_dict` of an optimizer, or any nested dict with names of parameters, such as those
        of `torch.distributed.checkpoint.state_dict`.
    model : nn.Module
        The model that the state belongs to, or one with the same structure.
    optimizer : torch.optim.Optimizer, optional
        The optimizer that the state is for, with the parameters of this model in the same groups as
        before. It is required for a `state_dict` of an optimizer, which has numbers in place of
        names.

    Raises
    ------
    TypeError
        for numbers in place of names if no optimizer is given.
    ValueError
        for other groups of parameters, and for an entry without the earlier shape of its parameter,
        such as one of a new state, or of an optimizer that stores sums over axes.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import Attention, from_earlier
    >>> before = {"model": {"inputs.q.weight": torch.zeros(8, 2, 4)}}
    >>> after = from_earlier(before, Attention(8, heads=2))
    >>> {name: tuple(weight.shape) for name, weight in after["model"].items()}
    {'q_proj.weight': (8, 8)}
    """
    found = [*_before(model, "")]
    groups = state.get("param_groups")
    if isinstance(groups, list) and any(type(i) is int for g in groups for i in g["params"]):
        if optimizer is None:
            raise TypeError(
                "optimizer: a state with numbers in place of names needs the optimizer that it is "
                "for; found None"
            )
        return _numbered(state, model, optimizer, found)
    named: dict[str, Tensor] = _named(state, {before.name: before for before in found})
    return named


def _before(module: nn.Module, prefix: str) -> Iterator[Before]:
    """The parameters of a model by their earlier names, in their earlier order."""
    if isinstance(module, Declared) and module.earlier:
        moved = {after.name: (name, after) for name, after in module.earlier.items()}
        for now, weight in module.declared.items():
            name, after = moved.get(now, (now, None))
            shape = weight.shape if after is None else after.shape
            yield Before(prefix + name, prefix + now, tuple(shape), after)
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Before(prefix + name, prefix + name, tuple(parameter.shape), None)
    for name, child in module._modules.items():
        if child is not None:
            yield from _before(child, f"{prefix}{name}.")


def _named(state: Tensor, found: Mapping[str, Before]) -> Tensor:
    if isinstance(state, list | tuple):
        return [_named(each, found) for each in state]
    if isinstance(state, str):
        return found[state].now if state in found else state
    if not isinstance(state, Mapping):
        return state
    return {
        found[key].now if key in found else key: (
            _converted(entry, found[key]) if key in found else _named(entry, found)
        )
        for key, entry in state.items()
    }


def _converted(entry: Tensor, before: Before) -> Tensor:
    """The converted tensor of a parameter, or dict of such tensors and numbers."""
    if isinstance(entry, Mapping):
        return {key: _converted(value, before) for key, value in entry.items()}
    if before.moved is None or not isinstance(entry, Tensor) or entry.ndim == 0:
        return entry
    if tuple(entry.shape) != before.shape:
        raise ValueError(
            f"state: an entry of {before.name} must have the shape {before.shape}, which the "
            f"parameter had before; found {tuple(entry.shape)}"
        )
    return before.moved.converted(entry)


def _numbered(
    state: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: list[Before],
) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    order = {id(parameters[b.now]): (i, b) for i, b in reversed([*enumerate(found)])}
    saved, groups, entries, number = state["param_groups"], [], {}, 0
    counts = [[len(group["params"]) for group in gs] for gs in (saved, optimizer.param_groups)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"state: the groups must have {counts[1]} parameters, as the optimizer's; found "
            f"{counts[0]}"
        )
    for before, group in zip(saved, optimizer.param_groups, strict=True):
        if not all(id(parameter) in order for parameter in group["params"]):
            raise ValueError("optimizer: it has parameters that are not of the model")
        own = [order[id(parameter)] for parameter in group["params"]]
        number_of = dict(zip(sorted(i for i, _ in own), before["params"], strict=True))
        for position, (i, parameter) in enumerate(own):
            if number_of[i] in state["state"]:
                entries[number + position] = _converted(state["state"][number_of[i]], parameter)
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        numbers = [*range(number, number + len(own))]
        groups.append({**before, "params": numbers, **names})
        number += len(own)
    return {**state, "state": entries, "param_groups": groups}
