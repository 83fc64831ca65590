"""The common part of both frameworks' decoders: declared weights, sizes, and checks.

    block:    x ← x + attention(norm(x)),    x ← x + MLP(norm(x))
    gated:    MLP(y) = W₃ (SiLU(W₁ y) ∘ W₂ y)
    plain:    MLP(y) = W₂ GELU(W₁ y)
    decoder:  logits = norm(block(… block(E[tokens]))) Eᵀ

The norms are RMS norms with a gain, and the gated MLP is that of arXiv 2002.05202, Eq. 6.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Array, dtype_name, is_compiling, library_of
from precondattn.cache import Cache
from precondattn.given import Arguments, Given, at_least, whole_number
from precondattn.layers.checks import LayerOutput
from precondattn.layers.functions import LinearMap, gelu, linear, silu
from precondattn.layers.maps import Map, Weight
from precondattn.layers.parameters import Constant, FanIn, Normal

EPS = 1e-6
MLPS = ("gated", "plain")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")

Layer = str | Mechanism | Mapping[str, Any]
"""A mechanism, or the arguments of an `Attention` as a dict."""
Layers = int | Sequence[Layer]
"""The number of blocks, or one `Layer` for each."""


def gain_weight(width: int) -> Weight:
    return Weight((width,), Constant(1), ("embed",))


def mlp_maps(width: int, hidden: int, mlp: str) -> tuple[Map, ...]:
    """The linear maps of an MLP, three if gated and two if plain, initialised by `FanIn`."""
    inward = Weight((width, hidden), FanIn(), ("embed", "mlp"))
    outward = Weight((hidden, width), FanIn(), ("mlp", "embed"))
    weights = {"gate": inward, "up": inward, "down": outward}
    if mlp == "plain":
        del weights["gate"]
    return tuple(
        Map.of_weight(f"{name}_proj", "", name, "", 1, each) for name, each in weights.items()
    )


def embedding_weight(vocabulary: int, width: int) -> Weight:
    return Weight((vocabulary, width), Normal(0.02), ("vocab", "embed"))


def mlp_output(y: Array, *maps: LinearMap) -> Array:
    """The output of an MLP: W₃ (SiLU(W₁ y) ∘ W₂ y) with three maps, W₂ GELU(W₁ y) with two."""
    *inward, down = (partial(linear, weight=each) for each in maps)
    if len(inward) == 1:
        return down(gelu(inward[0](y)))
    gate, up = inward
    return down(silu(gate(y)) * up(y))


def block_output(block: Given, x: Array, **options: Given) -> LayerOutput:
    """The x after a pre-norm block, and the extended cache if one is given."""
    y = block.attention(block.attention_norm(x), **options)
    y, after = (y, None) if options.get("cache") is None else y
    x = x + y
    x = x + block.mlp(block.mlp_norm(x))
    return x if after is None else (x, after)


def states_after(
    blocks: Iterable[Callable[..., Any]],
    x: Array,
    caches: tuple[Cache, ...] | None,
    **options: Given,
) -> tuple[Array, tuple[Cache, ...] | None]:
    """The hidden states x after all blocks, and the extended caches."""
    if caches is None:
        for block in blocks:
            x = block(x, **options)
        return x, None
    longer = []
    for block, cache in zip(blocks, caches, strict=True):
        x, cache = block(x, cache=cache, **options)
        longer.append(cache)
    return x, tuple(longer)


def check_mlp(mlp: object) -> None:
    if mlp not in MLPS:
        raise ValueError(f"mlp must be 'gated' or 'plain'; found {mlp!r}")


def hidden_width(width: int, hidden: int | None, mlp: str) -> int:
    """The inner width of the MLP; by default both kinds have 8 width² weights.

    The default is 4 times the width, or in a gated MLP 8/3 of it, as a multiple of 8.
    """
    if hidden is None:
        return 4 * width if mlp == "plain" else -(-8 * width // 24) * 8
    return at_least(1, "hidden", hidden)


def arguments_of(layers: Layers, heads: int, mechanism: Layer | None = None) -> list[Arguments]:
    """The arguments of each block's `Attention`; `depth` is the index of the block."""
    blocks = whole_number(layers)
    if isinstance(layers, int) or blocks is not None:
        if blocks is None or blocks < 1:
            raise ValueError(f"layers must be 1 or above, or a list; found {layers}")
        if mechanism is None:
            raise TypeError(
                f"mechanism: {layers} layers need one; write Decoder(..., layers={layers}, "
                f"mechanism='lucid'), or make layers a list with one for each block, such as "
                f"['gated_delta', 'lucid']"
            )
        layers = [mechanism] * blocks
    elif mechanism is not None:
        raise TypeError(
            f"mechanism goes with a number of layers, and a list of them has one for each; found "
            f"mechanism={mechanism!r} and layers={layers!r}"
        )
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise TypeError(
            f"layers must be a list with a mechanism for each block, such as "
            f"['gated_delta'] * 3 + ['lucid'], or a number, with mechanism='lucid'; found "
            f"{layers!r}"
        )
    arguments = []
    for depth, layer in enumerate(layers):
        of_layer = dict(layer) if isinstance(layer, Mapping) else {"mechanism": layer}
        arguments.append({"heads": heads, "depth": depth, **of_layer})
    return arguments


