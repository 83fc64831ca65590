"""The models of the papers' experiments, as arguments of our `Decoder` and `VisionTransformer`."""

from __future__ import annotations

from typing import NamedTuple


class PaperModel(NamedTuple):
    """One configuration of a paper."""

    name: str
    arguments: str
    """The call that makes it, for which `CCQ_SIZES` is known."""
    stated: str = ""
    """The number of parameters that the paper states, such as `301M`."""


class Paper(NamedTuple):
    """The configurations of one paper."""

    title: str
    before: str
    models: tuple[PaperModel, ...]
    after: str


def laser(layers: int, width: int, heads: int, head: int, hidden: int, mlp: str = "plain") -> str:
    """A decoder of LASER's."""
    of_layer = f'{{"mechanism": "laser", "head_dim": {head}}}'
    return (
        f"Decoder(32_000, {width}, heads={heads}, layers=[{of_layer}] * {layers}, "
        f'hidden={hidden}, mlp="{mlp}")'
    )


def lucid(layer: str, heads: int = 32) -> str:
    """A decoder of LUCID's 4.1."""
    return f"Decoder(32_000, 2048, heads={heads}, hidden=5632, layers=[{{{layer}}}] * 22)"


def lucid_large(heads: int, mlp: str) -> str:
    """A decoder of LUCID's 4.3 and 4.4."""
    return f'Decoder(256_000, 2048, heads={heads}, hidden=4096, mlp="{mlp}", layers=["lucid"] * 16)'


def ccq(mechanism: str, width: int, heads: int, layers: int) -> str:
    """A decoder of CCQ's."""
    layer = f'{{"mechanism": "{mechanism}", **CCQ_SIZES}}'
    return f"Decoder(32_000, {width}, heads={heads}, layers=[{layer}] * {layers})"


def vision(width: int, heads: int, mechanism: str) -> str:
    """A vision transformer of 12 blocks for ImageNet."""
    return (
        f"VisionTransformer(224, 16, {width}, heads={heads}, blocks=12, classes=1000, "
        f'mechanism="{mechanism}")'
    )


NARROW = '"kv_heads": 4, "head_dim": 68'

