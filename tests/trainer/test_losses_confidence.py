"""Targets and losses of the confidence head against biotite and loops written from the supplement."""

from dataclasses import replace

import biotite.structure as struc
import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from megafold.trainer.batches import resolutions
from megafold.trainer.config import TrainConfig
from megafold.trainer.losses import LossWeights, resolved_atoms, training_loss
from megafold.trainer.losses.confidence import (
    aligned_error,
    atom_lddt,
    bins,
    confidence_losses,
    distance_error,
)
from megafold.trainer.losses.total import LossShare
from megafold.trainer.model.outputs import ConfidenceLogits
from tests.trainer.batches import pad_batch, random_batch
from tests.trainer.networks import as_dtype
from tests.trainer.test_losses import fake_outputs


def batch_of(seed=0, n_token=11, samples=2):
    """Two samples with two residues of RNA, one of DNA, a modified residue as atoms, and a ligand."""
    batch = as_dtype(random_batch(seed, n_token, n_ligand=4, batch_size=samples, unresolved=0.15))
    batch["coords"] = batch["coords"] * 0.9
    for token, kind in ((0, "is_rna"), (1, "is_rna"), (2, "is_dna")):
        batch["is_protein"][:, token] = False
        batch[kind][:, token] = True
    batch["is_ligand"][:, -2:] = False  # a modified amino acid
    batch["is_protein"][:, -2:] = True
    start = batch["token_atom_start"][0, -2]
    batch["frame_mask"][:, -2] = True
    batch["frame_atoms"][:, -2] = torch.stack([start - 1, start, start + 1]).to(torch.int32)
    return batch


def structure_near(batch, seed=1, spread=1.2):
    rng = np.random.default_rng(seed)
    coords = batch["coords"].numpy()
    moved = Rotation.random(rng=rng).apply((coords + spread * rng.normal(size=coords.shape)).reshape(-1, 3))
    return torch.tensor(moved.reshape(coords.shape) + 5.0)


def logits_of(batch, coords, seed=2, rows=slice(None), sizes=(50, 64, 64)):
    generator = torch.Generator().manual_seed(seed)
    n_sample, n_token = batch["token_mask"].shape
    n_atom = batch["atom_mask"].shape[1]

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=coords.dtype)

    plddt, pae, pde = sizes
    found = {
        "plddt": draw(n_sample, n_atom, plddt),
        "resolved": draw(n_sample, n_atom, 2),
        "pae": draw(n_sample, n_token, n_token, pae)[:, rows],
        "pde": draw(n_sample, n_token, n_token, pde)[:, rows],
    }
    return ConfidenceLogits(**{name: x.requires_grad_() for name, x in found.items()}, coords=coords)


# ----------------------------------------------------------------------------------------------------------
# lDDT


def test_lddt_agrees_with_biotite():
    """A protein alone: every atom against all Cα within 15 Å."""
    batch = as_dtype(random_batch(3, 14, n_ligand=0, unresolved=0.2))
    x = structure_near(batch)
    kept = resolved_atoms(batch)[0].numpy()
    truth, predicted = (struc.AtomArray(int(kept.sum())) for _ in range(2))
    for array, coords in ((truth, batch["coords"]), (predicted, x)):
        array.coord = coords[0].numpy()[kept].astype(np.float32)
        array.element[:] = "C"
    is_center = np.zeros(len(kept), bool)
    is_center[batch["center_atom"][0].numpy()] = True
    expected = struc.lddt(
        truth,
        predicted,
        aggregation="atom",
        partner_mask=is_center[kept],
        exclude_same_residue=False,
    )
    share, has_value = atom_lddt(x, batch)
    found = torch.where(has_value, share, torch.nan)[0].numpy()[kept]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert 0.1 < np.nanmean(found) < 0.9
    assert not has_value[0].numpy()[~kept].any()


