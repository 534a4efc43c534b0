"""Each loss against a float64 numpy version written from the supplement's formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from megafold.trainer.losses import (
    LossWeights,
    atom_weights,
    bond_loss,
    distogram_bins,
    mse_loss,
    polymer_ligand_bonds,
    resolved_atoms,
    sigma_weight,
    smooth_lddt_loss,
    training_loss,
    weighted_rigid_align,
)
from megafold.trainer.model.outputs import ModelOutputs, TrunkOutputs
from tests.trainer.batches import pad_batch, random_batch


def fake_outputs(batch, n_copies=3, seed=0, spread=3.0) -> ModelOutputs:
    """Outputs whose ``denoised`` and logits are leaves: coordinates plus noise, rigidly moved targets."""
    rng = np.random.default_rng(seed)
    coords = batch["coords"].double().numpy()
    n_sample, n_atom, _ = coords.shape
    n_token = batch["token_mask"].shape[1]
    moved = np.empty((n_sample, n_copies, n_atom, 3))
    for b in range(n_sample):
        for s in range(n_copies):
            moved[b, s] = coords[b] @ Rotation.random(rng=rng).as_matrix().T + rng.normal(size=3)
    mask = resolved_atoms(batch).numpy()[:, None, :, None]
    noise = rng.normal(size=moved.shape)
    single = torch.zeros(n_sample, n_token, 1)
    return ModelOutputs(
        trunk=TrunkOutputs(
            s_inputs=single,
            s_trunk=single,
            z_trunk=torch.zeros(n_sample, n_token, n_token, 1),
            distogram_logits=torch.tensor(
                rng.normal(size=(n_sample, n_token, n_token, 64)), dtype=torch.float32
            ).requires_grad_(),
        ),
        denoised=torch.tensor(moved + spread * noise, dtype=torch.float32).requires_grad_(),
        noised=torch.zeros(n_sample, n_copies, n_atom, 3),
        sigma=torch.tensor(rng.uniform(0.5, 40, (n_sample, n_copies)), dtype=torch.float32),
        target=torch.tensor(np.where(mask, moved, 0.0), dtype=torch.float32),
    )


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def with_nucleotides(batch):
    """The batch with its second chain turned into RNA and the first residue into DNA."""
    rna = batch["asym_id"] == 2
    dna = batch["token_index"] == 1
    return batch | {"is_rna": rna, "is_dna": dna, "is_protein": batch["is_protein"] & ~rna & ~dna}


def naive_weights(batch, b) -> np.ndarray:
    owner = batch["atom_to_token"][b].numpy()
    flags = {name: batch[name][b].double().numpy()[owner] for name in ("is_dna", "is_rna", "is_ligand")}
    return 1 + 5 * flags["is_dna"] + 5 * flags["is_rna"] + 10 * flags["is_ligand"]


def naive_mse(batch, outputs, b, s) -> float:
    mask = batch["coords_mask"][b].numpy()
    w = naive_weights(batch, b)[mask]
    x = outputs.denoised[b, s].detach().double().numpy()[mask]
    y = outputs.target[b, s].double().numpy()[mask]
    x_mean, y_mean = np.average(x, 0, w), np.average(y, 0, w)
    rotation, _ = Rotation.align_vectors(x - x_mean, y - y_mean, w)
    aligned = rotation.apply(y - y_mean) + x_mean
    return (w * ((x - aligned) ** 2).sum(1)).mean() / 3


def naive_smooth_lddt(batch, outputs, b, s) -> float:
    mask = batch["coords_mask"][b].numpy()
    owner = batch["atom_to_token"][b].numpy()
    nucleotide = (batch["is_dna"] | batch["is_rna"])[b].numpy()[owner]
    x = outputs.denoised[b, s].detach().double().numpy()
    y = batch["coords"][b].double().numpy()
    score = count = 0.0
    for i in np.flatnonzero(mask):
        for j in np.flatnonzero(mask):
            d_true = np.linalg.norm(y[i] - y[j])
            if i == j or d_true >= (30 if nucleotide[i] else 15):
                continue
            error = abs(np.linalg.norm(x[i] - x[j]) - d_true)
            score += np.mean([1 / (1 + np.exp(error - t)) for t in (0.5, 1, 2, 4)])
            count += 1
    return 1 - score / count


def naive_distogram(batch, outputs, b) -> float:
    logits = outputs.trunk.distogram_logits[b].detach().double().numpy()
    rep = batch["rep_atom"][b].numpy()
    tokens = [t for t in range(len(rep)) if batch["coords_mask"][b, rep[t]]]
    values = []
    for i in tokens:
        for j in tokens:
            distance = np.linalg.norm((batch["coords"][b, rep[i]] - batch["coords"][b, rep[j]]).numpy())
            bin_ = int(np.clip(np.ceil((distance - 2) / (20 / 64)) - 1, 0, 63))
            values.append(np.log(np.exp(logits[i, j]).sum()) - logits[i, j, bin_])
    return float(np.mean(values))


def test_alignment_agrees_with_scipy():
    rng = np.random.default_rng(0)
    moving, weights = rng.normal(size=(5, 30, 3)) * 9, rng.uniform(0.1, 8, (5, 30))
    fixed = np.stack([Rotation.random(rng=rng).apply(m) + rng.normal(size=3) * 20 for m in moving])
    fixed += rng.normal(size=fixed.shape)
    got = weighted_rigid_align(*(torch.tensor(a) for a in (moving, fixed, weights))).numpy()
    for m, f, w, aligned in zip(moving, fixed, weights, got, strict=True):
        m_mean, f_mean = np.average(m, 0, w), np.average(f, 0, w)
        rotation, _ = Rotation.align_vectors(f - f_mean, m - m_mean, w)
        np.testing.assert_allclose(aligned, rotation.apply(m - m_mean) + f_mean, atol=1e-9)


def test_alignment_of_a_mirror_image_is_a_rotation():
    rng = np.random.default_rng(1)
    fixed = rng.normal(size=(20, 3))
    moving = fixed * [1, 1, -1]
    weights = np.ones(20)
    aligned = weighted_rigid_align(*(torch.tensor(a) for a in (moving, fixed, weights))).numpy()
    # Triple products keep their sign under a rotation and lose it under a reflection.
    volume = [np.linalg.det(p[:3] - p[3]) for p in (moving, aligned)]
    np.testing.assert_allclose(volume[0], volume[1], rtol=1e-9)
    rotation, _ = Rotation.align_vectors(fixed - fixed.mean(0), moving - moving.mean(0), weights)
    np.testing.assert_allclose(aligned, rotation.apply(moving - moving.mean(0)) + fixed.mean(0), atol=1e-9)


@pytest.mark.parametrize("n_atom", [1, 2])
def test_alignment_of_few_points_is_exact(n_atom):
    rng = np.random.default_rng(2)
    moving = rng.normal(size=(n_atom, 3))
    fixed = Rotation.random(rng=rng).apply(moving) + 3
    weights = torch.ones(n_atom)
    aligned = weighted_rigid_align(torch.tensor(moving), torch.tensor(fixed), weights)
    np.testing.assert_allclose(aligned.numpy(), fixed, atol=1e-12)


def test_alignment_ignores_masked_points_and_survives_none():
    rng = np.random.default_rng(3)
    fixed = torch.tensor(rng.normal(size=(8, 3)))
    moving = torch.tensor(Rotation.random(rng=rng).apply(fixed.numpy()) + 5)
    weights = torch.ones(8)
    weights[3] = 0
    fixed_with_hole = fixed.clone()
    fixed_with_hole[3] = torch.nan
    aligned = weighted_rigid_align(moving, fixed_with_hole, weights)
    np.testing.assert_allclose(aligned.numpy(), fixed.numpy(), atol=1e-12)
    nothing = weighted_rigid_align(moving, fixed_with_hole, torch.zeros(8))
    assert torch.equal(nothing, moving)


def padded(outputs: ModelOutputs, n_token: int, n_atom: int) -> ModelOutputs:
    """The outputs with nonsense in the places of padding."""
    pad = torch.nn.functional.pad
    trunk = outputs.trunk
    return replace(
        outputs,
        trunk=replace(
            trunk, distogram_logits=pad(trunk.distogram_logits, (0, 0, 0, n_token, 0, n_token), value=9)
        ),
        denoised=pad(outputs.denoised, (0, 0, 0, n_atom), value=99),
        target=pad(outputs.target, (0, 0, 0, n_atom)),
    )


@pytest.mark.parametrize("n_pad", [0, 3])
def test_parts_agree_with_numpy(n_pad):
    batch = with_nucleotides(random_batch(4, 14, batch_size=2, unresolved=0.2))
    outputs = fake_outputs(batch)
    expected: dict[str, list[float]] = {"mse": [], "smooth_lddt": [], "distogram": [], "diffusion": []}
    for b in range(2):
        mse = np.array([naive_mse(batch, outputs, b, s) for s in range(3)])
        lddt = np.array([naive_smooth_lddt(batch, outputs, b, s) for s in range(3)])
        sigma = outputs.sigma[b].double().numpy()
        scale = (sigma**2 + 16**2) / (sigma * 16) ** 2
        expected["mse"].append(mse.mean())
        expected["smooth_lddt"].append(lddt.mean())
        expected["diffusion"].append((scale * mse + lddt).mean())
        expected["distogram"].append(naive_distogram(batch, outputs, b))
    total = 4 * np.mean(expected["diffusion"]) + 0.03 * np.mean(expected["distogram"])
    loss = training_loss(pad_batch(batch, n_token=n_pad, n_atom=7), padded(outputs, n_pad, 7), LossWeights())
    for name, values in expected.items():
        np.testing.assert_allclose(loss.terms[name].per_sample.detach().numpy(), values, rtol=2e-5)
    np.testing.assert_allclose(loss.total.item(), total, rtol=2e-5)


def test_atom_weights_by_hand():
    batch = with_nucleotides(random_batch(0, 8, n_ligand=2))
    weights = atom_weights(batch)[0]
    owner = batch["atom_to_token"][0]
    assert set(weights[owner == 0].tolist()) == {6.0}  # DNA
    assert set(weights[owner == 1].tolist()) == {1.0}  # protein
    assert set(weights[owner == 5].tolist()) == {6.0}  # RNA
    assert set(weights[owner == 7].tolist()) == {11.0}  # ligand


def test_sigma_weight_by_hand():
    got = sigma_weight(torch.tensor([16.0, 4.0]))
    np.testing.assert_allclose(got, [512 / 256**2, (16 + 256) / 64**2], rtol=1e-6)


def test_mse_of_a_moved_copy_is_zero_and_has_the_expected_gradient():
    batch = random_batch(5, 10)
    outputs = fake_outputs(batch, spread=0.0)
    mask = resolved_atoms(batch)
    loss = mse_loss(outputs.denoised, outputs.target, atom_weights(batch), mask)
    assert loss.max() < 1e-8
    # The target is constant: the gradient is 2w(x - x_GT)/(3n), without a term through the alignment.
    moved = (outputs.denoised + torch.randn(outputs.denoised.shape)).detach().requires_grad_()
    weights = atom_weights(batch)
    mse_loss(moved, outputs.target, weights, mask).sum().backward()
    fit = (weights * mask).unsqueeze(1).expand(moved.shape[:-1])
    aligned = weighted_rigid_align(outputs.target, moved.detach(), fit)
    expected = 2 * (fit.unsqueeze(-1) * (moved.detach() - aligned)) / (3 * mask.sum())
    torch.testing.assert_close(gradient(moved), torch.where(mask[:, None, :, None], expected, 0.0))


def test_smooth_lddt_is_invariant_and_bounded():
    batch = with_nucleotides(random_batch(6, 12))
    mask, coords = resolved_atoms(batch), batch["coords"]
    nucleotide = torch.gather(batch["is_rna"], 1, batch["atom_to_token"].long())
    rotation = torch.tensor(Rotation.random(rng=1).as_matrix(), dtype=torch.float32)
    noisy = coords + torch.randn(coords.shape, generator=torch.Generator().manual_seed(0))
    moved = noisy @ rotation.T + torch.tensor([5.0, -3.0, 2.0])
    predicted = torch.stack([noisy, moved, coords, 1000 * noisy], dim=1)
    got = smooth_lddt_loss(predicted, coords, mask, nucleotide)[0]
    assert abs(got[0] - got[1]) < 1e-5
    perfect = 1 - np.mean([1 / (1 + np.exp(-t)) for t in (0.5, 1, 2, 4)])
    assert abs(got[2].item() - perfect) < 1e-6
    assert got[3] > 0.99
    assert got[2] < got[0] < got[3]


def test_smooth_lddt_chunks_do_not_matter():
    batch = random_batch(7, 10, batch_size=2)
    values, gradients = [], []
    for copies in (1, 2, 5):
        outputs = fake_outputs(batch, n_copies=5)
        nothing = torch.zeros_like(batch["coords_mask"])
        loss = smooth_lddt_loss(outputs.denoised, batch["coords"], resolved_atoms(batch), nothing, copies)
        loss.sum().backward()
        values.append(loss.detach())
        gradients.append(gradient(outputs.denoised))
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])
    torch.testing.assert_close(gradients[0], gradients[2])


def test_smooth_lddt_has_the_gradient_of_its_value():
    """Nucleotides, whose radius is another, atoms without truth, and two that coincide."""
    batch = with_nucleotides(random_batch(6, 7))
    mask, coords = resolved_atoms(batch), batch["coords"].double()
    nucleotide = torch.gather(batch["is_rna"], 1, batch["atom_to_token"].long())
    assert 0 < (nucleotide & mask).sum() < mask.sum()
    noise = torch.randn((1, 2, *coords.shape[1:]), generator=torch.Generator().manual_seed(0))
    predicted = coords[:, None] + noise.double()
    torch.autograd.gradcheck(
        lambda x: smooth_lddt_loss(x, coords, mask, nucleotide), predicted.clone().requires_grad_()
    )
    first, second = mask[0].nonzero()[:2, 0].tolist()
    predicted[0, 0, second] = predicted[0, 0, first]
    predicted.requires_grad_()
    smooth_lddt_loss(predicted, coords, mask, nucleotide).sum().backward()
    found = gradient(predicted)
    assert found.isfinite().all()
    # What pulls the two atoms apart pulls neither way.
    moved = predicted.detach().clone()
    moved[0, 0, [first, second]] += 1e-6 * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    change = smooth_lddt_loss(moved, coords, mask, nucleotide) - smooth_lddt_loss(
        predicted.detach(), coords, mask, nucleotide
    )
    expected = (found[0, 0, first] + found[0, 0, second]) @ torch.tensor([1e-6, -2e-6, 5e-7]).double()
    torch.testing.assert_close(change[0, 0], expected, rtol=1e-4, atol=0)


def test_distogram_bins_by_hand():
    distance = torch.tensor([0.0, 2.3124, 2.3126, 12.1, 21.6874, 21.6876, 500.0])
    assert distogram_bins(distance).tolist() == [0, 0, 1, 32, 62, 63, 63]


def bonded_batch():
    """Two samples; the ligand's first atom hangs on the CB of the first one's second residue."""
    batch = random_batch(8, 9, n_ligand=2, batch_size=2, unresolved=0.0)
    bonds = batch["token_bonds"].clone()
    bonds[0, 1, 7] = bonds[0, 7, 1] = True
    coords = batch["coords"].clone()
    ligand_atom = int(batch["token_atom_start"][0, 7])
    residue = int(batch["token_atom_start"][0, 1])
    coords[0, ligand_atom] = coords[0, residue + 4] + torch.tensor([1.4, 0.0, 0.0])
    return batch | {"token_bonds": bonds, "coords": coords}, ligand_atom, residue + 4


def test_bonds_join_the_nearest_atom_and_count_once():
    batch, ligand_atom, residue_atom = bonded_batch()
    assert polymer_ligand_bonds(batch).tolist() == [[0, ligand_atom, residue_atom]]
    mask = batch["coords_mask"].clone()
    mask[0, ligand_atom] = False
    assert polymer_ligand_bonds(batch | {"coords_mask": mask}).tolist() == []


def loops_bonds(batch):
    """Every ligand's token with every other one that is bonded to it, atom by atom."""
    get = {name: value.numpy() for name, value in batch.items()}
    resolved = get["coords_mask"] & get["atom_mask"]
    found = []
    for b, i, j in zip(*np.nonzero(get["token_bonds"]), strict=True):
        if not get["is_ligand"][b, i] or get["is_ligand"][b, j] or not get["token_mask"][b, [i, j]].all():
            continue
        atom = get["token_atom_start"][b, i]
        atoms = [a for a in np.flatnonzero(get["atom_to_token"][b] == j) if resolved[b, a]]
        if resolved[b, atom] and atoms:
            apart = [np.linalg.norm(get["coords"][b, a] - get["coords"][b, atom]) for a in atoms]
            found.append([b, atom, atoms[int(np.argmin(apart))]])
    return found


