"""The arrays of `bad_input` in PyTorch."""

import pytest

pytest.importorskip("torch")

import torch

from tests.core.bad_input import K, Q, V

TQ, TK, TV = (torch.asarray(a.copy()) for a in (Q, K, V))
