"""Sequences longer than one device: every device has some of the tokens, of all heads.

`precondattn.parallel.torch` and `precondattn.parallel.jax` each have one function,
`context_parallel`, which makes of a mechanism one for such parts. Between devices each uses its
framework's engine: `torch.distributed`, and shardings of JAX.

A layout says how a call is divided meanwhile (`heads.py`). There is one so far:

`heads`
    Every device computes some of the heads for all tokens: tokens are exchanged for heads before
    the call, and heads for tokens after it. That is exact for any mechanism whose heads do not
    depend on their number. As many devices as there are query heads can take part.
    Source: DeepSpeed Ulysses (arXiv 2309.14509).
"""
