"""Without Transformers, or with one that has moved a name, the import says what is missing."""

import importlib
import sys

import pytest

pytest.importorskip("transformers")

NAME = "precondattn.integrations.transformers"


def import_again(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module(NAME)


def test_a_name_that_has_moved_is_named(monkeypatch):
    masks = importlib.import_module("transformers.masking_utils")
    monkeypatch.delattr(masks, "and_masks")
    with pytest.raises(ImportError, match="and_masks"):
        import_again(monkeypatch)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"precondattn\[transformers\]"):
        import_again(monkeypatch)
