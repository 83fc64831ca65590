"""A repeated call computes what the first one did, from a workspace that held something else."""

from contextlib import contextmanager

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_triton.backend import Triton, _interpreted
from precondattn_triton.configurations import forced
from precondattn_triton.launching import launch
from precondattn_triton.replay import method as replay_method
from precondattn_triton.replay.method import ReplayedMethod
from precondattn_triton.replay.program import LaunchProgram
from precondattn_triton.replay.signature import signature_of
from precondattn_triton.replay.workspace import ALIGNMENT, Lifetime, offsets_of
from tests.backends.triton import pieces
from tests.backends.triton.test_recurrences import problem
from tests.backends.triton.tiles import SMALL

LEAVES = {
    "lucid_solve": pa.LucidSolve(),
    "laser": pa.parse("laser").program.leaves[0],
    "path": pa.Path(),
    "gated_delta": pa.GatedDelta(),
    "gla": pa.parse("gla"),
    "gsa": pa.parse("gsa"),
    "conditioned_query": pa.ConditionedQuery(),
    "windowed": pa.Windowed(),
    "softmax": pa.Softmax(window=9),
    "differential": pa.parse("differential"),
}
FAST = ("lucid_solve", "gated_delta")
T = 18


class Replaying(Triton):
    """The backend, which repeats calls also where Triton interprets its kernels."""

    def launched(self, method, at):
        return ReplayedMethod(method, lambda arrays: _interpreted())


@pytest.fixture
def runs(monkeypatch):
    """The programs that are run, in order."""
    found, run = [], LaunchProgram.run

    def counted(self, inputs):
        found.append(self)
        return run(self, inputs)

    monkeypatch.setattr(LaunchProgram, "run", counted)
    return found


