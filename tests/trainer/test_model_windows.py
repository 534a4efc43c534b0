"""Sequence-local windows against algorithm 7's own definition."""

import numpy as np
import pytest
import torch

from megafold.trainer.model.windows import AtomWindows


def visible(n_atom: int, n_queries: int, n_keys: int) -> np.ndarray:
    """Algorithm 7, line 2: l sees m when both lie within some subset's query and key distance."""
    seen = np.zeros((n_atom, n_atom), bool)
    for w in range(-(-n_atom // n_queries)):
        centre = (n_queries - 1) / 2 + w * n_queries
        atoms = np.arange(n_atom)
        seen |= (np.abs(atoms - centre) < n_queries / 2)[:, None] & (np.abs(atoms - centre) < n_keys / 2)
    return seen


@pytest.mark.parametrize("n_atom", [1, 7, 32, 33, 64, 150])
def test_windows_hold_the_supplements_pairs(n_atom):
    windows = AtomWindows(n_atom=n_atom, n_queries=32, n_keys=128)
    index = torch.arange(1, n_atom + 1)[:, None]
    queries, keys = windows.queries(index)[..., 0].numpy(), windows.keys(index)[..., 0].numpy()
    assert queries.shape == (windows.n_window, 32)
    assert keys.shape == (windows.n_window, 128)
    seen = np.zeros((n_atom + 1, n_atom + 1), bool)
    for q, k in zip(queries, keys, strict=True):
        seen[np.ix_(q, k)] = True
    np.testing.assert_array_equal(seen[1:, 1:], visible(n_atom, 32, 128))


def test_atoms_undoes_queries():
    windows = AtomWindows(n_atom=19, n_queries=8, n_keys=16)
    x = torch.randn(2, 3, 19, 4)
    assert torch.equal(windows.atoms(windows.queries(x)), x)


def test_places_outside_are_false_in_masks():
    windows = AtomWindows(n_atom=5, n_queries=4, n_keys=8)
    keys = windows.keys(torch.ones(5, 1, dtype=torch.bool))[..., 0]
    assert keys.dtype == torch.bool
    assert keys.int().tolist() == [[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
