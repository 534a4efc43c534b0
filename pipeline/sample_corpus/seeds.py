"""Random numbers by name: every part of the corpus has its own generator, so none depends on another."""

import hashlib

import numpy as np
from numpy.random import Generator


def generator(seed: int, *names: str | int) -> Generator:
    """The generator of the part that ``names`` names, such as ``generator(0, "entry", 17)``."""
    text = "/".join([str(seed), *map(str, names)])
    words = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype="<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(word) for word in words])))
