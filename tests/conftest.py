"""Fixtures of all tests: an out-of-tree backend, and JAX in double precision.

Tests of a framework that is not installed are skipped.
"""

import functools
import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from precondattn.dispatch import discovery
from precondattn.plug_ins import PlugIns
from tests.tiers import sort_into_tiers

THIRD_PARTY = Path(__file__).parent / "third_party"
"""A folder as pip leaves one: a module, and the metadata with its entry points."""

collect_ignore = [
    "third_party",  # To import its module registers its mechanism for every test.
    "kernel_tools/cuda_examples",  # CUDA's headers and Triton may be missing.
    "kernel_tools/triton_examples",
]

if find_spec("jax"):
    import jax

    jax.config.update("jax_enable_x64", True)


def has_gpu():
    if find_spec("torch"):
        import torch

        return torch.cuda.is_available()
    return False


if not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton has to be imported after this.
    os.environ.setdefault("PRECONDATTN_CUPY_SIMULATE", "1")


@pytest.hookimpl(tryfirst=True)  # Before tests are chosen by their marks.
def pytest_collection_modifyitems(items):
    """Each test of this folder belongs to a tier."""
    here = Path(__file__).parent
    sort_into_tiers([item for item in items if item.path.is_relative_to(here)])


@pytest.fixture(autouse=True, scope="module")
def clear_jax_caches():
    """A process may map 65,530 memory regions; JAX's compiled functions would exceed that."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


OUR_BACKENDS = ("cupy", "jax", "pallas", "portable", "torch", "triton")


@pytest.fixture
def only_the_reference(monkeypatch):
    """The reference alone, as a new process without our backends finds it.

    What a test registers is forgotten, also by the plans that are kept for each number of changes.
    """
    discovery.changes += 1
    monkeypatch.setattr(discovery, "_registered", {})
    monkeypatch.setattr(discovery, "_plug_ins", PlugIns(discovery.GROUP))
    monkeypatch.setattr(discovery, "_discovered", None)

    installed = metadata.entry_points

    def of_others(**chosen):
        if chosen.get("group") != discovery.GROUP:
            return installed(**chosen)  # Triton looks for its own when it is imported.
        return [entry for entry in installed(**chosen) if entry.name not in OUR_BACKENDS]

    monkeypatch.setattr(metadata, "entry_points", of_others)
    yield
    discovery.changes += 1


@functools.cache
def compiled_for(*sizes):
    """JAX's compiled calls with these sizes of blocks, which are no arguments of the calls."""
    import jax

    from precondattn.frameworks.jax.sharding import on_shards

    return jax.jit(lambda *arguments: on_shards(*arguments), static_argnums=(0, 1))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few tokens: short sequences have several blocks, and a shorter last one."""
    pytest.importorskip("jax")
    from precondattn.frameworks.jax import sharding
    from precondattn_jax import chunkwise as jax_chunkwise
    from precondattn_jax import definition as jax_definition
    from precondattn_jax import layout as jax_layout
    from precondattn_jax import read_log_mean_exp as jax_read_log_mean_exp
    from precondattn_jax import triangular_inverse as jax_triangular_inverse
    from precondattn_portable import (
        extension,
        read_log_mean_exp,
        sizes,
        triangular_inverse,
    )

    rows = {"rows": 8, "fewest_rows": 4, "row_block_entries": 64, "lucid_entries": 64}
    small_sizes = {**rows, "reflections": 8, "chunk": 4, "chunk_entries": 64, "token_entries": 64}
    for module, names in (
        *((each, small_sizes) for each in (sizes.ON_CPU, sizes.ON_ACCELERATOR)),
        (extension, {"TOKENS": 3}),
        (read_log_mean_exp, {"BLOCK": 8, "ELEMENTS": 3}),
        (triangular_inverse, {"LEAF": 2}),
        (jax_layout, {"BLOCK": 8, "FEWEST": 4, "REFLECTIONS": 8}),
        (jax_chunkwise, {"CHUNK": 4, "GROUP": 64}),
        (jax_definition, {"TOKENS": 3}),
        (jax_read_log_mean_exp, {"ELEMENTS": 2}),
        (jax_triangular_inverse, {"LEAF": 2}),
    ):
        for name, size in names.items():
            monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(sharding, "compiled", compiled_for("small"))


@pytest.fixture
def third_party(only_the_reference, monkeypatch):
    """The out-of-tree backend's module, installed for one test."""
    monkeypatch.syspath_prepend(str(THIRD_PARTY))
    discovery.discover()
    module = sys.modules["third_party_backend"]
    module.calls.clear()
    return module