@pytest.mark.parametrize("n_pad", [0, 3])
def test_many_bonds_agree_with_loops(n_pad):
    batch = random_batch(8, 14, n_ligand=5, batch_size=3, unresolved=0.4)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(batch["token_bonds"].shape, generator=generator) < 0.3
    drawn[1] = False
    batch["token_bonds"] = drawn | drawn.transpose(1, 2)
    residue = batch["atom_to_token"][0] == 1  # of which nothing is resolved
    batch["coords_mask"][0, residue] = False
    batch = pad_batch(batch, n_token=n_pad, n_atom=2 * n_pad)
    batch["coords"] = torch.where(resolved_atoms(batch).unsqueeze(-1), batch["coords"], torch.nan)
    bonds = polymer_ligand_bonds(batch)
    expected = loops_bonds(batch)
    assert bonds.tolist() == expected
    assert len({b for b, _, _ in expected}) == 2
    assert len(expected) > 10
    x = torch.nan_to_num(fake_outputs(batch).denoised).detach().requires_grad_()
    loss = bond_loss(x, batch["coords"], bonds)
    for b in range(3):
        pairs = [(i, j) for own, i, j in expected if own == b]
        truth, own = batch["coords"][b].double().numpy(), x[b].detach().double().numpy()
        errors = [
            (np.linalg.norm(own[:, i] - own[:, j], axis=-1) - np.linalg.norm(truth[i] - truth[j])) ** 2
            for i, j in pairs
        ]
        np.testing.assert_allclose(loss[b].detach(), np.mean(errors, axis=0) if pairs else 0, rtol=1e-4)
    loss.sum().backward()
    assert gradient(x).isfinite().all()
    assert (gradient(x)[1] == 0).all()


