"""Sequences longer than one device: every device has some of the tokens, for all heads.

`precondattn.parallel.torch` and `precondattn.parallel.jax` each have one function,
`context_parallel`. It turns a mechanism into one that is called with such parts. The devices
communicate by `torch.distributed` in PyTorch, and by `shard_map` in JAX.

A layout says how the devices divide the work of a call:

`heads`
    Every device computes some of the heads for all tokens. An all-to-all exchanges tokens for
    heads before the call, and another one heads for tokens after it (`heads.py`). This is exact
    for any mechanism whose heads are independent. There can be no more devices than heads.
    Source: DeepSpeed Ulysses (arXiv 2309.14509).

`contiguous`, `zigzag`, `cyclic[block=B]`
    Every device computes the output of its own tokens. The order of the tokens (`layouts.py`)
    determines how evenly the work is divided. A composition is divided leaf by leaf
    (`ways.py`): keys and values of softmax attention and LASER go around a
    ring, solved blocks of LUCID are broadcast, states of recurrences are computed by a prefix scan
    along the devices (`states.py`), and functions of each token alone send nothing. Any number of
    devices is possible.

    In PyTorch such a call may fill a cache (`torch/cached.py`). Each process keeps the rows of its
    tokens, and new tokens extend the cache. States are whole on every process.
"""
