"""A version of Transformers that moves an interface gives one error, at import."""

import importlib
import inspect
import sys
from abc import abstractmethod

import pytest

pytest.importorskip("transformers")

from precondattn.integrations.transformers import interface


def test_a_name_that_has_moved_is_named_with_the_versions(monkeypatch):
    masks = importlib.import_module("transformers.masking_utils")
    monkeypatch.delattr(masks, "and_masks")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.0")
    with pytest.raises(ImportError) as raised:
        interface._load()
    message = str(raised.value)
    assert "6.0.0 has no transformers.masking_utils.and_masks" in message
    assert interface.TRIED[0] in message


def test_a_parameter_that_has_moved_is_named(monkeypatch):
    masks = importlib.import_module("transformers.masking_utils")
    of_5_0 = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("cache_position",)]
    )

    def sdpa_mask(**kwargs):
        return None

    sdpa_mask.__signature__ = of_5_0
    monkeypatch.setattr(masks, "sdpa_mask", sdpa_mask)
    with pytest.raises(ImportError, match="no parameter q_length of sdpa_mask"):
        interface._load()


def test_an_abstract_method_that_ours_lack_is_named(monkeypatch):
    class CacheLayerMixin(interface.CacheLayerMixin):
        @abstractmethod
        def get_max_cache_shape(self):
            pass

    caches = importlib.import_module("transformers.cache_utils")
    monkeypatch.setattr(caches, "CacheLayerMixin", CacheLayerMixin)
    with pytest.raises(ImportError, match="without the abstract method get_max_cache_shape"):
        interface._load()


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"precondattn\[transformers\]"):
        interface._load()
