"""What a backend is: a few methods, each about one piece, group of pieces, or whole mechanism.

A backend never sees strings of options or a user's call. It is asked whether it supports a
mechanism under a request, and then gets arrays by name and a frame. A mechanism here is a leaf
or a group of leaf calls, to be recognised by its program. Compare with `==`, so that an option
that you do not know of (another metric, a forget gate) is not ignored:

    mechanism == LucidSolve(eps=mechanism.eps)      # every other option has its default
    mechanism.program == group_of("lucid")          # from precondattn.algebra.group
    mechanism.program.leaves                        # to match on the leaves' options

Backends are found through the entry-point group `precondattn.backends`, whose entries name a
`Backend` or a class of one. The module of an entry must not import a framework at its top: it is
loaded before anyone has handed in one of that framework's arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from precondattn.arrays import Array
from precondattn.cache import Updates
from precondattn.frame import Frame

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Mechanism
    from precondattn.arrays import Arrays, Residuals


class UnsupportedError(RuntimeError):
    """A backend that was asked for by name can not do what was asked."""


class PassedOverWarning(UserWarning):
    """A backend made for this device was installed, and did not take the work."""


class Support(NamedTuple):
    """Whether a backend takes a piece of work."""

    ok: bool
    reason: str = ""
    """Why not."""
    differentiable: bool = False
    """Whether `forward` is made of a framework's own differentiable calls, so that it is left to
    the framework's autograd and `backward` serves the explicit vjp only."""

    @classmethod
    def yes(cls, *, differentiable: bool = False) -> Support:
        return cls(True, "", differentiable)

    @classmethod
    def no(cls, reason: str) -> Support:
        return cls(False, reason)


@dataclass(frozen=True)
class Request:
    """What is about to be asked of a backend. Hashable, and made without looking at values."""

    verb: str
    """`"forward"`, `"vjp"`, `"extend"` or `"extend_vjp"`. A call whose gradient may be wanted is a
    `"vjp"`."""
    library: str
    device: str
    dtype: str
    """The dtype of q, k, v and of the output."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """The shape of every input of the piece, by the piece's own names."""
    masks: frozenset[str]
    """Which of `segment_ids`, `lengths` and `key_mask` the call has."""
    differentiated: bool = False
    """Whether a gradient may be asked for later."""
    transformed: bool = False
    """Whether that is `torch.func`'s doing (grad, jvp, …), which custom operators do not have: only
    the reference, whose every call is PyTorch's own, is asked then."""
    mapped: bool = False
    """Whether `torch.vmap` is at work. It maps custom operators; not all of PyTorch's own."""
    traced: bool = False
    """Whether `torch.compile` traces the call. It does not look into full calls, which are custom
    operators, but a step that needs no gradient is then given tensors without values."""


class ArraySpec(NamedTuple):
    """Shape and dtype of an array that does not exist yet."""

    shape: tuple[int, ...]
    dtype: str


def _not_written(backend: Backend, method: str) -> NotImplementedError:
    return NotImplementedError(
        f"backend {backend.name!r} claimed work for which it needs a method {method!r}, which it "
        f"has not; its `supports` must refuse such requests"
    )


class Backend(Protocol):
    """Subclass it. `name`, `supports` and `forward` are a must; a backend without one of the other
    methods must answer the requests that need it with `Support.no`."""

    name: str
    libraries: frozenset[str] = frozenset()
    """Whose arrays it takes: `"numpy"`, `"torch"`, `"jax"`, `"cupy"`; empty for any."""
    accelerates: frozenset[str] = frozenset()
    """The devices it is made for, such as `"cuda"`: being passed over there is worth a warning."""
    wide_values: bool = False
    """Whether it would rather have what other pieces made in float32, where they made it so, than
    in the call's half precision."""
    only_by_name: bool = False
    """Whether it takes nothing unless it is asked for by name, as one that is for checking only."""
    preference: int = 0
    """Between two backends that take the same work, the higher one gets it."""
    covers: frozenset[str] = frozenset()
    """Expressions that it promises to take: conformance fails where it takes nothing of one."""
    memory: str = ""
    """How its peak memory grows with the number of tokens, `"linear"` or `"quadratic"`, which
    conformance then holds it to; empty where it makes no promise."""

    def supports(self, mechanism: Mechanism, request: Request) -> Support:
        """Yes, or why not. Cheap, pure, and without a look at values."""
        raise _not_written(self, "supports")

    def forward(
        self, mechanism: Mechanism, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        """The output, and what `backward` needs besides inputs and output."""
        raise _not_written(self, "forward")

    def backward(
        self,
        mechanism: Mechanism,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        """The gradient of every input, by name."""
        raise _not_written(self, "backward")

    def step(
        self,
        mechanism: Mechanism,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        """The output for new tokens, and the update of every buffer in `past`.

        Buffers go by the names of `mechanism.program`'s slots.
        """
        raise _not_written(self, "step")

    def step_backward(
        self,
        mechanism: Mechanism,
        past: Mapping[str, Array],
        inputs: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        """The gradients of inputs and of `past`, from those of `step`'s output and new buffers.

        It serves the verb `"extend_vjp"`, on mechanisms whose buffers are states.
        """
        raise _not_written(self, "step_backward")

    def residual_shapes(
        self, mechanism: Mechanism, inputs: Mapping[str, ArraySpec], frame: Frame
    ) -> tuple[ArraySpec, ...]:
        """What `forward` would return as residuals, without running it; for tracing."""
        raise _not_written(self, "residual_shapes")
