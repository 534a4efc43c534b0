"""lDDT and RMSD against biotite and scipy."""

import biotite.structure as struc
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from megafold.trainer.metrics import lddt, rmsd


def two_structures(n_residue=60, per_residue=5, noise=0.8, seed=0):
    rng = np.random.default_rng(seed)
    centers = np.cumsum(rng.normal(0, 2.2, (n_residue, 3)), axis=0)
    truth = np.repeat(centers, per_residue, axis=0) + rng.normal(0, 1.2, (n_residue * per_residue, 3))
    noisy = truth + rng.normal(0, noise, truth.shape)
    predicted = Rotation.random(rng=rng).apply(noisy) + 7
    return predicted, truth, np.repeat(np.arange(n_residue), per_residue)


def atom_array(coords, residue):
    array = struc.AtomArray(len(coords))
    array.coord = coords.astype(np.float32)
    array.chain_id[:] = "A"
    array.res_id[:] = residue
    array.atom_name[:] = "CA"
    array.element[:] = "C"
    return array


@pytest.mark.parametrize("noise", [0.1, 0.8, 3.0])
def test_lddt_agrees_with_biotite(noise):
    predicted, truth, residue = two_structures(noise=noise)
    expected = struc.lddt(atom_array(truth, residue), atom_array(predicted, residue))
    assert lddt(predicted, truth, residue=residue) == pytest.approx(expected, abs=2e-4)


def test_lddt_counts_every_pair_without_residues():
    predicted, truth, residue = two_structures()
    expected = struc.lddt(
        atom_array(truth, residue), atom_array(predicted, residue), exclude_same_residue=False
    )
    assert lddt(predicted, truth) == pytest.approx(expected, abs=2e-4)


def test_lddt_by_hand():
    truth = np.array([[0, 0, 0], [10, 0, 0], [0, 0, 20]])
    predicted = np.array([[0, 0, 0], [11.5, 0, 0], [0, 0, 90]])
    # One pair is near enough (10 Å): off by 1.5 Å, within 2 and 4 of the four thresholds.
    assert lddt(predicted, truth) == 0.5
    assert lddt(truth, truth) == 1.0


def test_lddt_leaves_out_masked_atoms():
    predicted, truth, residue = two_structures()
    mask = np.arange(len(truth)) % 3 > 0
    hidden = np.where(mask[:, None], predicted, np.nan)
    expected = lddt(predicted[mask], truth[mask], residue=residue[mask])
    assert lddt(hidden, truth, mask, residue) == expected


def test_lddt_without_pairs_is_nan():
    assert np.isnan(lddt([[0.0, 0, 0]], [[0.0, 0, 0]]))
    assert np.isnan(lddt(np.zeros((0, 3)), np.zeros((0, 3))))


def test_lddt_in_blocks_is_the_same():
    predicted, truth, residue = two_structures(n_residue=250, per_residue=5)
    distance = np.linalg.norm(truth[:, None] - truth, axis=-1)
    error = np.abs(np.linalg.norm(predicted[:, None] - predicted, axis=-1) - distance)
    counted = (distance < 15) & (residue[:, None] != residue)
    expected = np.mean([(error[counted] < t).mean() for t in (0.5, 1, 2, 4)])
    assert lddt(predicted, truth, residue=residue) == pytest.approx(expected, abs=1e-12)


def test_rmsd_agrees_with_scipy():
    predicted, truth, _ = two_structures()
    x, y = predicted - predicted.mean(0), truth - truth.mean(0)
    _, distance = Rotation.align_vectors(y, x)
    assert rmsd(predicted, truth) == pytest.approx(distance / np.sqrt(len(x)), rel=1e-9)


def test_rmsd_does_not_reflect():
    _, truth, _ = two_structures()
    mirrored = truth * [1, 1, -1]
    x, y = mirrored - mirrored.mean(0), truth - truth.mean(0)
    _, distance = Rotation.align_vectors(y, x)
    assert rmsd(mirrored, truth) == pytest.approx(distance / np.sqrt(len(x)), rel=1e-9)
    assert rmsd(mirrored, truth) > 1


def test_rmsd_of_nothing_is_nan_and_shapes_are_checked():
    assert np.isnan(rmsd(np.zeros((0, 3)), np.zeros((0, 3))))
    with pytest.raises(ValueError, match="same shape"):
        rmsd(np.zeros((4, 3)), np.zeros((5, 3)))
