"""Where the tokens of a sequence are: their order on the devices, and back.

With a causal mask, later tokens have more keys. In the layout `zigzag` a sequence is cut into 2 P
parts, of which device r has two: part r and part 2 P − 1 − r. So all devices have equally many
pairs of queries and keys. With consecutive tokens, the last device has almost twice the mean.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace


def parts_of(device: int, devices: int) -> tuple[int, int]:
    """The two parts of a device, of 2 P."""
    return device, 2 * devices - 1 - device


def to_zigzag(x: Array, devices: int, axis: int = 1) -> Array:
    """The tokens in the order of the devices, each of which has a P-th of the result.

    Parameters
    ----------
    x : array
        With a multiple of 2 P tokens along `axis`.
    devices : int
        P.
    axis : int
        That of the tokens.

    Raises
    ------
    ValueError
        for another number of tokens.

    Examples
    --------
    >>> import numpy as np
    >>> to_zigzag(np.arange(8), 2, axis=0)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    return _reordered(x, _order(devices), axis)


def from_zigzag(x: Array, devices: int, axis: int = 1) -> Array:
    """The tokens in their own order: the inverse of `to_zigzag`.

    Examples
    --------
    >>> import numpy as np
    >>> from_zigzag(np.asarray([0, 1, 6, 7, 2, 3, 4, 5]), 2, axis=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """
    order = _order(devices)
    return _reordered(x, [order.index(part) for part in range(2 * devices)], axis)


def _order(devices: int) -> list[int]:
    """The parts of all devices, one device after another."""
    return [part for device in range(devices) for part in parts_of(device, devices)]


def _reordered(x: Array, order: list[int], axis: int) -> Array:
    """The parts of x in another order."""
    tokens, count = x.shape[axis], len(order)
    if tokens % count:
        raise ValueError(
            f"zigzag: the number of tokens must be a multiple of {count}, twice the number of "
            f"devices; found {tokens}"
        )
    size, before = tokens // count, (slice(None),) * (axis % x.ndim)
    parts = [x[(*before, slice(i * size, (i + 1) * size), ...)] for i in order]
    return namespace(x).concat(parts, axis=axis)