PAPERS = (
    Paper(
        "LUCID (arXiv 2602.10410, anonymous review version)",
        """\
4.1 has 22 layers, width 2,048, MLPs of 5,632, 32,000 tokens, 32 heads and 4 key/value heads of
width 68. "MLP dimension 5632" is a little more than 8/3 of the width, as in gated MLPs; the kind
is not stated. RoPE has θ = 10,000, and 64,000 in the fine-tuning: `recipes={"q":
Rotary(theta=64_000.0), "k": Rotary(theta=64_000.0)}`.
""",
        (
            PaperModel("4.1, LUCID", lucid(f'"mechanism": "lucid", {NARROW}'), "1B"),
            PaperModel(
                "4.1, LUCID, heads of 64", lucid('"mechanism": "lucid", "kv_heads": 4'), "1B"
            ),
            PaperModel("4.1, standard attention", lucid(f'"mechanism": "softmax", {NARROW}'), "1B"),
            PaperModel("4.1, PaTH", lucid(f'"mechanism": "path", {NARROW}'), "1B"),
            PaperModel(
                "4.1, Diff Transformer",
                lucid('"mechanism": "differential", "kv_heads": 2, "head_dim": 68', heads=16),
                "1B",
            ),
            PaperModel("4.1, DeltaNet", lucid('"mechanism": "delta", "head_dim": 68'), "1B"),
            PaperModel("4.3, heads of 64", lucid_large(32, "plain")),
            PaperModel("4.3, gated MLPs", lucid_large(32, "gated")),
            PaperModel("4.4, heads of 16", lucid_large(128, "plain")),
        ),
        """\
* **32 heads of width 68 are 2,176 channels, and not 2,048.** Both widths give a model of the
  stated size, 68 with maps that are not square, and 64. With either, 4.1 fits.
* Layers of the Diff Transformer have pairs of heads, so 32 heads are taken as 16 pairs. A delta
  rule has as many key heads as query heads here; how the paper's DeltaNet has 4 key/value heads
  is not said.
* 4.3 and 4.4 call their models "at larger scale" and state no number. Nearly half of the weights
  are the embedding of 256,000 tokens. Whether their MLPs are gated is not stated. 4.4 has the
  same weights as 4.3 in other heads.
* Table 5's variants have the same weights: `lucid[normalize=queries_and_keys]`,
  `lucid[normalize=rows]`.
""",
    ),
    Paper(
        "LASER (arXiv 2411.03493)",
        """\
4.1 describes a model of width 1,024 with 32 layers, 8 heads of width 128 and MLPs of 2,048. MLPs
have two layers (Eq. 1). Their activation and the vocabulary are not stated: here it is GELU and
32,000 tokens, with which the smaller models come out as stated. Standard attention (`softmax`)
has the same weights; `temperature(laser)` has one more number, and `per_dim_scale(laser)` one
more vector, for each layer.
""",
        (
            PaperModel("Table 1, 16 layers", laser(16, 1024, 8, 128, 4096), "234M"),
            PaperModel("Figure 2; Table 1, 32 layers", laser(32, 1024, 8, 128, 2048), "301M"),
            PaperModel("Table 1, 32 layers of 4,096", laser(32, 1024, 8, 128, 4096), "435M"),
            PaperModel("Figure 5, width 1,024", laser(32, 1024, 8, 256, 4096), "1.1B"),
            PaperModel("the same of width 2,048", laser(32, 2048, 8, 256, 4096), "1.1B"),
            PaperModel("4.1; Table 2", laser(32, 2048, 8, 512, 8192), "2.2B"),
            PaperModel("5; Table 6", laser(32, 3440, 16, 720, 11584), "7.7B"),
            PaperModel(
                "Table 7, Diff+LASER",
                laser(32, 2048, 8, 256, 8192).replace('"laser"', '"differential(laser)"'),
                "2.2B",
            ),
            PaperModel(
                "4.2, BERT",
                laser(32, 2048, 16, 256, 8192).replace('"laser"', '"laser(softmax[causal=false])"'),
                "2.2B",
            ),
            PaperModel("Table 4, ViT-S/16", vision(384, 6, "laser(softmax[causal=false])")),
        ),
        """\
* **The 1.1B model of Figure 5 has half as many parameters at its width of 1,024.** 4.1 scales
  down the MLPs and the heads of the 2.2B model and does not mention its width. At that width,
  2,048, it is the stated size.
* With gated MLPs the models of 301M, 2.2B and 7.7B would have {gated_small}, {gated_middle} and
  {gated_large}.
* The 7.7B model is "scaled along all dimensions", and its number of layers is not stated; nor is
  that of the 2.2B BERT. Both fit with 32.
* Table 7's 8 heads of size 512 are taken as 8 pairs, with keys of 256 in each map and values of
  512.
* The attention of the 2.2B model is twice as wide as the model: 8 heads of 512, where Eq. 1 has a
  square W_O.
* 234M and 435M are named in Figure 4 without a configuration. They are the other rows of Table 1.
* "S/16" is width 384, 12 blocks and 6 heads by its name; the paper states no numbers, nor whether
  there is a class token, as here. Table 4's variants are `temperature(…)`, `per_dim_scale(…)` and
  `qk_norm[norm=layer](…)` of the mechanism.
* There is no Conformer here (Table 5).
""",
    ),
    Paper(
        "CCQ (arXiv 2606.01294)",
        """\
Heads have keys of width 256, values are twice as wide (Appendix D), MLPs are gated and 32,000
tokens are embedded in rows that are the head too (4.1). `CCQ_SIZES` of
`precondattn.layers.recipes` are these widths. Tables 1 and 6, with numbers of layers and widths,
have no text in the HTML version, from which this page was made. Table 5's caption has the width
of the 1.3B model, 2,048, and Appendix H says that the Gated DeltaNet of 500M has 21 layers of 6
heads. **What is left is our choice**: the width of the 500M model, the layers of the 1.3B model,
and all of GLA's but the width.
""",
        (
            PaperModel("CCQ-Gated DeltaNet, 500M", ccq("ccq(gated_delta)", 1024, 6, 21), "500M"),
            PaperModel("CCQ-Gated DeltaNet, 1.3B", ccq("ccq(gated_delta)", 2048, 6, 21), "1.3B"),
            PaperModel("Gated DeltaNet, 1.3B", ccq("gated_delta", 2048, 6, 21), "1.3B"),
            PaperModel("CCQ-GLA, 1.3B", ccq("ccq(gla)", 2048, 4, 24), "1.3B"),
        ),
        """\
* 21 layers of 6 heads fit both sizes, by the width alone: the stated 500M is a round number.
* CCQ adds only a vector and a number for each head to its backbone.
* Mamba2 and the Llama-style Transformer among the baselines are described by nothing else than
  their names.
""",
    ),
    Paper(
        "Preconditioned attention (arXiv 2603.27153)",
        """\
The row norm's paper takes its models from others and states no sizes: ViT-B and DeiT-B, which are
one architecture, Swin-B, XCiT-M24 and S12 as in timm, Nyströmformer on the Long Range Arena, and
Crammed BERT. A row norm has no weights.
""",
        (
            PaperModel(
                "Table 1, ViT-B, DeiT-B", vision(768, 12, "row_normalized(softmax[causal=false])")
            ),
        ),
        """\
* `VisionTransformer` has no stages, so Swin-B and XCiT can not be made of it as a whole. Their
  layers are here: `VisionAttention` with `row_normalized(windowed[size=7,shift=3,bias=true])`,
  and `XCABlock` with `row_normalized(cross_covariance)`.
* Nyströmformer's layer is `VisionAttention` with `row_normalized(nystrom)`, or `Attention` in a
  `Decoder`.
""",
    ),
)
