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
The models of Section 4.1 have 22 layers, width 2,048, MLPs of width 5,632, a vocabulary of 32,000
tokens, and 32 heads and 4 key/value heads of width 68. The paper does not say whether the MLPs are
gated. "MLP dimension 5632" is a little more than 8/3 of the width, as is usual for gated MLPs. RoPE
has θ = 10,000, and 64,000 in the fine-tuning: `recipes={"q": Rotary(theta=64_000.0), "k":
Rotary(theta=64_000.0)}`.
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
* **32 heads of width 68 are 2,176 channels, and not 2,048.** With heads of width 68, the
  projections are not square; with heads of width 64, they are. Both models have the stated size.
* Layers of the Diff Transformer have pairs of heads, so 32 heads are taken as 16 pairs. A delta
  rule in this library has as many key heads as query heads; the paper does not say how its DeltaNet
  uses 4 key/value heads.
* Sections 4.3 and 4.4 call their models "at larger scale" and state no number of parameters. Nearly
  half of the weights belong to the embedding of 256,000 tokens. The paper does not say whether the
  MLPs are gated. The model of 4.4 has the same weights as that of 4.3, divided into other heads.
* The variants in Table 5, `lucid[normalize=queries_and_keys]` and `lucid[normalize=rows]`, have the
  same weights as `lucid`.
""",
    ),
    Paper(
        "LASER (arXiv 2411.03493)",
        """\
Section 4.1 describes a model of width 1,024 with 32 layers, 8 heads of width 128 and MLPs of width
2,048. MLPs have two layers (Eq. 1). The paper states neither their activation nor the vocabulary.
Here the activation is GELU and the vocabulary has 32,000 tokens, which gives the stated sizes of
the smaller models. Standard attention (`softmax`) has the same weights. In each layer,
`temperature(laser)` has one more number, and `per_dim_scale(laser)` has one more vector.
""",
        (
            PaperModel("Table 1, 16 layers", laser(16, 1024, 8, 128, 4096), "234M"),
            PaperModel("Figure 2; Table 1, 32 layers", laser(32, 1024, 8, 128, 2048), "301M"),
            PaperModel("Table 1, 32 layers of 4,096", laser(32, 1024, 8, 128, 4096), "435M"),
            PaperModel("Figure 5, width 1,024", laser(32, 1024, 8, 256, 4096), "1.1B"),
            PaperModel("Figure 5, width 2,048", laser(32, 2048, 8, 256, 4096), "1.1B"),
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
* **The 1.1B model of Figure 5 has only half as many parameters if its width is 1,024.** Section 4.1
  makes it from the 2.2B model with smaller MLPs and heads, and does not mention its width. With the
  width of the 2.2B model, 2,048, it has the stated size.
* With gated MLPs, the models of 301M, 2.2B and 7.7B parameters would have {gated_small},
  {gated_middle} and {gated_large}.
* The paper does not state the number of layers of the 7.7B model, which is "scaled along all
  dimensions", and of the 2.2B BERT. Both fit with 32 layers.
* The 8 heads of size 512 in Table 7 are taken as 8 pairs of heads, with keys of width 256 in each
  map and values of width 512.
* The attention of the 2.2B model, with 8 heads of width 512, is twice as wide as the model,
  although Eq. 1 has a square W_O.
* Figure 4 names models of 234M and 435M without a configuration. They agree with other rows of
  Table 1.
* The paper states no sizes for ViT-S/16. By convention, "S/16" means width 384, 12 blocks and 6
  heads. The paper does not say whether there is a class token; our model has one. The variants in
  Table 4 are `temperature(…)`, `per_dim_scale(…)` and `qk_norm[norm=layer](…)` of the mechanism.
* This library has no Conformer (Table 5).
""",
    ),
    Paper(
        "CCQ (arXiv 2606.01294)",
        """\
Keys have width 256, and values are twice as wide (Appendix D). MLPs are gated, and the output
layer shares the weights of an embedding of 32,000 tokens (4.1). `CCQ_SIZES` of
`precondattn.layers.recipes` contains these widths. Tables 1 and 6 state numbers of layers and
widths, but they have no text in the HTML version from which this page was made. The caption of
Table 5 states the width of the 1.3B model, 2,048. Appendix H says that the Gated DeltaNet of 500M
has 21 layers with 6 heads. **The other sizes are our choice**: the width of the 500M model, the
layers of the 1.3B model, and all sizes of GLA except the width.
""",
        (
            PaperModel("CCQ-Gated DeltaNet, 500M", ccq("ccq(gated_delta)", 1024, 6, 21), "500M"),
            PaperModel("CCQ-Gated DeltaNet, 1.3B", ccq("ccq(gated_delta)", 2048, 6, 21), "1.3B"),
            PaperModel("Gated DeltaNet, 1.3B", ccq("gated_delta", 2048, 6, 21), "1.3B"),
            PaperModel("CCQ-GLA, 1.3B", ccq("ccq(gla)", 2048, 4, 24), "1.3B"),
        ),
        """\
* With 21 layers of 6 heads, both sizes fit, and only the width differs. The stated 500M is a round
  number.
* CCQ adds only a vector and a number for each head to the model around it.
* The paper describes two of its baselines, Mamba2 and the Llama-style Transformer, by name only.
""",
    ),
    Paper(
        "Preconditioned attention (arXiv 2603.27153)",
        """\
This paper uses models of other papers and states no sizes: ViT-B and DeiT-B, which have the same
architecture, Swin-B, XCiT-M24 and XCiT-S12 as in timm, Nyströmformer on the Long Range Arena, and
Crammed BERT. Its row norm has no weights.
""",
        (
            PaperModel(
                "Table 1, ViT-B, DeiT-B", vision(768, 12, "row_normalized(softmax[causal=false])")
            ),
        ),
        """\
* `VisionTransformer` has no stages, so it can not represent Swin-B and XCiT as a whole. Their
  attention is `VisionAttention` with `row_normalized(windowed[size=7,shift=3,bias=true])`, and with
  `row_normalized(cross_covariance)`.
* The layer of Nyströmformer is `VisionAttention` with `row_normalized(nystrom)`, or `Attention`
  with this mechanism in a `Decoder`.
""",
    ),
)
