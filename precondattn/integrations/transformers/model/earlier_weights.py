"""Reading folders of `save_pretrained` from before linear maps were separate modules.

`from_pretrained` converts weights as it reads them, by rules for parts of their names. Ours are
those of the model's layers: `attention.inputs.q.weight` is `attention.q_proj.weight` now, with
another shape.
"""

from __future__ import annotations

from torch import nn

from precondattn.given import Given
from precondattn.integrations.transformers.interface import ConversionOps, WeightConverter
from precondattn.layers.torch.module import Declared


class Converted(ConversionOps):
    """The conversion of one earlier weight to the present storage of its layer."""

    def convert(
        self, input_dict: Given, source_patterns: Given, target_patterns: Given, **given: Given
    ) -> Given:
        """The converted weight by its new name."""
        (tensors,) = input_dict.values()
        name = given["full_layer_name"]
        for path, module in given["model"].named_modules():
            if isinstance(module, Declared) and name.startswith(f"{path}."):
                for after in module.earlier.values():
                    if name == f"{path}.{after.name}":
                        return {target_patterns[0]: after.converted(tensors[0])}
        raise ValueError(f"no layer of the model has {name}")

    @property
    def reverse_op(self) -> ConversionOps:
        """No reverse operation: a model is saved with its present names."""
        raise NotImplementedError("weights are not saved by their earlier names")


def converters(model: nn.Module) -> list[Given]:
    """The rules, one for each changed part of a name, which all layers share."""
    changed: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, Declared):
            _, _, last = path.rpartition(".")
            for before, after in module.earlier.items():
                changed[f"{last}.{before}"] = f"{last}.{after.name}"
    return [WeightConverter(before, after, [Converted()]) for before, after in changed.items()]
