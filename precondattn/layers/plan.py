"""The plan of a layer: the recipes that compute its inputs, their order, and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.mechanism import Mechanism, parse
from precondattn.algebra.text import not_a_mechanism
from precondattn.arrays import Shape
from precondattn.layers.maps import Map, Weight
from precondattn.layers.meaning import meanings, origin, output_call
from precondattn.layers.norm_order import norm_before_rotation
from precondattn.layers.parameters import Constant, FanIn, FirstValues, Parameter
from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes import Unchanged, recipes_for
from precondattn.layers.recipes.outputs import AFTER_PROJECTION
from precondattn.layers.sizes import WIDTH, LayerSizes, Sizes, sizes_of

OUT = "out"
PROJECTION = "projection"
"""The name of the output projection among the weights of `out`."""


class PlanEntry(NamedTuple):
    """One value of a layer, and its recipe."""

    name: str
    """The name of an input of the mechanism, of a helper that other recipes read, or `out`."""
    recipe: Recipe
    pattern: Pattern
    reads: tuple[tuple[str, str], ...]
    """(the recipe's name of a value, the layer's name of it)."""


@dataclass(frozen=True)
class LayerPlan:
    """The description of a layer without its weights, the same for both frameworks. Hashable."""

    mechanism: Mechanism
    width: int
    entries: tuple[PlanEntry, ...]
    """The values in the order in which they are computed; `out` is last."""
    weights: tuple[tuple[str, tuple[tuple[str, Weight], ...]], ...]
    """The parameters of each entry by name, as its recipe declares them."""
    maps: tuple[Map, ...]
    """The linear maps among the weights."""
    inputs: tuple[str, ...]
    """The names of the mechanism's inputs."""
    shapes: tuple[tuple[str, Shape], ...]
    """The shape of each entry, without batch and time."""
    histories: tuple[tuple[str, int, Shape], ...]
    """The entries that read rows before the new tokens: (name, number of rows, shape of a row)."""
    buffers: tuple[str, ...]
    """The names of the buffers of the mechanism's cache."""
    sizes: Sizes = field(compare=False, repr=False)
    """The sizes of all letters, from which the shapes follow."""

    def input_shapes(self, batch: int) -> dict[str, Shape]:
        """The shape of each input of the mechanism, for one token of `batch` sequences."""
        shapes, patterns = dict(self.shapes), self.mechanism.inputs
        return {
            name: (batch, 1, *shapes[name]) if "b" in patterns[name].letters else shapes[name]
            for name in patterns
        }

    def modules(
        self,
    ) -> Iterator[tuple[str, list[tuple[Map, dict[str, FirstValues]]], dict[str, Weight]]]:
        """Each entry, its linear maps with the initial values of "weight" and "bias", and its other
        weights by name."""
        for name, weights in self.weights:
            others, maps = dict(weights), []
            for of_map in self.maps:
                if of_map.entry == name:
                    both = {"weight": of_map.weight, "bias": of_map.bias}
                    starts = {key: others.pop(each).start for key, each in both.items() if each}
                    maps.append((of_map, starts))
            yield name, maps, others

    def table(self, title: str) -> str:
        """The plan as a text: each input, its shape, its number of parameters, and its recipe."""
        counts = {name: sum(prod(w.shape) for _, w in weights) for name, weights in self.weights}
        rows = [
            (e.name, str(e.pattern), f"{counts[e.name]:,}", e.recipe.printed) for e in self.entries
        ]
        rows.append(("", "", f"{sum(counts.values()):,}", "parameters in all"))
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = (f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}  {d}" for a, b, c, d in rows)
        return "\n".join([f"{title}({self.width}, mechanism='{self.mechanism}')", *lines])


