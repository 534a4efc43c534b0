"""Relative position features, checked by hand."""

import torch

from megafold.trainer.model.relative_position import RelativePositionEncoding, relative_position_features


def features() -> torch.Tensor:
    # Tokens: residues 1, 2 and 50 of chain 1; two atoms of a ligand (residue 1 of chain 2); residue 1 of
    # chain 3, the second copy of chain 1's entity.
    batch = {
        "residue_index": [1, 2, 50, 1, 1, 1],
        "token_index": [1, 2, 50, 60, 61, 70],
        "asym_id": [1, 1, 1, 2, 2, 3],
        "entity_id": [1, 1, 1, 2, 2, 1],
        "sym_id": [1, 1, 1, 1, 1, 2],
    }
    tensors = {name: torch.tensor([values], dtype=torch.int32) for name, values in batch.items()}
    return relative_position_features(tensors, 32, 2)[0]


def classes(pair: torch.Tensor) -> tuple[int, int, int, int]:
    residue, token, entity, chain = pair.split([66, 66, 1, 6])
    for one_hot in (residue, token, chain):
        assert one_hot.sum() == 1
    return int(residue.argmax()), int(token.argmax()), int(entity), int(chain.argmax())


def test_classes_by_hand():
    f = features()
    assert f.shape == (6, 6, 139)
    assert classes(f[0, 0]) == (32, 32, 1, 2)  # itself: offsets 0
    assert classes(f[0, 1]) == (31, 65, 1, 2)  # the next residue: -1; tokens of different residues
    assert classes(f[1, 0]) == (33, 65, 1, 2)
    assert classes(f[0, 2]) == (0, 65, 1, 2)  # -49 is clipped to -32
    assert classes(f[2, 0]) == (64, 65, 1, 2)
    assert classes(f[3, 4]) == (32, 31, 1, 2)  # atoms of one residue: token offset -1
    assert classes(f[0, 3]) == (65, 65, 0, 5)  # another chain and entity
    assert classes(f[0, 5]) == (65, 65, 1, 1)  # another copy of the entity: 1 - 2 = -1
    assert classes(f[5, 0]) == (65, 65, 1, 3)


def test_encoding_has_139_inputs_in_af3():
    assert RelativePositionEncoding(128, 32, 2).linear.weight.shape == (128, 139)
