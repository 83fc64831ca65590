"""Export to PyTorch's own operators: the full call and one step of decoding."""

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.frameworks.torch.solve import BLOCK, cholesky, solve_triangular
from precondattn.spec.positive_definite import solve_positive
from tests.core.exported import (
    CLOSE,
    EMPTY,
    SIZES_OF_MASKS,
    any_size,
    exported_call,
    exported_step,
    extension_of,
    first_of,
    masks_of,
    operators,
    own_operators,
    prefilled,
    tensors_of,
)

NO_TOKENS = [
    *(("softmax", ["lengths"]), ("gated_delta", [])),
    *((text, []) for text in ("gsa", "mlstm", "path", "nystrom")),
    *(("softmax[forget=unscaled]", []), ("lucid", ["segment_ids"]), ("laser", ["attn_mask"])),
    ("bidirectional(gated_delta)", ["lengths"]),
]


def thorough(row):
    return pytest.param(*row, marks=pytest.mark.thorough)


def test_a_program_of_ordinary_operators_serves_any_batch_and_length():
    m = pa.parse("laser")
    program = exported_call(m)
    assert not own_operators(program)
    for b, t in [(1, 1), (3, 40)]:
        x = tensors_of(m, b, t, seed=1)
        torch.testing.assert_close(program.module()(x, {}), m(**x), **CLOSE)


@pytest.mark.parametrize(("expression", "masks"), [*NO_TOKENS[:2], *map(thorough, NO_TOKENS[2:])])
def test_a_program_serves_no_sequences_and_no_tokens(expression, masks):
    m = pa.parse(expression)
    program = exported_call(m, *masks).module()
    for b, t in EMPTY:
        x = first_of(tensors_of(m, 2, 6), any_size(m), b, t)
        some = first_of(masks_of(masks, 2, 6), SIZES_OF_MASKS, b, t)
        some |= {"lengths": 0 * some["lengths"]} if "lengths" in masks else {}
        torch.testing.assert_close(program(x, some), m(**x, **some))
    if "lengths" in masks:
        x, none = tensors_of(m, 2, 6), torch.zeros(2, dtype=torch.int32)
        assert not program(x, {"lengths": none}).any()


def test_a_backend_by_name_can_not_be_exported_to_ordinary_operators():
    with pytest.raises(pa.UnsupportedError, match="no other backend can be named; found torch"):
        exported_call(pa.parse("softmax"), backend="torch")
    m, x = pa.parse("lucid"), tensors_of(pa.parse("lucid"), 2, 6)
    with pa.ordinary_operators():  # A call that is not exported is computed as elsewhere.
        found = m(**x, backend="torch")
    assert torch.equal(found, m(**x, backend="torch"))


def test_a_recurrence_is_not_exported_with_its_gradient():
    """Its scan could not be translated to ONNX. Attention without a scan can."""
    from tests.layers.torch_layers import hidden, made

    x = hidden(2, 6)
    with pa.ordinary_operators():
        torch.export.export(made("laser"), (x,))
        with pytest.raises(pa.UnsupportedError, match=r"gated_delta: .*requires_grad_\(False\)"):
            torch.export.export(made("gated_delta"), (x,))
        program = torch.export.export(made("gated_delta").requires_grad_(False), (x,))
    assert not own_operators(program)


def test_packed_segments_are_exported_for_any_number_of_tokens():
    """One token is possible too, and the check of segments does not sort, as ONNX can not."""
    m = pa.parse("softmax")
    program = exported_call(m, "segment_ids", "prefix")
    assert "aten.sort.default" not in operators(program)
    for t in (1, 9):
        x, masks = tensors_of(m, 2, t, seed=1), masks_of(["segment_ids", "prefix"], 2, t)
        torch.testing.assert_close(program.module()(x, masks), m(**x, **masks), **CLOSE)
    masks["segment_ids"] = masks["segment_ids"] % 2
    assert program.module()(x, masks).isnan().all()


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 1])
def test_the_solve_by_blocks_is_exact_for_equal_keys(size, lower):
    """The strict part is full of ones: its powers grow beyond float32's precision."""
    matrix = torch.ones(2, 1, size, size).tril()
    matrix = matrix if lower else matrix.mT
    right = torch.randn(2, 1, size, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.solve_triangular(matrix.double(), right.double(), upper=not lower)
    solved = solve_triangular(matrix, right, lower=lower)
    torch.testing.assert_close(solved.double(), expected, rtol=1e-5, atol=1e-5)
    matrix = (matrix + size * torch.eye(size)).double()
    positive = matrix @ matrix.mT
    torch.testing.assert_close(cholesky(positive), torch.linalg.cholesky(positive))


def test_the_exported_solution_of_a_matrix_that_is_not_positive_definite_is_nan():
    class Solve(torch.nn.Module):
        def forward(self, matrix, right):
            return solve_positive(matrix, right)

    matrix, right = torch.eye(4), torch.ones(4, 1)
    with pa.ordinary_operators():
        program = torch.export.export(Solve(), (matrix, right))
    matrix[2, 2] = -1.0
    assert program.module()(matrix, right).isnan().any()


def test_a_step_of_decoding_is_exported_with_its_cache():
    m = pa.parse("softmax")
    program = exported_step(m, prefilled(m), extension_of(m, 2))
    assert not own_operators(program)
    cache, x = prefilled(m, 3), extension_of(m, 3, seed=1)
    out, length, store = program.module()(cache.length, cache.store, x)
    expected, extended = m.extend(cache, **x)
    torch.testing.assert_close(out, expected)
    assert torch.equal(length, extended.length)
    torch.testing.assert_close(store, extended.store)