def plan_for(
    mechanism: str | Mechanism, sizes: LayerSizes, recipes: Mapping[str, Recipe] | None
) -> LayerPlan:
    """The plan of a layer."""
    if isinstance(mechanism, str):
        mechanism = parse(mechanism)
    if not isinstance(mechanism, Mechanism):
        raise not_a_mechanism(mechanism)
    mechanism, recipes = norm_before_rotation(mechanism, recipes or {})
    all_sizes = sizes_of(mechanism, sizes)
    entries = _in_order(_entries(mechanism, recipes))
    return plan_of(mechanism, all_sizes.by_letter[WIDTH], entries, all_sizes)


def plan_of(
    mechanism: Mechanism, width: int, entries: tuple[PlanEntry, ...], sizes: Sizes
) -> LayerPlan:
    """The plan of a layer whose recipes and sizes are known."""
    shapes = {entry.name: _shape(mechanism, entry, sizes) for entry in entries}
    weights = tuple((entry.name, tuple(_weights(entry, sizes))) for entry in entries)
    return LayerPlan(
        mechanism,
        width,
        entries,
        weights,
        _maps(entries, {name: dict(of_entry) for name, of_entry in weights}),
        tuple(mechanism.inputs),
        tuple(shapes.items()),
        tuple(
            (entry.name, entry.recipe.history(), _history_shape(entry, sizes, shapes[entry.name]))
            for entry in entries
            if entry.recipe.history()
        ),
        tuple(mechanism.program.slots),
        sizes,
    )


def _shape(mechanism: Mechanism, entry: PlanEntry, sizes: Sizes) -> Shape:
    axes = [axis for axis in entry.pattern.axes if axis.letter not in "bts"]
    unknown = [axis.letter for axis in axes if axis.letter not in sizes.by_letter]
    if unknown:
        raise TypeError(
            f"mechanism: the input {entry.name} of {mechanism} has an axis {unknown[0]}, whose "
            f"size no argument of the layer gives"
        )
    return tuple(axis.size(sizes.by_letter) for axis in axes)


def _history_shape(entry: PlanEntry, sizes: Sizes, of_input: Shape) -> Shape:
    text = entry.recipe.history_shape()
    if text is None:
        return of_input
    axes = Parameter(text, Constant(0)).axes(entry.pattern, sizes.roles)
    return tuple(axis.size(sizes.by_letter) for axis in axes)


def _entries(mechanism: Mechanism, recipes: dict[str, Recipe]) -> list[PlanEntry]:
    program = mechanism.program
    entries: dict[str, PlanEntry] = {}
    made, chosen_helpers = meanings(program), {*recipes}
    missing: dict[str, Pattern] = {}
    for name, (call, formal) in made.items():
        table = recipes_for(call.leaf)
        names = {formal: origin(program, value) for formal, value in call.arguments}
        helpers = {key.partition("/")[0]: key.partition("/")[2] for key in table if "/" in key}
        for helper, like in helpers.items():
            if like == formal and helper not in entries:
                recipe = recipes.pop(helper, table[f"{helper}/{like}"])
                entries[helper] = _entry(helper, recipe, mechanism.inputs[name], names)
        chosen = recipes.pop(name) if name in recipes else table.get(formal)
        if chosen is None:
            missing[name] = mechanism.inputs[name]
            continue
        entries[name] = _entry(name, chosen, mechanism.inputs[name], names)
    if missing:
        which = ", ".join(f"{name} ({pattern.text})" for name, pattern in missing.items())
        raise TypeError(
            f"recipes: {mechanism} has none for {which}; pass recipes={{...}} with one for each, "
            f"of precondattn.layers.recipes (such as Projection()) or your own"
        )
    call = output_call(program, lambda call: OUT in recipes_for(call.leaf))
    names = {formal: origin(program, value) for formal, value in call.arguments}
    recipe = recipes.pop(OUT, recipes_for(call.leaf).get(OUT, Unchanged()))
    entries[OUT] = _entry(OUT, recipe, program.output, names)
    if "v" in mechanism.inputs and program.output.axes[-1] != mechanism.inputs["v"].axes[-1]:
        others = [name for name in recipe.reads if name != OUT]
        if others:
            raise ValueError(
                f"recipes: that of out adds what it makes of {', '.join(others)} to the output, "
                f"whose rows {mechanism} makes of another width; pass recipes={{'out': ...}}, such "
                f"as Norm()"
            )
    if recipes:
        raise ValueError(
            f"recipes: {mechanism} has no input {next(iter(recipes))!r}; it has "
            f"{', '.join(entries)}"
        )
    # A helper is omitted if the recipes that would read it are replaced.
    read_values = {value for entry in entries.values() for _, value in entry.reads}
    entries = {
        name: entry
        for name, entry in entries.items()
        if name in (*made, OUT) or name in read_values or name in chosen_helpers
    }
    available = {*entries}
    for entry in entries.values():
        unknown = [value for _, value in entry.reads if value not in available]
        if unknown:
            raise ValueError(
                f"recipes: that of {entry.name} reads {unknown[0]!r}, which {mechanism} has not"
            )
    return [*entries.values()]


