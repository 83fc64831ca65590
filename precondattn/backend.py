"""The contract of a backend: methods that compute a piece, a group of pieces, or a mechanism.

A backend never parses options or a user's call. It is asked whether it supports a mechanism under a
request, and then receives arrays by name and a frame. A mechanism is here a leaf (one of the
functions that expressions are composed of) or a group of leaf calls, which a backend recognises by
its program. Compare with `==`, so that an option that the backend does not know (another metric, a
forget gate) is not ignored:

    mechanism == LucidSolve(eps=mechanism.eps)      # every other option has its default
    mechanism.program == group_of("lucid")          # from precondattn.algebra.group
    mechanism.program.leaves                        # to match on the leaves' options

Backends are found through the entry-point group `precondattn.backends`, whose entries name a
`Backend` or a subclass. The module of an entry must not import a framework at module level: it is
loaded before any array of that framework is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from precondattn.arrays import Array, ByName, dtype_name, library_of
from precondattn.by_autograd import GRADIENTS, gradient_of
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn.runner import METHODS, Runner, note_names

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
    """A backend's answer to whether it supports a piece under a request."""

    ok: bool
    reason: str = ""
    """Why the backend does not support the piece."""
    differentiable: bool = False
    """Whether `forward` and `step` consist of the framework's own differentiable calls. Then the
    framework's autograd differentiates them. `backward` and `step_backward` are called for the
    explicit `vjp` and `extend_vjp` only, and autograd replaces them if they are not defined."""
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
    `supports` compares such a size, PyTorch compiles again for the other outcome."""


class ArraySpec(NamedTuple):
    """Shape and dtype of an array that is not computed yet."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        """The shape and dtype of an array."""
        return cls(tuple(array.shape), dtype_name(array))


def missing_method(backend: Backend, method: str) -> NotImplementedError:
    return NotImplementedError(
        f"backend {backend.name!r} claimed a call that needs the method {method!r}, which it does "
        f"not define; its `supports` must decline such requests"
    )


def _own_runner(backend: Backend, method: str, piece: Piece, inputs: Mapping[str, Array]) -> Runner:
    """The runner of a piece on a backend that defines `runner` instead of this method."""
    if getattr(type(backend), "runner", Backend.runner) is Backend.runner:
        raise missing_method(backend, method)
    return backend.runner(piece, library_of(next(iter(inputs.values()))) or "")


class Backend(Protocol):
    """The base class of backends.

    A subclass must define `name`, `supports` and `forward`. If another method is not defined,
    `supports` must answer the requests that need it with `Support.no`. A backend that makes an
    object for each piece defines `runner` in place of `forward` and the methods after it.
    """

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

    def supports(self, mechanism: Piece, request: Request) -> Support:
        """`Support.yes()` if the backend can run the request, otherwise `Support.no(reason)`.

        It must be cheap and pure.
        """
        raise missing_method(self, "supports")

    def refuses_by_default(self, mechanism: Piece, request: Request) -> str | None:
        """Why a supported piece is run only if the backend is requested by name; None if it is not.

        It is called only for calls that name no backend, and must be cheap and pure.
        """
        return None

    def describing(self, device: str) -> AbstractContextManager[object]:
        """A context in which `supports` answers for a kind of device that may be absent here.

        Only a backend whose answers depend on the machine needs to define it.
        """
        return nullcontext()

    def prepare(self, mechanism: Piece, request: Request) -> Runner | Support:
        """The runner of a piece under a request, or why the backend does not support it.

        It is called once for a plan, which keeps the answer for all calls of the same signature.
        """
        support = self.supports(mechanism, request)
        if not support.ok:
            return support
        return runner_of(self, mechanism, request.library, differentiable=support.differentiable)

    def runner(self, mechanism: Piece, library: str, *, differentiable: bool = False) -> Runner:
        """The runner of a piece that the backend supports, for arrays of a library and of any size.

        PyTorch's operators use it, because a graph with operators may be run with other sizes.
        """
        return MethodsOf(self, mechanism, differentiable=differentiable)

    def forward(
        self, mechanism: Piece, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        """The output, and the residuals that `backward` needs besides inputs and output.

        `inputs` has the arrays by the names of `mechanism.inputs`. The residuals are a tuple of
        arrays.
        """
        return _own_runner(self, "forward", mechanism, inputs).forward(inputs, frame)

    def forward_with_residuals(
        self, mechanism: Piece, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        """`forward` with the residuals that `residual_shapes` declares.

        Define it if `forward` returns no residuals for calls whose gradient it leaves to the
        framework.
        """
        return self.forward(mechanism, inputs, frame)

    def backward(
        self,
        mechanism: Piece,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        """The gradient of every input, by name.

        `out` and `residuals` are the results of `forward`; `cotangent` is the gradient of `out`.
        """
        runner = _own_runner(self, "backward", mechanism, inputs)
        return runner.backward(inputs, frame, out, residuals, cotangent)

    def residuals_from_lse(self, mechanism: Piece, lse: Array) -> Residuals | None:
        """The residuals of softmax attention, from the log-sum-exp (b, t, h) of its scores.

        It is for backends whose `backward` reads nothing else of the forward pass but the output.
        The gradient of attention to some of the keys can then be computed from the output and the
        log-sum-exp over all keys. None if the forward pass is needed.
        """
        if type(self).runner is Backend.runner:
            return None
        return self.runner(mechanism, library_of(lse) or "").residuals_from_lse(lse)

    def step(
        self,
        mechanism: Piece,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        """The output for new tokens, and the update of every buffer in `past`.

        The keys of `past` and of the updates are the names of `mechanism.program.slots`. An update
        is an `Append`, a `Replace` or a `Rewrite` (`precondattn.cache`).
        """
        return _own_runner(self, "step", mechanism, inputs).step(past, inputs, frame)

    def step_backward(
        self,
        mechanism: Piece,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        """The gradients of the inputs and of `past`, each by name.

        `cotangent` is the gradient of the output of `step`, and `d_buffers` has the gradients of
        the new buffers. It serves the verb `"extend_vjp"`, for mechanisms whose buffers are states.
        """
        runner = _own_runner(self, "step_backward", mechanism, inputs)
        return runner.step_backward(past, inputs, frame, cotangent, d_buffers)

    def residual_shapes(
        self, mechanism: Piece, inputs: Mapping[str, ArraySpec], frame: Frame
    ) -> tuple[ArraySpec, ...]:
        """The shapes and dtypes of the residuals of `forward`, computed without running it.

        PyTorch uses them to trace `forward` with tensors whose entries are unknown.
        """
        runner = _own_runner(self, "residual_shapes", mechanism, inputs)
        return runner.residual_shapes(inputs, frame)


OF_PAST = ("step", "step_backward")
"""The names of the methods that get the buffers of a cache."""


def _of_past(method: Callable[..., Any], past: ByName, inputs: ByName, *rest: object) -> Any:
    try:
        return method(past, inputs, *rest)
    except KeyError as error:
        note_names(error, past, inputs)
        raise


class MethodsOf:
    """A runner that calls the methods of a backend, or of another object, with one piece."""

    algorithm = ""
    forward: Callable[..., tuple[Array, Residuals]]
    forward_with_residuals: Callable[..., tuple[Array, Residuals]]
    backward: Callable[..., Arrays]
    residuals_from_lse: Callable[..., Residuals | None]
    step: Callable[..., tuple[Array, Updates]]
    step_backward: Callable[..., tuple[Arrays, Arrays]]
    residual_shapes: Callable[..., tuple[ArraySpec, ...]]

    def __init__(
        self,
        backend: Backend,
        piece: Piece,
        methods: object = None,
        *,
        differentiable: bool = False,
    ) -> None:
        self.differentiable = differentiable
        self.by_autograd: frozenset[str] = frozenset()
        """Which of `backward` and `step_backward` the framework's autograd computes."""
        methods = backend if methods is None else methods
        for name in METHODS:
            method = getattr(methods, name, None)
            known = partial(_missing, backend, name) if method is None else partial(method, piece)
            setattr(self, name, partial(_of_past, known) if name in OF_PAST else known)
        if not hasattr(methods, "forward_with_residuals"):
            self.forward_with_residuals = self.forward
        if not hasattr(methods, "residuals_from_lse"):
            self.residuals_from_lse = lambda lse: None
        if differentiable:
            self.by_autograd = frozenset(name for name in GRADIENTS if _lacks(backend, name))
            for name in self.by_autograd:
                setattr(self, name, gradient_of(self, name))