def check_tokens(
    tokens: Given,
    library: str,
    mask: Given = None,
    caches: Given = None,
    *,
    blocks: int = 0,
    are_prompts: bool = False,
) -> None:
    """Raise an error unless tokens are integers (b, t) and there is one cache per block.

    Prompts (`are_prompts`) must not be empty.
    """
    # PyTorch's compiler can not look up the name of a dtype.
    is_integer = is_compiling() or (
        library_of(tokens) == library and dtype_name(tokens) in INTEGERS
    )
    if not is_integer:
        found = dtype_name(tokens) if library_of(tokens) else type(tokens).__name__
        raise TypeError(f"tokens must be integers of {library}; found {found}")
    if tokens.ndim != 2 or (are_prompts and 0 in tokens.shape):
        without = ", without empty axes" if are_prompts else ""
        raise ValueError(f"tokens must have shape (b, t){without}; found {tuple(tokens.shape)}")
    if mask is not None and tuple(getattr(mask, "shape", ())) != tuple(tokens.shape):
        raise ValueError(f"mask must have shape {tuple(tokens.shape)}; found {mask!r:.60}")
    if caches is not None and not isinstance(caches, tuple):
        raise TypeError(f"caches must be from init_caches; found {type(caches).__name__}")
    if caches is not None and len(caches) != blocks:
        raise ValueError(
            f"caches must be from init_caches, one for each of {blocks} blocks; found {len(caches)}"
        )


def check_generation(
    count: Given,
    temperature: object,
    top_p: object,
    stop: Given,
    vocabulary: int,
    tokens: Array,
    mask: Array | None,
) -> tuple[int, int | None]:
    """`count` and `stop`, after a check of the options, and of the prompts."""
    count = at_least(1, "count", count)
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or above; found {temperature!r}")
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1]; found {top_p!r}")
    token = whole_number(stop)
    if stop is not None and (token is None or not 0 <= token < vocabulary):
        raise ValueError(f"stop must be a token, 0 to {vocabulary - 1}; found {stop!r}")
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= vocabulary:
        raise ValueError(
            f"tokens must be between 0 and {vocabulary - 1}; found {least} to {largest}"
        )
    if mask is not None and not bool(mask.any(1).all()):
        raise ValueError("mask: every prompt needs a valid token; found one without any")
    return count, token


def counted(count: int, *, shown: bool) -> Iterator[int]:
    """The numbers 0 … count − 1, with a progress bar on the standard error if `shown`."""
    start = time.monotonic()
    for i in range(count):
        yield i
        if shown:
            filled = 30 * (i + 1) // count
            rate = (i + 1) / max(time.monotonic() - start, 1e-9)
            bar = "#" * filled + "." * (30 - filled)
            end = "\n" if i + 1 == count else ""
            print(f"\r[{bar}] {i + 1}/{count} tokens, {rate:.0f}/s{end}", end="", file=sys.stderr)
