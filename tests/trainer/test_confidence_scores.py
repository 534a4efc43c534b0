"""Scores of the confidence head against biotite's TM score and loops in float64."""

import biotite.structure as struc
import numpy as np
import pytest
import torch

from megafold.trainer.confidence_scores import (
    confidence_scores,
    expected_closeness,
    expected_value,
    has_clash,
    lddt_scores,
    predicted_frames,
    ranking_score,
    tm_score,
)
from megafold.trainer.losses.confidence import aligned_error
from megafold.trainer.model.outputs import ConfidenceLogits
from tests.trainer.batches import pad_batch, random_batch
from tests.trainer.networks import as_dtype
from tests.trainer.test_losses_confidence import batch_of, frame, logits_of, structure_near


def probabilities(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def loops_tm(logits, chains, frames, *, interface, of=None):
    """Equations 17 and 18 for one sample, or for some of its chains."""
    tokens = [i for i, chain in enumerate(chains) if of is None or chain in of]
    n, bins = len(tokens), logits.shape[-1]
    centers = 32 / bins * (np.arange(bins) + 0.5)
    d0 = 1.24 * np.cbrt(max(n, 19) - 15) - 1.8
    best = 0.0
    for i in tokens:
        partners = [j for j in tokens if not interface or chains[j] != chains[i]]
        if not frames[i] or not partners:
            continue
        scores = [probabilities(logits[i, j]) @ (1 / (1 + (centers / d0) ** 2)) for j in partners]
        best = max(best, float(np.mean(scores)))
    return best


def test_expected_values_are_between_the_ends():
    logits = torch.full((50,), -torch.inf)
    logits[[10, 30]] = 0.0
    assert expected_value(logits, 1.0).item() == pytest.approx((0.21 + 0.61) / 2)
    assert expected_value(torch.zeros(64), 32.0).item() == pytest.approx(16.0)


@pytest.mark.parametrize("n_token", [11, 50])
def test_scores_agree_with_loops(n_token):
    batch = batch_of(n_token=n_token)
    x = structure_near(batch)
    logits = logits_of(batch, x)
    scores = confidence_scores(batch, logits)
    frames = predicted_frames(batch, x).numpy()
    for sample in range(2):
        plddt, pae, pde = (getattr(logits, name)[sample].detach().numpy() for name in ("plddt", "pae", "pde"))
        expected = probabilities(plddt) @ np.arange(0.01, 1, 0.02)
        np.testing.assert_allclose(scores.plddt[sample].numpy(), expected)
        assert scores.mean_plddt[sample].item() == pytest.approx(expected.mean())
        centers = np.arange(0.25, 32, 0.5)
        np.testing.assert_allclose(scores.pae[sample].numpy(), probabilities(pae) @ centers)
        np.testing.assert_allclose(scores.pde[sample].numpy(), probabilities(pde) @ centers)
        chains = batch["asym_id"][sample].numpy()
        ptm = loops_tm(pae, chains, frames[sample], interface=False)
        iptm = loops_tm(pae, chains, frames[sample], interface=True)
        assert scores.ptm[sample].item() == pytest.approx(ptm)
        assert scores.iptm[sample].item() == pytest.approx(iptm)
        names = np.unique(chains)
        assert len(names) == 3
        pairs = [
            [loops_tm(pae, chains, frames[sample], interface=a != b, of={a, b}) for b in names] for a in names
        ]
        np.testing.assert_allclose(scores.chain_pair_iptm[sample].numpy(), pairs)
        ranking = 0.8 * iptm + 0.2 * ptm - 100 * bool(scores.has_clash[sample])
        assert scores.ranking[sample].item() == pytest.approx(ranking)
    assert (scores.ptm != scores.iptm).all()


def test_a_head_that_knows_the_errors_predicts_the_tm_score():
    """Of all superpositions by a frame, that with the highest TM score as biotite counts it."""
    n = 40
    batch = as_dtype(random_batch(5, n, n_ligand=0, unresolved=0.0))
    x = structure_near(batch, spread=2.0)
    error, frames, _ = aligned_error(x, batch)
    n_bins = 6400
    place = (error * (n_bins / 32)).long().clamp(max=n_bins - 1)
    certain = torch.full((1, n, n, n_bins), -1e4).scatter_(-1, place.unsqueeze(-1), 0.0)
    near = expected_closeness(certain, torch.tensor([n]))
    predicted = tm_score(near, frames, torch.ones(1, n, n, dtype=torch.bool)).item()
    truth = struc.AtomArray(n)
    truth.atom_name[:], truth.res_name[:], truth.element[:] = "CA", "ALA", "C"
    truth.res_id[:], truth.chain_id[:] = np.arange(n) + 1, "A"
    own, true, center = x[0].numpy(), batch["coords"][0].numpy(), batch["center_atom"][0].numpy()
    truth.coord = true[center].astype(np.float32)
    moved = truth.copy()
    found = []
    for atoms in batch["frame_atoms"][0].numpy():
        rotation = frame(*true[atoms]).T @ frame(*own[atoms])
        moved.coord = ((own[center] - own[atoms[1]]) @ rotation.T + true[atoms[1]]).astype(np.float32)
        found.append(struc.tm_score(truth, moved, np.arange(n), np.arange(n), "reference"))
    assert predicted == pytest.approx(max(found), abs=2e-3)
    assert max(found) - min(found) > 0.05


def test_padding_changes_no_score():
    batch = batch_of()
    x = structure_near(batch)
    logits = logits_of(batch, x)
    expected = confidence_scores(batch, logits)
    n_token, n_atom = batch["token_mask"].shape[1], batch["atom_mask"].shape[1]
    padded = pad_batch(batch, n_token=3, n_atom=6)
    wide = logits_of(padded, torch.zeros(2, n_atom + 6, 3, dtype=torch.float64))
    with torch.no_grad():
        wide.coords[:, :n_atom] = x
        wide.plddt[:, :n_atom] = logits.plddt
        wide.pae[:, :n_token, :n_token], wide.pde[:, :n_token, :n_token] = logits.pae, logits.pde
    found = confidence_scores(padded, wide)
    for name in ("mean_plddt", "ptm", "iptm", "has_clash", "ranking"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(found.plddt[:, :n_atom], expected.plddt)
    torch.testing.assert_close(found.chain_pair_iptm, expected.chain_pair_iptm)
    alone = lddt_scores(padded, wide)
    assert torch.equal(alone.plddt, found.plddt)
    assert torch.equal(alone.mean_plddt, found.mean_plddt)
    torch.testing.assert_close(found.pae[:, :n_token, :n_token], expected.pae)
    assert not found.plddt[:, n_atom:].any()
    assert not found.pde[:, n_token:].any()


def test_a_single_chain_has_no_iptm_and_ranks_by_ptm():
    batch = batch_of()
    batch["asym_id"][:] = 1
    scores = confidence_scores(batch, logits_of(batch, structure_near(batch)))
    assert scores.iptm.isnan().all()
    torch.testing.assert_close(scores.ranking, scores.ptm)


def test_ranking_by_hand():
    ptm, iptm = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.75, torch.nan, 0.75])
    clash = torch.tensor([False, False, True])
    disordered = torch.tensor([0.0, 0.2, 0.0])
    torch.testing.assert_close(ranking_score(ptm, iptm, clash, disordered), torch.tensor([0.7, 0.6, -99.3]))