def _lacks(backend: Backend, method: str) -> bool:
    """Whether a backend does not define a method, nor a `runner` that may have it."""
    cls, inherited = type(backend), getattr(Backend, method)
    inherits_runner = getattr(cls, "runner", Backend.runner) is Backend.runner
    return inherits_runner and getattr(cls, method, inherited) is inherited


def _missing(backend: Backend, method: str, *_: object) -> NoReturn:
    raise missing_method(backend, method)


def prepare(backend: Backend, piece: Piece, request: Request) -> Runner | Support:
    """`backend.prepare`, also for an object whose class does not inherit from `Backend`."""
    if Backend not in type(backend).__mro__:
        return Backend.prepare(backend, piece, request)
    return backend.prepare(piece, request)


def runner_of(
    backend: Backend, piece: Piece, library: str, *, differentiable: bool = False
) -> Runner:
    """`backend.runner(…)`, or a runner of the methods that the backend's class defines.

    The class need not inherit from `Backend`, and may override methods of a class with a `runner`.
    """
    if _defines_methods(type(backend)):
        return MethodsOf(backend, piece, differentiable=differentiable)
    runner: Runner = backend.runner(piece, library, differentiable=differentiable)
    return runner


def _defines_methods(cls: type) -> bool:
    """Whether a class defines or overrides methods of `Backend` after the last `runner`."""
    for each in cls.__mro__:
        if not vars(each).keys().isdisjoint(METHODS):
            return True
        if "runner" in vars(each):
            return False
    return False