@contextmanager
def small_and_poisoned():
    """Tiles of 16 tokens; new memory is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        with forced(**SMALL):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def inputs_of(leaf, seed, dtype=torch.float32):
    x = problem(leaf, T + seed, heads=(2, 2) if leaf.name == "differential" else (1, 2))
    return {
        n: a[:, :T].to(dtype).clone(memory_format=torch.contiguous_format)
        if a.ndim > 2
        else a.to(dtype)
        for n, a in x.items()
    }


@pytest.mark.parametrize(
    ("name", "is_ragged"),
    [
        *(pytest.param(n, False, marks=[] if n in FAST else pytest.mark.slow) for n in LEAVES),
        *((name, True) for name in FAST),
    ],
)
def test_a_repeated_call_has_the_results_of_the_first(name, is_ragged, runs):
    leaf, results = LEAVES[name], []
    runner = Replaying().runner(leaf, "torch")
    given_lengths = torch.tensor([9]) if is_ragged else None
    for seed in (0, 1, 0):
        x = inputs_of(leaf, seed)
        like = next(iter(x.values()))
        frame = full_frame(T, T, like, lengths=given_lengths)
        with small_and_poisoned():
            out, residuals = runner.forward_with_residuals(x, frame)
            gradients = runner.backward(x, frame, out, residuals, torch.ones_like(out))
        results.append((out, residuals, gradients))
    assert len(runs) == 2
    assert equal(results[0], results[2])
    assert not equal(results[0], results[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta", "path"])
def test_a_repeated_step_has_the_results_of_the_first(name, runs):
    leaf, results = pa.parse(name), []
    x = inputs_of(leaf, 0)
    cache = leaf.init_cache(**x, **({"capacity": T} if name == "path" else {}))
    _, cache = leaf.extend(cache, **x)
    step = Replaying().runner(leaf, "torch").step
    for seed in (0, 1, 0):
        token = {n: a[:, :1] for n, a in inputs_of(leaf, seed).items()}
        past = {n: cache.store[n] for n in leaf.program.slots}
        frame = pa.frame.Frame.of(
            pa.frame.Layout("extension", 1, T, held=T, longest=T), cache.length
        )
        with small_and_poisoned():
            results.append(step(past, token, frame))
    assert len(runs) == 1
    assert equal(results[0], results[2])
    assert not equal(results[0], results[1])


lifetimes = st.builds(
    lambda first, length, size: Lifetime(first, first + length, size),
    *(st.integers(0, 9), st.integers(0, 5), st.integers(1, 5 * ALIGNMENT)),
)


@given(st.lists(lifetimes, max_size=12))
def test_arrays_that_are_used_at_the_same_time_do_not_overlap(arrays):
    offsets, total = offsets_of(arrays)
    for i, a in enumerate(arrays):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + a.size <= total
        for j, b in enumerate(arrays[:i]):
            if a.first <= b.last and b.first <= a.last:
                ends = offsets[i] + a.size, offsets[j] + b.size
                assert ends[0] <= offsets[j] or ends[1] <= offsets[i]


def test_a_workspace_is_shared_by_arrays_that_follow_each_other():
    one = [Lifetime(i, i, 1024) for i in range(5)]
    assert offsets_of(one) == ([0] * 5, 1024)


X = torch.arange(64.0).reshape(4, 16)


def recorded(method, *arguments, calls=3):
    """The results of a method that is repeated, and the reason why it is not, if it is not."""
    replayed = ReplayedMethod(method, lambda arrays: _interpreted())
    results = [replayed(*arguments) for _ in range(calls)]
    (found,) = replayed._programs.values()
    return results, found.obstacle


def inverse(strict):
    """A launch between operators, with a view of the input and one of the result."""
    doubled = 2 * strict
    result = torch.empty(2, 16, 16)
    launch(pieces.inverse, (1,), doubled[1:].T, result[1], SIZE=16, LEVELS=3)
    result[0].fill_(7)
    return {"whole": result, "part": result[1], "given": strict, "none": None}


def test_operators_between_launches_are_repeated():
    strict = torch.randn(32, 16).tril(-1)
    (first, _, last), obstacle = recorded(inverse, strict)
    assert obstacle == ""
    assert equal(first, last)
    assert last["given"] is strict
    assert last["part"].data_ptr() == last["whole"][1].data_ptr()
    assert last["whole"].data_ptr() != first["whole"].data_ptr()


ELSEWHERE = X.clone()


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda x: x * float(x.sum()), "depends on entries"),
        (lambda x: x[x > 3], "depends on entries"),
        (lambda x: x + torch.rand_like(x), "depends on entries"),
        (lambda x: x.to("meta"), "another device"),
        (lambda x: x + ELSEWHERE, "not its argument"),
        (lambda x: (x, len(x)), "returns a int"),
    ],
    ids=["number", "mask", "random", "device", "constant", "result"],
)
def test_a_call_that_depends_on_more_than_its_signature_is_not_repeated(method, reason, runs):
    results, obstacle = recorded(method, X)
    assert reason in obstacle
    assert not runs
    assert len(results) == 3


def test_a_call_is_recorded_at_its_second_time():
    calls = []

    def method(x):
        calls.append(x)
        return x + 1

    replayed = ReplayedMethod(method, lambda arrays: _interpreted())
    for _ in range(5):
        assert torch.equal(replayed(X), X + 1)
    assert len(calls) == 2
    replayed(X.T)
    assert len(calls) == 3


def test_a_call_that_a_cuda_graph_captures_is_not_recorded(monkeypatch, runs):
    replayed = ReplayedMethod(lambda x: x + 1, lambda arrays: _interpreted())
    monkeypatch.setattr(replay_method, "is_captured", lambda array: True)
    for _ in range(3):
        assert torch.equal(replayed(X), X + 1)
    assert not replayed._programs
    assert not runs


@pytest.mark.parametrize(
    "other",
    [X.T.contiguous().T, X[:, 1:], X.double(), X.reshape(-1)[1:].reshape(9, 7), None, 3.0],
    ids=["strides", "width", "dtype", "address", "none", "number"],
)
def test_the_signature_has_what_launches_depend_on(other):
    frame = full_frame(4, 4, X)
    assert signature_of(({"q": X}, frame))[0] == signature_of(({"q": X.clone()}, frame))[0]
    assert signature_of(({"q": X, "k": other}, frame)) != signature_of(({"q": X, "k": X}, frame))
    ragged = full_frame(4, 4, X, lengths=torch.tensor([3] * 4))
    assert signature_of(({"q": X}, frame))[0] != signature_of(({"q": X}, ragged))[0]


def test_calls_that_something_observes_have_no_signature():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert signature_of((X,)) is None
    assert torch.func.vmap(lambda x: x if signature_of((x,)) is None else None)(X) is not None
    assert signature_of((object(), X)) is None
    assert signature_of(({},)) is None


def test_the_device_is_asked_for_one_workspace_and_the_results(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        "precondattn_triton.replay.program.allocated",
        lambda size, device: sizes.append(size) or torch.empty(size, dtype=torch.uint8),
    )
    strict = torch.randn(32, 16).tril(-1)

    def two(strict):
        half = torch.empty(16, 16)
        launch(pieces.inverse, (1,), strict, half, SIZE=16, LEVELS=3)
        whole = torch.empty(16, 16)
        launch(pieces.inverse, (1,), half, whole, SIZE=16, LEVELS=3)
        return whole

    (first, _, last), _ = recorded(two, strict)
    assert torch.equal(first, last)
    assert sizes == [16 * 16 * 4]
