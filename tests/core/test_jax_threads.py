"""JAX calls that solve several systems at once do not deadlock on a CPU with two cores."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

TWO_STACKS = """
from functools import partial
import jax, jax.numpy as jnp
from precondattn.frameworks.jax.solve import solve_triangular

matrices, right = jnp.eye(64) + jnp.zeros((8, 64, 64)), jnp.ones((8, 64, 4096))
solve = partial(solve_triangular, lower=True)
both = jax.jit({mapping}(lambda a, b: (solve(a, b), solve(2 * a, b))))
for _ in range(20):
    jax.block_until_ready(both(matrices, right))
"""
"""A program that deadlocks with JAX's own `solve` or `solve_triangular`."""


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can not be chosen here")
@pytest.mark.parametrize("mapping", ["", "jax.vmap"])
def test_solving_two_stacks_of_systems_at_once_does_not_deadlock(mapping):
    cores = sorted(os.sched_getaffinity(0))[:2]
    script = f"import os; os.sched_setaffinity(0, {cores})\n"
    script += TWO_STACKS.format(mapping=mapping)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
