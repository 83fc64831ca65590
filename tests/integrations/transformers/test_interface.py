"""A version of Transformers that moves an interface gives one error, at import."""

import importlib
import sys
from abc import abstractmethod

import pytest

pytest.importorskip("transformers")

from precondattn.integrations.transformers import interface


def an_abstract_method():
    class CacheLayerMixin(interface.CacheLayerMixin):
        @abstractmethod
        def get_max_cache_shape(self):
            pass

    return CacheLayerMixin


def of_5_0(cache_position):
    return None


MOVED = {
    "6.0.0 has no transformers.masking_utils.and_masks": ("masking_utils.and_masks", None),
    "no parameter q_length of sdpa_mask": ("masking_utils.sdpa_mask", of_5_0),
    "without the abstract method get_max_cache_shape": (
        "cache_utils.CacheLayerMixin",
        an_abstract_method(),
    ),
}


@pytest.mark.parametrize("message", MOVED)
def test_what_has_moved_is_named_with_the_versions(message, monkeypatch):
    where, other = MOVED[message]
    module, name = where.split(".")
    module = importlib.import_module(f"transformers.{module}")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.0")
    if other is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, other)
    with pytest.raises(ImportError, match=message) as raised:
        interface._load()
    assert interface.TRIED[0] in str(raised.value)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"precondattn\[transformers\]"):
        interface._load()
