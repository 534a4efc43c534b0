"""Exchange of equal chains and equivalent atoms, against the best of all permutations, tried one by one."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from megafold.trainer.losses import mse_loss
from megafold.trainer.losses.permutation import nearest_truth, with_nearest_truth
from tests.trainer.batches import random_batch


def superposed_error(x: Any, truth: Any, mask: Any, weights: Any) -> float:
    """Weighted mean squared error after the best superposition, by scipy."""
    w = weights[mask]
    a, b = truth[mask], x[mask]
    a, b = a - np.average(a, axis=0, weights=w), b - np.average(b, axis=0, weights=w)
    rotation, _ = Rotation.align_vectors(b, a, weights=w)
    return float(np.average(((rotation.apply(a) - b) ** 2).sum(1), weights=w))


class Complex:
    """Copies of two entities, of which a crop has some; and atoms that cannot be exchanged.

    Copies of an entity have the same shape in different places, bent a little. ``taken``: for each chain of
    the crop its entity and which copy it is.
    """

    def __init__(self, seed, copies, lengths, taken, n_fixed=0, unresolved=0.0):
        rng = np.random.default_rng(seed)
        self.rng, self.taken, self.n_fixed = rng, taken, n_fixed
        self.places, self.masks = [], []
        for number, length in zip(copies, lengths, strict=True):
            shape = 3 * rng.standard_normal((length, 3))
            spread = 12 * rng.standard_normal((number, 1, 3))
            turned = np.stack([Rotation.random(random_state=rng).apply(shape) for _ in range(number)])
            self.places.append(turned + spread + 0.2 * rng.standard_normal(turned.shape))
            self.masks.append(rng.random((number, length)) >= unresolved)
        self.fixed = 10 * rng.standard_normal((n_fixed, 3))
        self.starts = n_fixed + np.cumsum([0, *(lengths[entity] for entity, _ in taken)])
        self.weights = rng.choice([1.0, 6.0, 11.0], self.starts[-1])
        self.own = tuple(copy for _, copy in taken)

    def truth(self, assignment):
        """coords and mask with copy ``assignment[c]`` in the place of chain ``c``."""
        parts, masks = [self.fixed], [np.ones(self.n_fixed, bool)]
        for (entity, _), copy in zip(self.taken, assignment, strict=True):
            parts.append(self.places[entity][copy])
            masks.append(self.masks[entity][copy])
        mask = np.concatenate(masks)
        return np.where(mask[:, None], np.concatenate(parts), 0.0), mask

    def predicted(self, assignment, noise):
        coords = np.concatenate(
            [self.fixed, *(self.places[e][c] for (e, _), c in zip(self.taken, assignment, strict=True))]
        )
        moved = Rotation.random(random_state=self.rng).apply(coords) + 50
        return moved + noise * self.rng.standard_normal(moved.shape)

    def assignments(self):
        """All that put no copy in two places."""
        numbers = [range(len(self.places[entity])) for entity, _ in self.taken]
        for assignment in itertools.product(*numbers):
            pairs = [(entity, copy) for (entity, _), copy in zip(self.taken, assignment, strict=True)]
            if len(set(pairs)) == len(pairs):
                yield assignment

    def error(self, x, assignment):
        truth, mask = self.truth(assignment)
        return superposed_error(x, truth, mask, self.weights)

    def exchanges(self):
        chains = [
            {
                "atoms": torch.arange(self.starts[place], self.starts[place + 1]),
                "candidates": torch.arange(len(self.places[entity]))[:, None] + 100 * entity,
                "own": torch.tensor(copy),
                "coords": torch.from_numpy(np.where(self.masks[entity][..., None], self.places[entity], 0)),
                "coords_mask": torch.from_numpy(self.masks[entity]),
            }
            for place, (entity, copy) in enumerate(self.taken)
        ]
        return {"orders": [], "chains": chains}

    def nearest(self, x):
        coords, mask = map(torch.from_numpy, self.truth(self.own))
        found = nearest_truth(
            torch.from_numpy(x), coords, mask, torch.from_numpy(self.weights), self.exchanges()
        )
        return [value.numpy() for value in found]


#: Copies of the two entities, their numbers of atoms, the crop's chains, atoms that cannot be exchanged.
COMPLEXES = {
    "a dimer": ((2,), (9,), ((0, 0), (0, 1)), 0),
    "a trimer beside a single chain": ((3,), (8,), ((0, 0), (0, 1), (0, 2)), 12),
    "two of four copies": ((4,), (10,), ((0, 1), (0, 3)), 0),
    "two entities": ((2, 3), (11, 6), ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)), 0),
    "ions beside a dimer": ((2, 3), (10, 1), ((0, 0), (0, 1), (1, 0), (1, 2)), 0),
    "ions beside a single chain": ((4,), (1,), ((0, 0), (0, 1), (0, 2), (0, 3)), 15),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", COMPLEXES)
def test_chains_are_assigned_as_the_best_of_all_permutations_says(kind, seed):
    case = Complex(seed, *COMPLEXES[kind])
    every = list(case.assignments())
    for aim in every[:: max(1, len(every) // 4)]:
        x = case.predicted(aim, noise=0.5)
        best = min(every, key=lambda assignment: case.error(x, assignment))
        coords, mask = case.nearest(x)
        expected, expected_mask = case.truth(best)
        np.testing.assert_allclose(coords, expected)
        np.testing.assert_array_equal(mask, expected_mask)


def test_unresolved_atoms_of_a_copy_are_unresolved_in_its_new_place():
    case = Complex(7, (3,), (12,), ((0, 0), (0, 1), (0, 2)), unresolved=0.3)
    case.masks[0][1, 2:] = False  # a copy of which two atoms are left: no anchor
    for aim in case.assignments():
        coords, mask = case.nearest(case.predicted(aim, noise=0.2))
        expected, expected_mask = case.truth(aim)
        np.testing.assert_array_equal(mask, expected_mask)
        np.testing.assert_allclose(coords, expected)


@pytest.mark.parametrize("seed", range(8))
def test_no_prediction_is_further_from_the_new_truth_than_from_the_old(seed):
    case = Complex(seed, (3, 2), (7, 5), ((0, 0), (0, 1), (1, 0)), n_fixed=4, unresolved=0.2)
    x = 10 * case.rng.standard_normal((case.starts[-1], 3))
    coords, mask = case.nearest(x)
    error = superposed_error(x, coords, mask, case.weights)
    assert error <= case.error(x, case.own) + 1e-9
    assert error >= min(case.error(x, assignment) for assignment in case.assignments()) - 1e-9


def held_ligands(whole, lone_chain=True):
    """A dimer and its two ligands; what a loader says where the bond of the first ligand is in the crop.

    With ``lone_chain`` the second chain and its ligand are single, else the second chain is not in the crop.
    """
    lengths = {0: 9, 1: 9, 10: 3, 11: 3}
    starts = dict(zip(lengths, np.cumsum([0, 9, 9, 3]).tolist(), strict=True))
    if not lone_chain:
        lengths.pop(1)
        starts = {0: 0, 10: 9, 11: 12}
    copies = {0: (0, 1), 1: (0, 1), 10: (10, 11), 11: (10, 11)}

    def exchange(*ids):
        candidates = list(zip(*(copies[name] for name in ids), strict=True))
        atoms = [torch.arange(starts[name], starts[name] + lengths[name]) for name in ids]
        coords = np.stack([np.concatenate([whole[name] for name in row]) for row in candidates])
        return {
            "atoms": torch.cat(atoms),
            "candidates": torch.tensor(candidates),
            "own": torch.tensor(candidates.index(ids)),
            "coords": torch.from_numpy(coords),
            "coords_mask": torch.ones(coords.shape[:2], dtype=torch.bool),
        }

    lone = [exchange(name) for name in lengths if name not in (0, 10)]
    truth = np.concatenate([whole[name] for name in lengths])
    return truth, {"orders": [], "chains": [exchange(0, 10), *lone]}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("swap", [False, True])
def test_bonded_chains_leave_each_chain_to_one(seed, swap):
    """Who takes the second chain and its ligand leaves its own to those two, and to nobody else."""
    rng = np.random.default_rng(seed)
    shape = {9: 3 * rng.standard_normal((9, 3)), 3: rng.standard_normal((3, 3))}
    whole = {name: shape[9] + 15 * rng.standard_normal(3) for name in (0, 1)}
    whole |= {10 + name: shape[3] + whole[name].mean(0) + 4 for name in (0, 1)}
    truth, exchanges = held_ligands(whole)
    order = (1, 0, 11, 10) if swap else (0, 1, 10, 11)
    aim = np.concatenate([whole[name] for name in order])
    x = Rotation.random(random_state=rng).apply(aim) + 0.3 * rng.standard_normal(aim.shape) + 7
    ones = torch.ones(len(x))
    coords, _ = nearest_truth(torch.from_numpy(x), torch.from_numpy(truth), ones.bool(), ones, exchanges)
    np.testing.assert_allclose(coords.numpy(), aim)


@pytest.mark.parametrize("seed", range(6))
def test_a_single_ligand_beside_a_bonded_one(seed):
    """Where the ligand is nearest to the bonded one's place, nothing may be left for the bonded chains."""
    rng = np.random.default_rng(seed)
    whole = {name: 3 * rng.standard_normal((9, 3)) + 20 * rng.standard_normal(3) for name in (0, 1)}
    whole |= {10 + name: rng.standard_normal((3, 3)) + whole[name][0] for name in (0, 1)}
    truth, exchanges = held_ligands(whole, lone_chain=False)
    other = np.concatenate([whole[1], whole[11], whole[10]])
    ones = np.ones(len(truth))
    for chain, *ligands in itertools.product((0, 1), (10, 11), (10, 11)):
        x = np.concatenate([whole[chain], *(whole[ligand] for ligand in ligands)])
        x += 0.3 * rng.standard_normal(x.shape)
        coords, mask = nearest_truth(
            torch.from_numpy(x),
            torch.from_numpy(truth),
            torch.ones(15) > 0,
            torch.from_numpy(ones),
            exchanges,
        )
        assert any(np.array_equal(coords.numpy(), allowed) for allowed in (truth, other))
        errors = [superposed_error(x, found, ones > 0, ones) for found in (coords.numpy(), truth)]
        assert errors[0] <= errors[1] + 1e-9
        assert mask.all()


