"""Models of the rounding in half-precision tensor-core kernels, and of the resulting errors.

=================  ===============================================================================
`attention`        softmax attention and LASER, as in flash attention
`lucid`            LUCID's solve
`delta_rule`       delta and gated delta, as in flash-linear-attention
`model`            the error of a call with this rounding, from which bounds are derived
=================  ===============================================================================
"""