def test_bond_loss_agrees_with_numpy():
    batch, i, j = bonded_batch()
    outputs = fake_outputs(batch)
    got = bond_loss(outputs.denoised, batch["coords"], polymer_ligand_bonds(batch))
    x = outputs.denoised[0].detach().double().numpy()
    expected = (np.linalg.norm(x[:, i] - x[:, j], axis=-1) - 1.4) ** 2
    np.testing.assert_allclose(got[0].detach(), expected, rtol=1e-4)
    assert got[1].tolist() == [0, 0, 0]
    without = training_loss(batch, outputs, LossWeights())
    loss = training_loss(batch, outputs, LossWeights(bond=1.0))
    assert loss.terms["bond"].present.tolist() == [True, False]
    scale = sigma_weight(outputs.sigma)[0].double().numpy()
    added = (loss.terms["diffusion"].per_sample - without.terms["diffusion"].per_sample).detach()
    np.testing.assert_allclose(added, [(scale * expected).mean(), 0], rtol=1e-3)


def test_a_sample_without_ground_truth_changes_nothing():
    batch = random_batch(9, 10, batch_size=2)
    mask = batch["coords_mask"].clone()
    mask[1] = False
    hidden = batch | {"coords_mask": mask}
    outputs = fake_outputs(batch)
    loss = training_loss(hidden, outputs, LossWeights(bond=1.0))
    loss.total.backward()
    alone = {name: value[:1] for name, value in batch.items()}
    logits = outputs.trunk.distogram_logits[:1]
    single = replace(
        outputs,
        trunk=replace(outputs.trunk, distogram_logits=logits),
        denoised=outputs.denoised[:1],
        sigma=outputs.sigma[:1],
        target=outputs.target[:1],
    )
    torch.testing.assert_close(loss.total, training_loss(alone, single, LossWeights(bond=1.0)).total)
    assert not loss.terms["diffusion"].present[1]
    assert gradient(outputs.denoised)[1].abs().max() == 0
    assert gradient(outputs.denoised).isfinite().all()