def test_copies_that_are_equally_near_stay():
    case = Complex(1, (2,), (6,), ((0, 0), (0, 1)))
    case.weights[:] = 1
    coords, mask = case.nearest(np.zeros((12, 3)))
    np.testing.assert_array_equal(coords, case.truth(case.own)[0])
    assert mask.all()


#: A ring that can be turned round, three equal oxygens, and atoms without any exchange (0 to 4, 12, 13).
ORDERS = [
    np.array([[[5, 6, 7, 8], [7, 6, 5, 8]]]),
    np.array([[(9, *order) for order in itertools.permutations((10, 11, 14))]])[:, :, 1:],
    np.array([[[15, 16], [16, 15]], [[17, 18], [18, 17]]]),
]


@pytest.mark.parametrize("seed", range(6))
def test_atoms_take_the_best_of_all_orders(seed):
    rng = np.random.default_rng(seed)
    truth, mask = 5 * rng.standard_normal((19, 3)), rng.random(19) > 0.15
    residues = [residue for group in ORDERS for residue in group]
    wanted = np.arange(19)
    for residue in residues:
        wanted[residue[0]] = residue[rng.integers(len(residue))]
    x = Rotation.random(random_state=rng).apply(truth[wanted]) + 0.3 * rng.standard_normal((19, 3)) - 20
    truth = np.where(mask[:, None], truth, 0.0)
    weights = np.ones(19)

    def permuted(choice):
        order = np.arange(19)
        for residue, row in zip(residues, choice, strict=True):
            order[residue[0]] = residue[row]
        return truth[order], mask[order]

    def error_of(choice):
        permuted_truth, permuted_mask = permuted(choice)
        return superposed_error(x, permuted_truth, permuted_mask, weights)

    choices = itertools.product(*(range(len(residue)) for residue in residues))
    best = min(choices, key=error_of)
    exchanges = {"chains": [], "orders": [torch.from_numpy(group) for group in ORDERS]}
    found = nearest_truth(
        torch.from_numpy(x), torch.from_numpy(truth), torch.from_numpy(mask), torch.ones(19), exchanges
    )
    for value, expected in zip(found, permuted(best), strict=True):
        np.testing.assert_allclose(value.numpy(), expected)