def loops_lddt(batch, x, sample):
    """Shares by atom; NaN for atoms without a value."""
    get = {name: value[sample].numpy() for name, value in batch.items()}
    resolved = get["coords_mask"] & get["atom_mask"]
    x = x[sample].numpy()
    found = np.full(len(x), np.nan)
    for atom in np.flatnonzero(resolved):
        scores = []
        for token in range(len(get["token_mask"])):
            m = get["center_atom"][token]
            whole = get["token_atom_count"][token] > 1
            if m == atom or not whole or not resolved[m] or get["is_ligand"][token]:
                continue
            true = np.linalg.norm(get["coords"][atom] - get["coords"][m])
            if true >= (15 if get["is_protein"][token] else 30):
                continue
            error = abs(np.linalg.norm(x[atom] - x[m]) - true)
            scores.append(np.mean([error < limit for limit in (0.5, 1, 2, 4)]))
        if scores:
            found[atom] = np.mean(scores)
    return found


@pytest.mark.parametrize("atoms_at_once", [7, 4096])
def test_lddt_of_nucleotides_modified_residues_and_ligands(atoms_at_once):
    batch = batch_of()
    x = structure_near(batch)
    share, has_value = atom_lddt(x, batch, atoms_at_once)
    found = torch.where(has_value, share, torch.nan).numpy()
    for sample in range(2):
        np.testing.assert_allclose(found[sample], loops_lddt(batch, x, sample), atol=1e-12)
    far = {**batch, "coords": batch["coords"] * 1.6}
    share, has_value = atom_lddt(x, far, atoms_at_once)
    np.testing.assert_allclose(
        torch.where(has_value, share, torch.nan)[1].numpy(), loops_lddt(far, x, 1), atol=1e-12
    )


def test_a_perfect_structure_has_all_distances():
    batch = batch_of()
    share, has_value = atom_lddt(batch["coords"], batch)
    assert has_value.any()
    assert (share[has_value] == 1).all()
    assert (bins(share, 1.0, 50)[has_value] == 49).all()


# ----------------------------------------------------------------------------------------------------------
# PAE and PDE


def frame(a, b, c):
    """Rows: the axes of algorithm 29."""
    first, second = (a - b) / np.linalg.norm(a - b), (c - b) / np.linalg.norm(c - b)
    middle, across = first + second, second - first
    middle, across = middle / np.linalg.norm(middle), across / np.linalg.norm(across)
    return np.stack([middle, across, np.cross(middle, across)])


def test_aligned_errors_are_those_after_superposing_frames():
    batch = batch_of()
    x = structure_near(batch)
    error, has_frame, has_center = aligned_error(x, batch)
    resolved = resolved_atoms(batch).numpy()
    checked = 0
    for sample in range(2):
        truth, own = batch["coords"][sample].numpy(), x[sample].numpy()
        center = batch["center_atom"][sample].numpy()
        np.testing.assert_array_equal(has_center[sample].numpy(), resolved[sample][center])
        for i, atoms in enumerate(batch["frame_atoms"][sample].numpy()):
            usable = bool(batch["frame_mask"][sample, i]) and resolved[sample][atoms].all()
            assert bool(has_frame[sample, i]) == usable
            if not usable:
                continue
            # The structure as a whole, moved so that its frame lies on the true one.
            rotation = frame(*truth[atoms]).T @ frame(*own[atoms])
            moved = (own - own[atoms[1]]) @ rotation.T + truth[atoms[1]]
            expected = np.linalg.norm(moved - truth, axis=-1)[center]
            there = resolved[sample][center]
            np.testing.assert_allclose(error[sample, i].numpy()[there], expected[there], atol=2e-4)
            checked += there.sum()
    assert checked > 40


