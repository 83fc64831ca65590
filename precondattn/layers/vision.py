"""The common part of both frameworks' vision transformers: recipes, weights, and checks.

    tokens:  x_i = W_p patch_i + b_p + position_i,   with a class token before them, or without
    block:   x ← x + attention(LN(x)),   x ← x + W₂ GELU(W₁ LN(x) + b₁) + b₂
    logits:  W LN(pooled x) + b,   pooled: the class token, or the mean of all tokens

Source: Vision Transformer (arXiv 2010.11929), Eq. 1–4. Parameters have the names and shapes of
timm, except those of attention. Matrices are (outer, inner).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from precondattn.algebra.mechanism import Mechanism, parse
from precondattn.algebra.text import not_a_mechanism
from precondattn.arrays import Array, cast, namespace
from precondattn.execution.array_checks import check_stored
from precondattn.given import Arguments, Given
from precondattn.layers.maps import Weight
from precondattn.layers.meaning import changed_inside, meanings, output_call
from precondattn.layers.parameters import Constant, Normal
from precondattn.layers.plan import OUT
from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes import Biased, Projection, Rotary, Unchanged, recipes_for
from precondattn.layers.sizes import count

NOT_CAUSAL = "softmax[causal=false]"
POOLS = ("token", "mean")

Mechanisms = str | Mechanism | Sequence[str | Mechanism]


def vision_recipes(mechanism: str | Mechanism, *, qkv_bias: bool = True) -> dict[str, Recipe]:
    """The recipes of vision transformers: linear maps with biases, without rotary embeddings.

    They replace the published recipes that are linear maps (`Projection`, `Rotary`) for each input
    of the mechanism. An output without a norm or a gate gets a bias. Other recipes stay.

    Parameters
    ----------
    mechanism : str or Mechanism
        The mechanism or its expression, such as `"row_normalized(softmax[causal=false])"`.
    qkv_bias : bool
        Whether the maps of the inputs have biases too.

    Examples
    --------
    >>> from precondattn.layers.vision import vision_recipes
    >>> vision_recipes("cross_covariance")["q"]
    Projection(bias=True)
    """
    mechanism = parse(mechanism) if isinstance(mechanism, str) else mechanism
    recipes: dict[str, Recipe] = {}
    for name, (call, formal) in meanings(mechanism.program).items():
        published = recipes_for(call.leaf).get(formal)
        if isinstance(published, Projection) and type(published) in (Projection, Rotary):
            recipes[name] = Projection(bias=qkv_bias or published.bias)
    call = output_call(mechanism.program, lambda call: OUT in recipes_for(call.leaf))
    if type(recipes_for(call.leaf).get(OUT, Unchanged())) is Unchanged:
        recipes[OUT] = Biased()
    return recipes


@dataclass(frozen=True)
class VisionSizes:
    """The sizes of a vision transformer."""

    image: tuple[int, int]
    patch: tuple[int, int]
    width: int
    classes: int
    channels: int
    pool: str
    hidden: int
    mechanisms: tuple[str | Mechanism, ...]
    """The mechanism of each block."""

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of rows and columns of patches."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def tokens(self) -> int:
        """The number of tokens: patches, and the class token if there is one."""
        return self.grid[0] * self.grid[1] + int(self.pool == "token")


def vision_sizes(
    image: Given,
    patch: Given,
    width: Given,
    blocks: Given,
    classes: Given,
    channels: Given,
    pool: Given,
    hidden: Given,
    mechanism: Given,
) -> VisionSizes:
    """The checked sizes of a vision transformer."""
    sides, patches = _pair("image", image), _pair("patch", patch)
    for side, of_patch in zip(sides, patches, strict=True):
        if side % of_patch:
            raise ValueError(
                f"patch: {patches[0]} x {patches[1]} pixels must divide the image; found image="
                f"{sides}"
            )
    counts = {"width": width, "blocks": blocks, "classes": classes, "channels": channels}
    width, blocks, classes, channels = (count(name, value) for name, value in counts.items())
    hidden = count("hidden", 4 * width if hidden is None else hidden)
    if pool not in POOLS:
        raise ValueError(f"pool must be 'token' or 'mean'; found {pool!r}")
    if isinstance(mechanism, str | Mechanism):
        mechanism = [mechanism] * blocks
    if not isinstance(mechanism, Sequence) or len(mechanism) != blocks:
        raise ValueError(
            f"mechanism must be one for all blocks, or a list with one for each of {blocks}; "
            f"found {mechanism!r:.60}"
        )
    for each in mechanism:
        parsed = parse(each) if isinstance(each, str) else each
        if pool == "token" and isinstance(parsed, Mechanism) and parsed.offers.causal:
            advised = changed_inside(parsed, _not_causal) or "another mechanism"
            raise ValueError(
                f"mechanism: {parsed} is causal, so that the class token, which is the first, "
                f"would see no patch; use {advised}, or pool='mean'"
            )
    return VisionSizes(sides, patches, width, classes, channels, pool, hidden, tuple(mechanism))


def _not_causal(mechanism: Mechanism) -> Mechanism | None:
    has_option = "causal" in {field.name for field in fields(mechanism)}
    return replace(mechanism, causal=False) if has_option else None


def check_image(x: Array, sizes: VisionSizes) -> None:
    """Raise an error unless x has the shape (b, c, H, W) of these sizes."""
    expected = (sizes.channels, *sizes.image)
    check_stored("x", x)
    if getattr(x, "ndim", 0) != 4 or tuple(x.shape[1:]) != expected or x.shape[0] == 0:
        found = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise ValueError(
            f"x must have shape (b, {expected[0]}, {expected[1]}, {expected[2]}); found {found}"
        )


def logits(model: Given, x: Array) -> Array:
    """The logits (b, classes) of images x, by the modules and weights of a vision transformer."""
    xp, positions, is_token = namespace(x), model.pos_embed[...], model.sizes.pool == "token"
    tokens = model.patch_embed["proj"](x)
    if is_token:
        of_class = cast(model.cls_token[...], tokens.dtype)
        of_class = xp.broadcast_to(of_class, (len(tokens), *of_class.shape[1:]))
        tokens = xp.concat([of_class, tokens], axis=1)
    tokens = tokens + positions
    for block in model.blocks:
        tokens = block(tokens)
    return model.head(model.norm(tokens[:, 0] if is_token else xp.mean(tokens, axis=1)))


def affine_weights(
    inner: int, outer: int, names: tuple[str | None, str | None] = (None, None)
) -> dict[str, Weight]:
    """The weights W (outer, inner) and b; `names` are the usual names of W's axes."""
    return {
        "weight": Weight((outer, inner), Normal(inner**-0.5), names),
        "bias": Weight((outer,), Constant(0), names[:1]),
    }


