"""Sequences longer than one device: every device has some of the tokens, of all heads.

`precondattn.parallel.torch` and `precondattn.parallel.jax` each have one function,
`context_parallel`, which makes of a mechanism one for such parts. Between devices each uses its
framework's engine: `torch.distributed`, and shardings of JAX.

A layout says how a call is divided meanwhile:

`heads`
    Every device computes some of the heads for all tokens: tokens are exchanged for heads before
    the call, and heads for tokens after it (`heads.py`). That is exact for any mechanism whose
    heads do not depend on their number, with as many devices as there are heads at most.
    Source: DeepSpeed Ulysses (arXiv 2309.14509).

`contiguous`, `zigzag`, `cyclic[block=B]`
    Every device computes its own tokens, in an order (`layouts.py`) that says how even the work is.
    A composition is divided leaf by leaf (`torch/tokens.py`, `jax/tokens.py`): keys and values of
    softmax attention and LASER go around a ring, solved blocks of LUCID are given to all, states of
    recurrences are scanned along the devices (`states.py`), and what is computed token by token
    needs nothing. For any number of devices.

    In PyTorch such a call may keep a cache (`torch/cached.py`), which is divided as its tokens are,
    and which new tokens extend. States are whole on every device.
"""
