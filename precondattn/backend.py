"""The contract of a backend: `prepare(piece, request)` returns a runner, or why there is none.

A piece is a leaf (one of the functions that expressions are composed of) or a group of leaf calls,
which a backend recognises by its program. Compare with `==`, so that an option that the backend
does not know (another metric, a forget gate) is not ignored:

    piece == LucidSolve(eps=piece.eps)          # every other option has its default
    piece.program == group_of("lucid")          # from precondattn.algebra.group
    piece.program.leaves                        # to match on the leaves' options

A backend never parses options or a user's call. Its runner receives arrays by name and a frame. A
plan keeps the runner for all calls of the same signature, which call the runner's methods directly.

Backends are found through the entry-point group `precondattn.backends`, whose entries name a
`Backend` or a subclass. The module of an entry must not import a framework at module level: it is
loaded before any array of that framework is used. `method_backend.py` turns a class with methods of
a piece, such as `supports(piece, request)` and `forward(piece, inputs, frame)`, into a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from precondattn.arrays import Array, ByName, dtype_name
from precondattn.cache import Updates
from precondattn.frame import Frame

if TYPE_CHECKING:
    from precondattn.algebra.piece import Piece
    from precondattn.arrays import Arrays, Residuals


CONVENTIONS = frozenset({"bottom_right", "empty_rows", "float64", "head_order", "hidden_nan"})
"""The conventions in which published implementations differ. Results of this library keep all.

==============  =================================================================================
`bottom_right`  with fewer queries than keys, the last query is aligned with the last key
`head_order`    of h query heads and n key heads, query head i reads key head ⌊i n / h⌋
`empty_rows`    a row that sees no key is 0, and has no gradient
`hidden_nan`    a NaN or infinity in a key reaches no query that does not see the key
`float64`       float64 inputs are computed in float64
==============  =================================================================================
"""


class UnsupportedError(RuntimeError):
    """The backends requested by name do not support the whole call."""

    request: Request | None = None
    """The request that was declined; None if the call had already begun."""


class PassedOverWarning(UserWarning):
    """A backend made for this device is installed, but runs no part of the call."""


class GatheredWarning(UserWarning):
    """A call of JAX gathers sharded arrays on every device."""


class NotCheckedWarning(UserWarning):
    """A checked call can not check the values of its inputs, because they are traced."""


class Support(NamedTuple):
    """The answer of a backend about a piece, as `explain` lists it.

    `supports` of a class with methods returns it (`method_backend.py`).
    """

    ok: bool
    reason: str = ""
    """Why the backend does not run the piece."""
    differentiable: bool = False
    """`Runner.differentiable`."""
    by_name: bool = False
    """Whether a backend that refuses the piece would run it if it were requested by name."""

    @classmethod
    def yes(cls, *, differentiable: bool = False) -> Support:
        return cls(True, "", differentiable)

    @classmethod
    def no(cls, reason: str) -> Support:
        return cls(False, reason)


@dataclass(frozen=True)
class Request:
    """The description of a call that a backend is asked about. Hashable; no array is read."""

    verb: str
    """`"forward"`, `"vjp"`, `"extend"` or `"extend_vjp"`. A call whose gradient may be needed is a
    `"vjp"`."""
    library: str
    device: str
    dtype: str
    """The dtype of q, k, v and of the output."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, shape) of every input of the piece; names are the piece's own."""
    masks: frozenset[str]
    """Which of `segment_ids`, `lengths`, `key_mask`, `prefix` and `attn_mask` the call has."""
    differentiated: bool = False
    """Whether a gradient may be needed later."""
    transformed: bool = False
    """Whether `torch.func` differentiates the call (grad, jvp, …). Custom operators do not support
    that, so only the reference, which consists of PyTorch's own calls, is queried then."""
    mapped: bool = False
    """Whether `torch.vmap` maps the call. It maps custom operators, but not all functions."""
    traced: bool = False
    """Whether `torch.compile` traces the call. It does not trace into full calls, which are custom
    operators. A step without gradient is traced with tensors whose entries are unknown."""
    is_symbolic: bool = False
    """Whether `torch.compile` traces the call with symbolic sizes, such as a length that varies. If
    `prepare` compares such a size, PyTorch compiles again for the other outcome."""
    is_operator: bool = False
    """Whether an operator of PyTorch runs the piece, in a graph whose sizes and masks may change
    from call to call: the runner must compute all that its backend supports, not only these."""