# ----------------------------------------------------------------------------------------------------------
# Frames and clashes of predicted structures


def test_frames_of_single_atoms():
    """A straight ligand has none, a bent one has; a chain of two atoms has none."""
    batch = random_batch(0, 9, n_ligand=4)
    coords = torch.randn(1, len(batch["atom_mask"][0]), 3) * 10
    first = int(batch["token_atom_start"][0, 5])
    coords[0, first:] = torch.tensor([[0.0, 0, 0], [1.5, 0, 0], [3.0, 0, 0], [3.5, 1.5, 0]])
    frames = predicted_frames(batch, coords)[0].tolist()
    # The second lies between its nearest; the first's nearest are both to one side of it.
    assert frames == [True] * 5 + [False, False, True, True]
    batch["asym_id"][0, -2:] = 4
    assert predicted_frames(batch, coords)[0].tolist() == [True] * 5 + [False] * 4


def test_frames_of_single_atoms_agree_with_loops():
    batch = as_dtype(random_batch(4, 30, n_ligand=25))
    batch["asym_id"][0, 20:] = 7
    x = torch.randn(1, len(batch["atom_mask"][0]), 3, dtype=torch.float64)
    found = predicted_frames(batch, x)[0].numpy()
    chains = batch["asym_id"][0].numpy()[batch["atom_to_token"][0].numpy()]
    points = x[0].numpy()
    for token in range(5, 30):
        atom = int(batch["token_atom_start"][0, token])
        others = [other for other in np.flatnonzero(chains == chains[atom]) if other != atom]
        a, c = sorted(others, key=lambda other: np.linalg.norm(points[other] - points[atom]))[:2]
        angle = struc.angle(points[a], points[atom], points[c])
        assert found[token] == (np.deg2rad(25) < angle < np.deg2rad(155)), token
    assert 0 < found[5:].sum() < 25


