"""What a half-precision kernel on tensor cores rounds, and the error that this makes.

=================  ===============================================================================
`attention`        softmax attention and LASER, as in flash attention
`lucid`            LUCID's solve
`model`            the error of a call that rounds so, from which bounds are derived
=================  ===============================================================================
"""