def test_errors_do_not_change_when_the_structure_moves():
    batch = batch_of()
    x = structure_near(batch)
    turn = torch.tensor(Rotation.from_rotvec([0.3, -1.0, 2.0]).as_matrix())
    moved = x @ turn.T + 30
    for function in (aligned_error, distance_error, atom_lddt):
        # Mirrored, a structure keeps its distances and not its frames.
        mirrored = (
            (function(x * torch.tensor([1.0, 1.0, -1.0]), batch)[0] - function(x, batch)[0]).abs().max()
        )
        assert (mirrored > 0.1) == (function is aligned_error)
        own, masks = function(x, batch)[0], function(x, batch)[1:]
        value = function(moved, batch)[0]
        mask = masks[0].unsqueeze(-1) & masks[-1].unsqueeze(-2) if function is not atom_lddt else masks[0]
        torch.testing.assert_close(value[mask], own[mask])


def test_a_frame_with_coinciding_atoms_is_a_number():
    batch = batch_of()
    x = structure_near(batch)
    x[0, batch["frame_atoms"][0, 3].long()] = 1.0
    assert aligned_error(x, batch)[0].isfinite().all()


def test_an_exchange_that_hides_a_frames_atom_hides_the_frame():
    batch = batch_of()
    shown = aligned_error(batch["coords"], batch)[1][0]
    token = int(shown.nonzero()[0])
    batch["coords_mask"][0, batch["frame_atoms"][0, token, 2]] = False
    assert not aligned_error(batch["coords"], batch)[1][0, token]


def test_errors_of_distances():
    batch = batch_of()
    x = structure_near(batch)
    error, mask = distance_error(x, batch)
    resolved = resolved_atoms(batch)
    for sample in range(2):
        atoms = batch["rep_atom"][sample].long()
        expected = torch.cdist(x[sample, atoms], x[sample, atoms]) - torch.cdist(
            batch["coords"][sample, atoms], batch["coords"][sample, atoms]
        )
        torch.testing.assert_close(mask[sample], resolved[sample, atoms])
        there = mask[sample, :, None] & mask[sample]
        torch.testing.assert_close(error[sample][there], expected.abs()[there])


def test_bins_have_half_an_angstrom_and_the_last_has_what_is_beyond():
    values = torch.tensor([0.0, 0.49, 0.5, 0.99, 31.49, 31.5, 32.0, 900.0, torch.inf, torch.nan])
    assert bins(values, 32.0, 64).tolist() == [0, 0, 1, 1, 62, 63, 63, 63, 63, 63]
    assert bins(torch.tensor([0.0, 0.019, 0.021, 0.99, 1.0]), 1.0, 50).tolist() == [0, 0, 1, 49, 49]


# ----------------------------------------------------------------------------------------------------------
# Losses


def mean_entropy(logits, target, mask):
    """In loops over what the mask has."""
    logits = logits.detach().numpy()
    found = []
    for place in zip(*np.nonzero(np.asarray(mask)), strict=True):
        shifted = logits[place] - logits[place].max()
        found.append(np.log(np.exp(shifted).sum()) - shifted[int(target[place])])
    return np.mean(found)


def test_losses_are_mean_cross_entropies():
    batch = batch_of()
    x = structure_near(batch)
    logits = logits_of(batch, x, sizes=(50, 64, 32))
    losses = confidence_losses(batch, logits, with_pae=True)
    assert list(losses) == ["plddt", "resolved", "pde", "pae"]
    error, has_frame, has_center = aligned_error(x, batch)
    off, mask = distance_error(x, batch)
    for sample in range(2):
        lddt = loops_lddt(batch, x, sample)
        target = np.minimum(np.nan_to_num(lddt) * 50, 49).astype(int)
        expected = {
            "plddt": mean_entropy(logits.plddt[sample], target, ~np.isnan(lddt)),
            "resolved": mean_entropy(
                logits.resolved[sample], batch["coords_mask"][sample].int(), batch["atom_mask"][sample]
            ),
            "pde": mean_entropy(
                logits.pde[sample],
                np.minimum(off[sample].numpy(), 31.9).astype(int),
                mask[sample, :, None] & mask[sample],
            ),
            "pae": mean_entropy(
                logits.pae[sample],
                np.minimum(2 * error[sample].numpy(), 63).astype(int),
                has_frame[sample, :, None] & has_center[sample],
            ),
        }
        for name, value in expected.items():
            assert losses[name].per_sample[sample].item() == pytest.approx(value, abs=1e-10), name
            assert bool(losses[name].present[sample])