def test_a_batch_keeps_what_has_no_exchange_and_what_is_not_finite():
    batch = random_batch(3, batch_size=3, unresolved=0.0)
    order = torch.tensor([[[0, 1], [1, 0]]])
    swapped = batch["coords"].clone()
    swapped[:, [0, 1]] = batch["coords"][:, [1, 0]]
    predicted = swapped.clone()
    predicted[2] = torch.nan
    exchanges: list[dict[str, Any]] = [
        {"orders": [order], "chains": []},
        {"orders": [], "chains": []},
        {"orders": [order], "chains": []},
    ]
    found = with_nearest_truth(batch, predicted, exchanges)
    assert torch.equal(found["coords"], torch.stack([swapped[0], batch["coords"][1], batch["coords"][2]]))
    assert torch.equal(found["coords_mask"], batch["coords_mask"])
    assert all(found[name] is batch[name] for name in batch.keys() - {"coords", "coords_mask"})


def test_the_loss_of_a_prediction_with_its_chains_exchanged_is_that_of_the_others():
    case = Complex(2, (2,), (9,), ((0, 0), (0, 1)))
    x = case.predicted((1, 0), noise=0.1)
    weights, mask = torch.ones(1, 18), torch.ones(1, 18, dtype=torch.bool)
    before, after = (
        float(mse_loss(torch.from_numpy(x)[None, None], torch.from_numpy(truth)[None, None], weights, mask))
        for truth in (case.truth((0, 1))[0], case.nearest(x)[0])
    )
    assert after < 0.05 < 1 < before