@pytest.mark.parametrize(("shared", "expected"), [(13, True), (12, False)])
def test_chains_clash_when_more_than_half_of_the_smaller_one_does(shared, expected):
    batch = random_batch(0, 13, n_ligand=3)  # two chains of 25 atoms
    coords = torch.arange(len(batch["atom_mask"][0]))[None, :, None] * torch.tensor([5.0, 0.0, 0.0])
    coords[0, 25 : 25 + shared] = coords[0, :shared] + torch.tensor([0.0, 1.0, 0.0])
    assert has_clash(batch, coords).tolist() == [expected]
    coords[0, 25 : 25 + shared, 1] += 0.2
    assert has_clash(batch, coords).tolist() == [False]


@pytest.mark.parametrize(("shared", "expected"), [(101, True), (100, False)])
def test_chains_clash_when_more_than_a_hundred_atoms_do(shared, expected):
    batch = random_batch(0, 100, n_ligand=0)  # two chains of 250 atoms
    coords = torch.arange(500)[None, :, None] * torch.tensor([5.0, 0.0, 0.0])
    coords[0, 250 : 250 + shared] = coords[0, :shared]
    assert has_clash(batch, coords).tolist() == [expected]


def test_ligands_and_one_chain_clash_with_nothing():
    batch = random_batch(0, 13, n_ligand=3)
    coords = torch.zeros(1, len(batch["atom_mask"][0]), 3)
    assert has_clash(batch, coords).tolist() == [True]
    batch["asym_id"][:] = 1
    assert has_clash(batch, coords).tolist() == [False]
    batch = random_batch(0, 13, n_ligand=3)
    batch["is_ligand"][:] = True
    assert has_clash(batch, coords).tolist() == [False]


def test_scores_of_bfloat16_logits_are_float32():
    batch = random_batch(0)
    x = structure_near(batch).float()
    drawn = logits_of(batch, x)
    logits = ConfidenceLogits(
        **{name: getattr(drawn, name).detach().bfloat16() for name in ("plddt", "resolved", "pae", "pde")},
        coords=x,
    )
    with torch.autocast("cpu", torch.bfloat16):
        scores = confidence_scores(batch, logits)
    for name in ("plddt", "mean_plddt", "pae", "pde", "ptm", "iptm", "ranking"):
        assert getattr(scores, name).dtype == torch.float32, name