def test_losses_in_float32_are_near_and_autocast_changes_nothing():
    batch = batch_of()
    x = structure_near(batch)
    wide = confidence_losses(batch, logits_of(batch, x), with_pae=True)
    batch, x = as_dtype(batch, torch.float32), x.float()
    logits = logits_of(as_dtype(batch), x.double())
    narrow = ConfidenceLogits(
        **{name: getattr(logits, name).float() for name in ("plddt", "resolved", "pae", "pde")}, coords=x
    )
    plain = confidence_losses(batch, narrow, with_pae=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast = confidence_losses(batch, narrow, with_pae=True)
    for name, term in plain.items():
        torch.testing.assert_close(term.per_sample.double(), wide[name].per_sample, rtol=1e-3, atol=1e-3)
        assert torch.equal(cast[name].per_sample, term.per_sample)


def gradients(losses, logits):
    total = sum(term.mean for term in losses.values())
    leaves = [logits.plddt, logits.resolved, logits.pae, logits.pde]
    return torch.autograd.grad(total, leaves)


def test_what_is_masked_changes_neither_loss_nor_gradient():
    batch = batch_of()
    x = structure_near(batch)
    logits = logits_of(batch, x)
    losses = confidence_losses(batch, logits, with_pae=True)
    expected = gradients(losses, logits)
    n_token, n_atom = batch["token_mask"].shape[1], batch["atom_mask"].shape[1]
    padded = pad_batch(batch, n_token=3, n_atom=6)
    wide = logits_of(padded, torch.full((2, n_atom + 6, 3), torch.nan, dtype=torch.float64))
    with torch.no_grad():
        wide.coords[:, :n_atom] = torch.where(resolved_atoms(batch).unsqueeze(-1), x, torch.nan)
        wide.plddt[:, :n_atom], wide.resolved[:, :n_atom] = logits.plddt, logits.resolved
        wide.plddt[:, n_atom:] = wide.resolved[:, n_atom:] = torch.nan
        wide.pae[:, :n_token, :n_token], wide.pde[:, :n_token, :n_token] = logits.pae, logits.pde
    padded["coords"] = torch.where(resolved_atoms(padded).unsqueeze(-1), padded["coords"], torch.nan)
    found = confidence_losses(padded, wide, with_pae=True)
    for name, term in losses.items():
        torch.testing.assert_close(found[name].per_sample, term.per_sample)
    plddt, resolved, pae, pde = gradients(found, wide)
    cut = (plddt[:, :n_atom], resolved[:, :n_atom], pae[:, :n_token, :n_token], pde[:, :n_token, :n_token])
    for own, other in zip(cut, expected, strict=True):
        torch.testing.assert_close(own, other)
    for gradient, kept in ((plddt, n_atom), (resolved, n_atom), (pae, n_token), (pde, n_token)):
        assert (gradient[:, kept:] == 0).all()
        assert kept == n_atom or (gradient[:, :, kept:] == 0).all()


def test_a_sample_without_truth_has_the_resolved_loss_alone():
    batch = batch_of()
    batch["coords_mask"][0] = False
    logits = logits_of(batch, structure_near(batch))
    losses = confidence_losses(batch, logits, with_pae=True)
    assert {name: term.present.tolist() for name, term in losses.items()} == {
        "plddt": [False, True],
        "resolved": [True, True],
        "pde": [False, True],
        "pae": [False, True],
    }
    assert losses["pae"].per_sample[0] == 0
    assert all(gradient.isfinite().all() for gradient in gradients(losses, logits))


def test_a_structure_that_is_no_number_leaves_numbers():
    batch = batch_of()
    logits = logits_of(batch, torch.full_like(batch["coords"], torch.nan))
    for term in confidence_losses(batch, logits, with_pae=True).values():
        assert term.per_sample.isfinite().all()


def test_only_entries_of_fair_resolution_count():
    batch = batch_of(samples=5)
    logits = logits_of(batch, structure_near(batch))
    everything = confidence_losses(batch, logits, with_pae=True)
    metas = [{"resolution": value} for value in (2.0, None, 4.0, 4.01, 0.05)]
    batch |= resolutions({"meta": metas})
    losses = confidence_losses(batch, logits, with_pae=True)
    for name, term in losses.items():
        assert term.present.tolist() == [True, False, True, False, False], name
        torch.testing.assert_close(term.per_sample[::2][:2], everything[name].per_sample[::2][:2])
        assert (term.per_sample[[1, 3, 4]] == 0).all()
    assert all((gradient[[1, 3, 4]] == 0).all() for gradient in gradients(losses, logits))


def test_batches_that_say_nothing_of_resolutions_have_none():
    assert resolutions({}) == {}
    assert resolutions({"meta": [{"entry": "1abc"}]}) == {}


def test_rows_of_ranks_add_up():
    batch = pad_batch(batch_of(), n_token=1)
    x = structure_near(batch)
    logits = logits_of(batch, x)
    whole = confidence_losses(batch, logits, with_pae=True)
    expected = gradients(whole, logits)
    sums = {name: torch.zeros_like(term.per_sample) for name, term in whole.items()}
    parts = []
    for first in (0, 4, 8):
        rows = slice(first, first + 4)
        own = logits_of(batch, x, rows=rows)
        losses = confidence_losses(batch, own, with_pae=True, rows=rows, whole_weight=1 / 3)
        parts.append(gradients(losses, own))
        for name, term in losses.items():
            sums[name] = sums[name] + term.per_sample
            assert torch.equal(term.present, whole[name].present)
    for name, term in whole.items():
        torch.testing.assert_close(sums[name], term.per_sample, rtol=1e-12, atol=0)
    for index in (0, 1):
        torch.testing.assert_close(sum(part[index] for part in parts), expected[index])
    for index in (2, 3):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], dim=1), expected[index])


