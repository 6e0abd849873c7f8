"""Random numbers without state: number i of a stream is a function of the stream's key and i.

So a request's draws do not depend on its neighbours, on how steps were batched, or on preemption. The generator is
Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Uint64 = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def stream_key(seed: int, choice: int) -> int:
    """The key of one choice's stream: 64 bits of the seed (any integer), stirred with the choice's number."""
    mixed = (seed ^ (choice * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def uniform(keys: Uint64, positions: Uint64) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1): for each key the draw number `positions`, of 53 bits."""
    zero = np.zeros_like(positions)
    first, second, _, _ = philox((positions & _LOW, positions >> _HALF, zero, zero), (keys & _LOW, keys >> _HALF))
    bits = ((first << _HALF) | second) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox(
    counter: tuple[Uint64, Uint64, Uint64, Uint64], key: tuple[Uint64, Uint64]
) -> tuple[Uint64, Uint64, Uint64, Uint64]:
    """Philox4x32-10 over arrays of 32-bit words held in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3