class ArraySpec(NamedTuple):
    """Shape and dtype of an array that is not computed yet."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        """The shape and dtype of an array."""
        return cls(tuple(array.shape), dtype_name(array))


def missing_method(whose: object, method: str) -> NotImplementedError:
    name = getattr(whose, "name", type(whose).__name__)
    return NotImplementedError(
        f"{name!r} claimed a call that needs the method {method!r}, which it does not define; its "
        f"backend must decline such requests"
    )


class Runner:
    """The base class of objects that run a piece. The methods that are not defined raise an error.

    A plan calls it for one signature: the shapes, dtypes and masks of its request. It may be called
    by several threads.

    Inputs are arrays by the names and in the shapes of `piece.inputs`, such as (b, t, h, d) for q,
    (b, s, n, d) for k and (b, s, u, e) for v. They have the dtype of the call, but in half
    precision gates and the like may be in float32. They may be views, and must not be written to.
    Results have the dtype of v, unless the backend has `wide_values`. The frame has the positions
    of the tokens, and says which are valid and which queries see which keys.
    """

    algorithm: str = ""
    """The algorithm's name, which `explain` shows; empty if the backend has only one."""
    differentiable: bool = False
    """Whether `forward` and `step` consist of the framework's own differentiable calls. Then the
    framework's autograd differentiates them, and `backward` and `step_backward` are called for the
    explicit `vjp` and `extend_vjp` only (`by_autograd.py` has a base class that computes them)."""
    by_autograd: frozenset[str] = frozenset()
    """Which of `backward` and `step_backward` the framework's autograd computes."""

    def refuses_by_default(self) -> str | None:
        """Why the piece is run only if the backend is requested by name; None if it always is.

        It is called once for a plan, and only for calls that name no backend.
        """
        return None

    def forward(self, inputs: ByName, frame: Frame, /) -> tuple[Array, Residuals]:
        """The output, and the residuals that `backward` needs besides inputs and output.

        The output has the shape of `piece.program.output`, such as (b, t, h, e). The residuals are
        a tuple of arrays.
        """
        raise missing_method(self, "forward")

    def forward_with_residuals(self, inputs: ByName, frame: Frame, /) -> tuple[Array, Residuals]:
        """`forward` with the residuals that `residual_shapes` declares.

        Define it if `forward` returns no residuals for calls whose gradient it leaves to the
        framework.
        """
        return self.forward(inputs, frame)

    def backward(
        self, inputs: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array, /
    ) -> Arrays:
        """The gradient of every input, by name and in its shape.

        `out` and `residuals` are the results of `forward`; `cotangent` is the gradient of `out`.
        """
        raise missing_method(self, "backward")

    def residuals_from_lse(self, lse: Array, /) -> Residuals | None:
        """The residuals of softmax attention, from the log-sum-exp (b, t, h) of its scores.

        It is for runners whose `backward` reads nothing else of the forward pass but the output.
        The gradient of attention to some of the keys can then be computed from the output and the
        log-sum-exp over all keys. None if the forward pass is needed.
        """
        return None

    def step(self, past: ByName, inputs: ByName, frame: Frame, /) -> tuple[Array, Updates]:
        """The output for t new tokens, and the update of every buffer in `past`.

        The keys of `past` and of the updates are the names of `piece.program.slots`. A buffer of
        tokens has room for c of them, (b, c, …); a state has no axis of tokens. An update is an
        `Append` or a `Rewrite` of tokens, or a `Replace` of a state (`precondattn.cache`).
        """
        raise missing_method(self, "step")

    def step_backward(
        self, past: ByName, inputs: ByName, frame: Frame, cotangent: Array, d_buffers: ByName, /
    ) -> tuple[Arrays, Arrays]:
        """The gradients of the inputs and of `past`, each by name.

        `cotangent` is the gradient of the output of `step`, and `d_buffers` has the gradients of
        the new buffers. It serves the verb `"extend_vjp"`, for pieces whose buffers are states.
        """
        raise missing_method(self, "step_backward")

    def residual_shapes(
        self, inputs: Mapping[str, ArraySpec], frame: Frame, /
    ) -> tuple[ArraySpec, ...]:
        """The shapes and dtypes of the residuals of `forward`, computed without running it.

        PyTorch uses them to trace `forward` with tensors whose entries are unknown.
        """
        raise missing_method(self, "residual_shapes")


