"""Counter-based randomness: the draw at a position depends on the seed and the position, and on nothing else.

So a seeded request gives the same text with every arm, policy, batch and cache state: however many passes it took
to get to a position, the target's choice there sees the same number.
"""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def fresh_seed() -> int:
    """A seed from the operating system, for a request that names none."""
    return secrets.randbits(64)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 (Steele, Lea, Flood 2014), keyed and counted."""
    bits = _mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK)
    return (bits >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