# ----------------------------------------------------------------------------------------------------------
# In the training loss


@pytest.mark.parametrize("pae", [0.0, 0.5])
def test_the_training_loss_has_the_weighted_sum(pae):
    batch = random_batch(0, batch_size=2)
    plain = fake_outputs(batch)
    logits = logits_of(batch, structure_near(batch).float())
    weights = LossWeights(confidence=1e-2, pae=pae)
    without = training_loss(batch, plain, weights)
    outputs = replace(fake_outputs(batch), confidence=logits)
    loss = training_loss(batch, outputs, weights)
    terms = confidence_losses(batch, logits, with_pae=True)
    expected = terms["plddt"].mean + terms["resolved"].mean + terms["pde"].mean + pae * terms["pae"].mean
    torch.testing.assert_close(loss.total, without.total + 1e-2 * expected)
    assert set(loss.terms) - set(without.terms) == {"plddt", "resolved", "pde"} | ({"pae"} if pae else set())
    share = LossShare(rows=slice(None), copy_weight=torch.full((3,), 1 / 3), whole_weight=0.25)
    shared = training_loss(batch, outputs, weights, share)
    torch.testing.assert_close(shared.terms["plddt"].mean, 0.25 * loss.terms["plddt"].mean)
    torch.testing.assert_close(shared.terms["pde"].mean, loss.terms["pde"].mean)


def test_settings_give_the_weights():
    assert (TrainConfig().loss_weights.confidence, TrainConfig().loss_weights.pae) == (1e-4, 0.0)
    weights = TrainConfig(alpha_confidence=0.25, alpha_pae=1.0).loss_weights
    assert (weights.confidence, weights.pae) == (0.25, 1.0)