def _entry(name: str, recipe: Recipe, pattern: Pattern, names: Mapping[str, str]) -> PlanEntry:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipes: that of {name} must be a Recipe; found {recipe!r}")
    reads = tuple((name, names.get(name, name)) for name in recipe.reads)
    return PlanEntry(name, recipe, pattern, reads)


def _in_order(entries: Iterable[PlanEntry]) -> tuple[PlanEntry, ...]:
    """The entries, each after those that it reads; `out` is last."""
    waiting = {entry.name: entry for entry in entries}
    out = waiting.pop(OUT)
    ordered: list[PlanEntry] = []
    while waiting:
        ready = [e for e in waiting.values() if not any(value in waiting for _, value in e.reads)]
        if not ready:
            raise ValueError(f"recipes: those of {', '.join(waiting)} read each other")
        for entry in ready:
            ordered.append(waiting.pop(entry.name))
    return (*ordered, out)


def _declared(entry: PlanEntry) -> dict[str, Parameter]:
    declared = dict(entry.recipe.parameters())
    if entry.name == OUT:
        bias = AFTER_PROJECTION if AFTER_PROJECTION in declared else ""
        declared[PROJECTION] = Parameter("… x", FanIn(2), 2, bias)
    return declared


def _weights(entry: PlanEntry, sizes: Sizes) -> Iterable[tuple[str, Weight]]:
    roles = sizes.roles
    if entry.name == OUT:  # The rows of `out` may be wider than values.
        roles = {**roles, "e": entry.pattern.axes[-1]}
    for name, parameter in _declared(entry).items():
        axes = parameter.axes(entry.pattern, roles)
        shape = tuple(axis.size(sizes.by_letter) for axis in axes)
        yield name, Weight(shape, parameter.start, tuple(sizes.names.get(a.letter) for a in axes))


def _maps(
    entries: tuple[PlanEntry, ...], weights: Mapping[str, Mapping[str, Weight]]
) -> tuple[Map, ...]:
    maps: dict[str, Map] = {}
    for entry in entries:
        for weight, parameter in _declared(entry).items():
            if not parameter.summed:
                continue
            name = _module_name(entry.name, weight)
            if name in maps:
                raise ValueError(
                    f"recipes: those of {maps[name].entry} and {entry.name} both have a linear map "
                    f"{name}"
                )
            of_entry = entry.name, weight, parameter.bias, parameter.summed
            maps[name] = Map.of_weight(name, *of_entry, weights[entry.name][weight])
    return tuple(maps.values())


def _module_name(entry: str, weight: str) -> str:
    """The name of a linear map's module, such as `q_proj`, `o_proj` or `g_down_proj`."""
    prefix = "o" if entry == OUT else entry
    return f"{prefix}_proj" if weight in ("weight", PROJECTION) else f"{prefix}_{weight}_proj"
