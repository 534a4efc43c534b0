"""The atoms' encoder and decoder against algorithms 2, 5 and 6, written out in float64."""

import numpy as np
import torch
from torch import nn

from megafold.trainer.model.config import N_CHAR, N_ELEMENT
from tests.trainer.batches import pad_batch, random_batch
from tests.trainer.networks import MINI, as_dtype, mini_model


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def product(linear: nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ linear.weight.detach().numpy().T


def test_conditioning_is_algorithm_5():
    layer = mini_model().diffusion.encoder.conditioner
    batch = as_dtype(pad_batch(random_batch(0), n_token=2, n_atom=5))
    batch["ref_mask"][0, 3] = False
    n, (n_queries, n_keys) = batch["restype"].shape[1], (MINI.atom.n_queries, MINI.atom.n_keys)
    s, z = rand(1, n, MINI.c_s), rand(1, n, n, MINI.c_z, seed=1)
    atoms = layer(batch, s, z)

    values = {name: value[0].numpy() for name, value in batch.items()}
    token, uid, position = (values[name] for name in ("atom_to_token", "ref_space_uid", "ref_pos"))
    element = np.eye(N_ELEMENT)[values["ref_element"]]
    chars = np.eye(N_CHAR)[values["ref_atom_name_chars"]].reshape(len(token), -1)
    charge = np.arcsinh(values["ref_charge"])[:, None]
    features = np.concatenate([charge, values["ref_mask"][:, None], element, chars], 1)
    c = product(layer.linear_ref_pos, position) + product(layer.linear_features, features)
    assert layer.trunk_s is not None
    assert layer.trunk_z is not None
    c += layer.trunk_s(s)[0].detach().numpy()[token]
    of_z = layer.trunk_z(z)[0].detach().numpy()
    real = np.flatnonzero(values["atom_mask"])
    np.testing.assert_allclose(atoms.c[0, 0, real].detach(), c[real], atol=1e-12)
    assert torch.count_nonzero(atoms.c[0, 0, len(real) :]) == 0

    relu = np.maximum(c, 0)
    of_query, of_key = product(layer.linear_c_query, relu), product(layer.linear_c_key, relu)
    mlp = [linear for linear in layer.pair_mlp if isinstance(linear, nn.Linear)]
    assert len(mlp) == 3
    seen = 0
    for l in real:  # noqa: E741 (the supplement's names)
        window, place = divmod(int(l), n_queries)
        first = window * n_queries - (n_keys - n_queries) // 2
        for m in range(max(first, 0), min(first + n_keys, len(real))):
            d = position[l] - position[m]
            valid = float(uid[l] == uid[m] and values["ref_mask"][l] and values["ref_mask"][m])
            p = valid * (
                product(layer.linear_offset, d)
                + product(layer.linear_distance, np.array([1 / (1 + d @ d)]))
                + product(layer.linear_valid, np.ones(1))
            )
            p = p + of_z[token[l], token[m]] + of_query[l] + of_key[m]
            hidden = p
            for linear in mlp:
                hidden = product(linear, np.maximum(hidden, 0))
            np.testing.assert_allclose(atoms.p[0, window, place, m - first].detach(), p + hidden, atol=1e-11)
            seen += valid > 0
    assert seen > len(real)  # pairs of one conformer besides each atom's own


def test_encoder_and_decoder_are_algorithms_5_and_6():
    """What stands around the atom transformer: positions in, means over a token's atoms, positions out."""
    diffusion = mini_model().diffusion
    encoder, decoder = diffusion.encoder, diffusion.decoder
    batch = as_dtype(pad_batch(random_batch(0), n_token=2, n_atom=5))
    n, n_atom = batch["restype"].shape[1], batch["ref_pos"].shape[1]
    atoms = encoder.conditioner(batch, rand(1, n, MINI.c_s), rand(1, n, n, MINI.c_z, seed=1))
    x, a = rand(1, 2, n_atom, 3, seed=2), rand(1, 2, n, MINI.c_token, seed=3)

    assert encoder.linear_positions is not None
    tokens, q = encoder(atoms, x)
    first = atoms.c + encoder.linear_positions(x)
    given = (atoms.c, atoms.p, atoms.mask, atoms.windows)
    torch.testing.assert_close(q, encoder.transformer(first, *given))
    relu = torch.relu(encoder.linear_token(q)).detach()
    of_token = batch["atom_to_token"][0]
    for token in range(n):
        own = (of_token == token) & batch["atom_mask"][0]
        mean = relu[:, :, own].mean(2) if own.any() else torch.zeros_like(relu[:, :, 0])
        torch.testing.assert_close(tokens[:, :, token], mean)

    inner = q + decoder.linear_token(a)[:, :, of_token.long()] * batch["atom_mask"][0, :, None]
    expected = decoder.linear_positions(decoder.norm(decoder.transformer(inner, *given)))
    torch.testing.assert_close(decoder(a, q, atoms), expected)


def test_input_embedding_is_algorithm_2():
    embedder = mini_model().trunk.input_embedder
    batch = as_dtype(random_batch(0))
    a, _ = embedder.encoder(embedder.encoder.conditioner(batch))
    values = {name: value[0].numpy() for name, value in batch.items()}
    expected = np.concatenate(
        [
            a[0, 0].detach().numpy(),
            np.eye(32)[values["restype"]],
            values["profile"],
            values["deletion_mean"][:, None],
        ],
        axis=1,
    )
    np.testing.assert_allclose(embedder(batch)[0].detach(), expected, atol=1e-12)