def test_a_batch_without_any_ground_truth_has_zero_loss_and_gradient():
    batch = random_batch(10, 8)
    batch = batch | {"coords_mask": torch.zeros_like(batch["coords_mask"])}
    outputs = fake_outputs(batch)
    loss = training_loss(batch, outputs, LossWeights(bond=1.0))
    loss.total.backward()
    assert loss.total == 0
    assert gradient(outputs.denoised).abs().max() == 0
    assert gradient(outputs.trunk.distogram_logits).abs().max() == 0


def test_unresolved_atoms_never_contribute():
    batch = random_batch(11, 10, unresolved=0.3)
    outputs = fake_outputs(batch)
    loss = training_loss(batch, outputs, LossWeights())
    hole = ~resolved_atoms(batch)[:, None, :, None]
    spoiled = replace(
        outputs, denoised=torch.where(hole, torch.nan, outputs.denoised).detach().requires_grad_()
    )
    other = training_loss(batch, spoiled, LossWeights())
    other.total.backward()
    torch.testing.assert_close(other.total, loss.total)
    assert gradient(spoiled.denoised).isfinite().all()


def test_a_coordinate_that_is_not_finite_gives_a_loss_that_is_not():
    batch = random_batch(12, 8, unresolved=0.0)
    outputs = fake_outputs(batch)
    with torch.no_grad():
        outputs.denoised[0, 0, 0, 0] = torch.inf
    assert not training_loss(batch, outputs, LossWeights()).total.isfinite()


def test_losses_stay_float32_under_autocast():
    batch = random_batch(13, 8)
    outputs = fake_outputs(batch)
    expected = training_loss(batch, outputs, LossWeights())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = training_loss(batch, outputs, LossWeights())
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total, expected.total, rtol=0, atol=0)