def norm_weights(width: int) -> dict[str, Weight]:
    """The weights γ and β of a layer norm."""
    return {
        "weight": Weight((width,), Constant(1), ("embed",)),
        "bias": Weight((width,), Constant(0), ("embed",)),
    }


def mlp_weights(width: int, hidden: int) -> dict[str, dict[str, Weight]]:
    """The weights of both layers of an MLP."""
    return {
        "fc1": affine_weights(width, hidden, ("mlp", "embed")),
        "fc2": affine_weights(hidden, width, ("embed", "mlp")),
    }


def patch_weights(sizes: VisionSizes) -> dict[str, Weight]:
    """The weights W_p (width, c, rows, columns) and b_p of the patch embedding."""
    shape = (sizes.width, sizes.channels, *sizes.patch)
    terms = sizes.channels * sizes.patch[0] * sizes.patch[1]
    return {
        "weight": Weight(shape, Normal(terms**-0.5), ("embed", None, None, None)),
        "bias": Weight((sizes.width,), Constant(0), ("embed",)),
    }


def token_weights(sizes: VisionSizes) -> dict[str, Weight]:
    """The weights of the positions, and of the class token if there is one."""
    names, start = (None, None, "embed"), Normal(0.02)
    weights = {"pos_embed": Weight((1, sizes.tokens, sizes.width), start, names)}
    if sizes.pool == "token":
        weights["cls_token"] = Weight((1, 1, sizes.width), start, names)
    return weights


def attention_arguments(
    mechanism: str | Mechanism, qkv_bias: bool, recipes: Mapping[str, Recipe] | None
) -> Arguments:
    """The arguments of `Attention` in a vision transformer."""
    if not isinstance(mechanism, str | Mechanism):
        raise not_a_mechanism(mechanism)
    if not isinstance(qkv_bias, bool):
        raise TypeError(f"qkv_bias must be True or False; found {qkv_bias!r}")
    usual = vision_recipes(mechanism, qkv_bias=qkv_bias)
    return {"mechanism": mechanism, "recipes": {**usual, **(recipes or {})}}


def _pair(name: str, number: Given) -> tuple[int, int]:
    pair = tuple(number) if isinstance(number, tuple | list) else (number, number)
    if len(pair) != 2:
        raise ValueError(f"{name} must be one number, or rows and columns; found {number!r}")
    rows, columns = (count(name, side) for side in pair)
    return rows, columns
