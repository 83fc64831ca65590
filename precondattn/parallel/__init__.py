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

`contiguous`
    Every device computes its own tokens. Keys and values of softmax attention go around a ring
    (`ring_torch.py`), and the states of a recurrence of the linear family or the delta rule are
    scanned along the devices (`states.py`). In PyTorch, for any number of devices.

`zigzag`
    The same for softmax attention, with tokens in an order (`layouts.py`) in which all devices have
    equal work under a causal mask.
"""
