"""What a half-precision kernel on tensor cores rounds, and the error that this makes.

=================  ===============================================================================
`attention`        softmax attention and LASER, as in flash attention
`lucid`            LUCID's solve
`delta_rule`       delta and gated delta, as in flash-linear-attention
`model`            the error of a call that rounds so, from which bounds are derived
=================  ===============================================================================
"""
