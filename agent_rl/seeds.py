"""Every random choice of a run is a pure function of its seed and its place, so that nothing needs replaying."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache


def derive_seed(*parts: int | str) -> int:
    """A number in [0, 2**63) that depends on every part and their order."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def shuffled_index(cursor: int, size: int, seed: int) -> int:
    """The row to take at this place of an endless pass over ``size`` rows, reshuffled every epoch."""
    epoch, place = divmod(cursor, size)
    return _epoch_order(epoch, size, seed)[place]


@lru_cache(maxsize=2)
def _epoch_order(epoch: int, size: int, seed: int) -> list[int]:
    order = list(range(size))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order
