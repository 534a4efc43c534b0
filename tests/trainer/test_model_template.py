"""Template features against numpy written from the supplement, and the mean over templates."""

import numpy as np
import torch

from megafold.trainer.model.template import (
    TemplateEmbedder,
    backbone_frames,
    template_distogram,
    template_features,
    unit_vectors,
)
from tests.trainer.batches import pad_batch, random_batch
from tests.trainer.networks import MINI, as_dtype, fill_parameters


def test_distogram_bins():
    beta = torch.tensor([[0.0, 0, 0], [3.0, 0, 0], [4.0, 0, 0], [60.0, 0, 0]], dtype=torch.float64)
    distogram = template_distogram(beta)
    assert distogram.shape == (4, 4, 39)
    assert distogram[0, 1].sum() == 0  # 3 Å: below the first edge
    assert distogram[0, 2].argmax() == 0  # 4 Å: 3.25 to 4.5
    assert distogram[0, 3].argmax() == 38  # 60 Å: above 50.75
    edges = np.linspace(3.25, 50.75, 39)
    far = template_distogram(torch.tensor([[0.0, 0, 0], [23.3, 0, 0]], dtype=torch.float64))
    assert far[0, 1].argmax() == np.flatnonzero(edges < 23.3)[-1]


def test_frames_put_c_on_x_and_n_in_the_xy_plane():
    atoms = torch.randn(6, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotation = backbone_frames(atoms)
    local = torch.einsum("nyx,nay->nax", rotation, atoms - atoms[:, 1:2])
    n, ca, c = local.unbind(1)
    assert c[:, 0].min() > 0
    assert c[:, 1:].abs().max() < 1e-12
    assert n[:, 2].abs().max() < 1e-12
    assert n[:, 1].min() > 0
    assert ca.abs().max() == 0
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(6, dtype=torch.float64))


def test_unit_vectors_do_not_change_when_the_template_moves():
    generator = torch.Generator().manual_seed(0)
    atoms = torch.randn(5, 3, 3, dtype=torch.float64, generator=generator)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=generator))[0]
    rotation *= torch.linalg.det(rotation)
    vectors = unit_vectors(atoms)
    torch.testing.assert_close(unit_vectors(atoms @ rotation.T + 7), vectors)
    assert vectors.diagonal().abs().max() == 0
    norms = vectors.norm(dim=-1)[~torch.eye(5, dtype=torch.bool)]
    torch.testing.assert_close(norms, torch.ones_like(norms))
    # By hand: with CA at the origin, C on x and N on y, the frame is the identity.
    hand = torch.tensor([[[0.0, 1, 0], [0, 0, 0], [1, 0, 0]], [[5.0, 1, 0], [3, 4, 0], [9, 9, 9]]])
    torch.testing.assert_close(unit_vectors(hand)[0, 1], torch.tensor([0.6, 0.8, 0]))


def test_features_stay_within_a_chain():
    batch = random_batch(0)
    features = template_features(batch)
    geometry, restypes = features[..., :44], features[..., 44:]
    other = batch["asym_id"][0, :, None] != batch["asym_id"][0, None, :]
    assert features.shape[-1] == 108
    assert torch.count_nonzero(geometry[:, :, other]) == 0
    assert torch.count_nonzero(geometry[:, :, ~other]) > 0
    assert (restypes.sum(-1) == 2).all()


def test_mean_is_over_present_templates():
    embedder = TemplateEmbedder(MINI)
    fill_parameters(embedder)
    embedder.double().eval()
    batch = as_dtype(random_batch(0, n_templ=2))
    n = batch["restype"].shape[1]
    z = torch.randn(1, n, n, MINI.c_z, dtype=torch.float64)
    pair_mask = torch.ones(1, n, n, dtype=torch.bool)
    out = embedder(batch, z, pair_mask)
    torch.testing.assert_close(embedder(pad_batch(batch, n_templ=3), z, pair_mask), out)
    empty = as_dtype(random_batch(0, n_templ=0))
    assert torch.count_nonzero(embedder(empty, z, pair_mask)) == 0
    assert torch.count_nonzero(embedder(pad_batch(empty, n_templ=2), z, pair_mask)) == 0


def test_features_and_embedding_are_algorithm_16():
    embedder = TemplateEmbedder(MINI)
    fill_parameters(embedder)
    embedder.double().eval()
    batch = as_dtype(random_batch(3, n_templ=3))
    for name in ("template_pseudo_beta_mask", "template_backbone_frame_mask"):
        batch[name][:, 1] = False  # a template of nothing in the crop
    values = {name: value[0].numpy() for name, value in batch.items()}
    restype, asym_id = values["template_restype"], values["asym_id"]
    has_beta, has_frame = values["template_pseudo_beta_mask"], values["template_backbone_frame_mask"]
    beta, frame = values["template_pseudo_beta"], values["template_backbone_frame"]
    lower = np.linspace(3.25, 50.75, 39)
    upper = np.append(lower[1:], np.inf)
    n_templ, n = restype.shape
    features = np.zeros((n_templ, n, n, 108))
    for t, i, j in np.ndindex(n_templ, n, n):
        here = features[t, i, j]
        if asym_id[i] == asym_id[j] and has_beta[t, i] and has_beta[t, j]:
            distance = np.linalg.norm(beta[t, i] - beta[t, j])
            here[:39] = (lower < distance) & (distance < upper)
            here[39] = 1
        if asym_id[i] == asym_id[j] and has_frame[t, i] and has_frame[t, j]:
            nitrogen, alpha, carbon = frame[t, i]
            x = (carbon - alpha) / np.linalg.norm(carbon - alpha)
            y = (nitrogen - alpha) - x * (x @ (nitrogen - alpha))
            y /= np.linalg.norm(y)
            towards = np.stack([x, y, np.cross(x, y)]) @ (frame[t, j, 1] - alpha)
            here[40:43] = towards / max(np.linalg.norm(towards), 1e-9)
            here[43] = 1
        here[44 + restype[t, j]] = here[76 + restype[t, i]] = 1
    np.testing.assert_allclose(template_features(batch)[0], features, atol=1e-9)

    z = torch.randn(1, n, n, MINI.c_z, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pair_mask = torch.ones(1, n, n, dtype=torch.bool)
    u = torch.zeros(1, n, n, MINI.template.c, dtype=torch.float64)
    for t in (0, 2):
        v = embedder.query(z) + torch.from_numpy(features[t]) @ embedder.linear_features.weight.T
        for block in embedder.blocks:
            v = block(v, pair_mask)
        u = u + embedder.norm_out(v)
    torch.testing.assert_close(embedder(batch, z, pair_mask), embedder.linear_out(torch.relu(u / 2)))
