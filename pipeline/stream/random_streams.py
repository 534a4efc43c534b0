"""Random numbers that depend on (seed, epoch, index, attempt, purpose) alone.

Philox is counter-based: a key and a counter name a stream, and no state has to be carried. The purpose is
in the key; the epoch, the index and the attempt are the counter's upper words, the lowest counts the numbers
drawn. So what one purpose draws never shifts what another does, and new purposes change nothing that exists.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class RandomStreams:
    """The random streams of one sample.

    ``seed`` and ``epoch`` may be any non-negative integers below 2^64. ``attempt`` counts the samples in
    whose place this one comes (``failures.py``).
    """

    seed: int
    epoch: int
    index: int
    attempt: int = 0

    def __call__(self, purpose: str) -> np.random.Generator:
        """A generator at the start of the stream of ``purpose``."""
        key = np.array([self.seed & _WORD, _salt(purpose)], np.uint64)
        counter = np.array([0, self.attempt, self.index & _WORD, self.epoch & _WORD], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


@lru_cache(maxsize=256)
def _salt(purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")


def random_rotations(rng: np.random.Generator, count: int) -> np.ndarray:
    """Rotation matrices [count, 3, 3], float32, uniform on SO(3).

    A normalised 4-vector of normal numbers is a uniform unit quaternion.
    """
    quaternion = rng.standard_normal((count, 4))
    quaternion /= np.linalg.norm(quaternion, axis=1, keepdims=True)
    w, x, y, z = quaternion.T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.array(rows, np.float64).transpose(2, 0, 1).astype(np.float32)