class Backend:
    """The base class of backends. A subclass defines `name` and `prepare`."""

    name: str
    libraries: frozenset[str] = frozenset()
    """The array libraries it supports: `"numpy"`, `"torch"`, `"jax"`, `"cupy"`; empty for any."""
    accelerates: frozenset[str] = frozenset()
    """The devices it is made for, such as `"cuda"`. If it runs no part of a call there, the user
    gets a `PassedOverWarning`."""
    wide_values: bool = False
    """Whether, in half precision, results that other pieces computed in float32 are passed to it in
    float32. Its own outputs must then be in float32 too."""
    segments_as_batch: bool = False
    """Whether a packed call is passed to it as a batch of its segments, if these can be read. Leave
    it False if the backend does not compute pairs of tokens of different segments anyway."""
    only_by_name: bool = False
    """Whether it is used only when requested by name, for example a backend for tests."""
    preference: int = 0
    """If several backends support a piece, the one with the highest preference runs it."""
    covers: frozenset[str] = frozenset()
    """Expressions that it promises to support. The conformance suite fails if the backend runs no
    part of one of them."""
    declines: tuple[str, ...] = ()
    """The calls that it declines on purpose, each with the reason, such as `("float64: kernels of
    half precision",)`. The words before the colon must all apply to a call: a check, a dtype, a
    library, a mask, a verb, `grouped_heads`, or the first name of an expression. The conformance
    suite fails if it can compare less than half of a check's calls that are not listed here."""
    masks_pairs: bool = False
    """Whether it applies the masks `attn_mask` and `prefix` (`Frame.pairs` and `Frame.q_prefix`).
    If not, it is not asked about calls that have one."""
    blocks: tuple[int, ...] = ()
    """The numbers of tokens in a block of its kernels, such as `(64, 128)`. The conformance suite
    places lengths and masks at the edges of blocks. If empty, it uses 16, 32, 64 and 128."""
    promises: frozenset[str] = CONVENTIONS
    """The conventions that its results keep; the conformance suite does not compare the others. A
    backend that lacks one must be `only_by_name`, because other calls rely on all of them."""
    memory: str = ""
    """How its peak memory grows with the number of tokens, `"linear"` or `"quadratic"`, which the
    conformance suite checks. Empty for no promise."""

    def prepare(self, piece: Piece, request: Request) -> Runner | str:
        """The runner of a piece under a request, or the reason why the backend has none.

        It must be cheap and pure, since it is called for each group of leaf calls of a plan. A
        runner for the verb `"vjp"` needs `forward`, `backward` and, for PyTorch, `residual_shapes`.
        One for `"extend"` needs `step`, and one for `"extend_vjp"` also `step_backward`.
        """
        raise missing_method(self, "prepare")

    def describing(self, device: str) -> AbstractContextManager[object]:
        """A context in which `prepare` answers for a kind of device that may be absent here.

        Only a backend whose answers depend on the machine needs to define it.
        """
        return nullcontext()
