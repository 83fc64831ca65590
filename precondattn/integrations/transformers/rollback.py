"""Undoing the changes of objects if a function fails, also by Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from precondattn.given import Given

Change = TypeVar("Change", bound=Callable[..., nn.Module])


@contextmanager
def undone_if_failed(*objects: Given) -> Iterator[None]:
    """A block after whose failure the objects have their classes and attributes as before.

    Dicts and lists stay the same objects, because handles of hooks refer to them. A compiled call
    changes nothing if it fails.
    """
    before: list[Given] = []
    if not torch.compiler.is_compiling():
        for each in objects:
            lists = [x for x in vars(each).values() if isinstance(x, list | dict)]
            before += [(each, type(each), dict(vars(each)), [(x, copy(x)) for x in lists])]
    try:
        yield
    except BaseException:
        for each, cls, attributes, lists in before:
            each.__class__ = cls
            for changed, entries in [(vars(each), attributes), *lists]:
                changed.clear()
                add = changed.update if isinstance(changed, dict) else changed.extend
                add(entries)
        raise


def whole_or_not(change: Change) -> Change:
    """A function that changes a model; if it fails, the model is as before."""

    @wraps(change)
    def changed(model: nn.Module, *args: Given, **kwargs: Given) -> nn.Module:
        parts = [*model.modules()] if isinstance(model, PreTrainedModel) else []
        configs = [part.config for part in parts if isinstance(part, PreTrainedModel)]
        with undone_if_failed(*parts, *configs):
            return change(model, *args, **kwargs)

    return changed  # type: ignore[return-value]
