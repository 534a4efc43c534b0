"""Adapters: names, dtypes and axes against recorded schemas, values against what a sample says."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megafold.pipeline.schema import RESTYPES
from megafold.pipeline.stream.adapters import (
    to_alphafold3_pytorch,
    to_alphafold3_pytorch_batch,
    to_boltz,
    to_boltz_batch,
    to_openfold3,
    to_openfold3_batch,
    to_protenix,
)
from megafold.pipeline.stream.adapters.arrays import backbone_neighbours, template_pairs
from megafold.pipeline.stream.symmetry import ChainCandidates, Symmetry
from tests.pipeline.adapter_samples import hand_made_sample

_SCHEMAS = Path(__file__).parent / "adapter_schemas"
PEERS = ["alphafold3_pytorch", "boltz", "openfold3", "protenix"]


@pytest.fixture
def features():
    return hand_made_sample()


@pytest.fixture
def symmetry():
    """The zinc ion could as well be one outside the crop."""
    zinc = ChainCandidates(
        asym_id=2,
        atoms=np.array([9]),
        places=np.array([0]),
        candidate_asym_id=np.array([2, 3]),
        coords=np.array([[[3.9, 3.2, -2]], [[9, 9, 9]]], np.float32),
        coords_mask=np.array([[True], [True]]),
    )
    return Symmetry(automorphisms=(), chains=(zinc,), bonds=np.empty((0, 2, 3), np.int64))


def _flat(arrays):
    """Nested dictionaries of names as one; one of other keys stays a value."""
    found: dict = {}
    for name, value in arrays.items():
        is_nested = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        found |= {f"{name}.{key}": item for key, item in value.items()} if is_nested else {name: value}
    return found


def _adapted(peer, features, symmetry):
    if peer == "alphafold3_pytorch":
        return to_alphafold3_pytorch(features, resolution=2.0)
    if peer == "boltz":
        return to_boltz(features, paired_rows=1, symmetry=symmetry)
    if peer == "openfold3":
        return _flat(to_openfold3(features, paired_rows=1, symmetry=symmetry))
    inputs, full_labels, labels = to_protenix(features, resolution=2.0, symmetry=symmetry)
    return _flat(inputs | {"label_full_dict": full_labels, "label_dict": labels})


def _described(value):
    """``dtype [axes]`` with the axes' sizes; of what is no array the name of its type."""
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    return f"{value.dtype} [{', '.join(map(str, value.shape))}]"


def differences(adapted, recorded, axes):
    """What an adapter gives otherwise than recorded, in words."""
    found = [f"{name} is missing" for name in recorded.keys() - adapted.keys()]
    found += [f"{name} is not recorded" for name in adapted.keys() - recorded.keys()]
    for name in recorded.keys() & adapted.keys():
        given = _described(adapted[name])
        wanted = re.sub(r"[a-z_]+(?=[,\]])", lambda axis: str(axes[axis[0]]), recorded[name])
        if given != wanted:
            found.append(f"{name} is {given}, the package has {recorded[name]}, here {wanted}")
    return sorted(found)


#: Of the hand-made sample: Boltz pads atoms to 32, alphafold3-pytorch has one window.
AXES = {"token": 3, "atom": 10, "row": 2, "template": 1, "window": 1, "polymer": 2}
AXES |= {"truth_atom": 11, "truth_token": 4, "crop_atom": 10}


@pytest.mark.parametrize("peer", PEERS)
def test_names_dtypes_and_shapes_are_those_of_the_package(peer, features, symmetry):
    recorded = json.loads((_SCHEMAS / f"{peer}.json").read_text())["features"]
    axes = AXES | ({"atom": 32} if peer == "boltz" else {})
    assert differences(_adapted(peer, features, symmetry), recorded, axes) == []


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda schema: schema | {"new": "int64 [token]"}, "new is missing"),
        (lambda schema: {"x": "int64 []"}, "{name} is not recorded"),
        (lambda schema: {name: text.replace("float32", "half") for name, text in schema.items()}, "half"),
        (lambda schema: {name: text.replace("token", "atom") for name, text in schema.items()}, "atom"),
    ],
)
def test_what_a_package_changes_is_named(peer, change, said, features, symmetry):
    recorded = json.loads((_SCHEMAS / f"{peer}.json").read_text())["features"]
    found = differences(_adapted(peer, features, symmetry), change(recorded), AXES)
    assert any(said.format(name=next(iter(recorded))) in line for line in found)


def test_classes_keep_their_names_in_boltz_and_alphafold3_pytorch(features):
    features["restype"] = np.array([23, 27, 20], np.int32)
    boltz = ["<pad>", "-", *RESTYPES[:21], "A", "G", "C", "U", "N", "DA", "DG", "DC", "DT", "DN"]
    lucid = [*RESTYPES[:21], "A", "C", "G", "U", "N", "DA", "DC", "DG", "DT", "DN", "-"]
    names = [RESTYPES[value] for value in features["restype"]]
    chosen = to_boltz(features)["res_type"].argmax(-1)
    assert [boltz[value] for value in chosen] == names
    ids = to_alphafold3_pytorch(features)["molecule_ids"]
    assert ids[-1] == 32  # the ion
    assert [lucid[value] for value in ids[:-1]] == names[:-1]


def test_modified_residues_are_classed_as_each_package_does(features):
    # Boltz and OpenFold3 look a component's own name up; the others have the residue that it stems from.
    features["is_ligand"][2], features["is_protein"][2], features["restype"][2] = False, True, 12
    features["frame_mask"][2] = True
    parent, unknown = RESTYPES[12], "UNK"
    boltz = to_boltz(features)
    names = ["<pad>", "-", *RESTYPES[:21]]
    assert [names[value] for value in boltz["res_type"].argmax(-1)] == ["GLY", "ALA", unknown]
    assert boltz["frame_resolved_mask"].tolist() == [True, True, False]
    openfold3 = to_openfold3(features)
    for batch in (openfold3, openfold3["ground_truth"]):
        assert [RESTYPES[value] for value in batch["restype"].argmax(-1)] == ["GLY", "ALA", unknown]
        assert batch["is_atomized"].tolist() == [0, 0, 1]
    protenix, _, _ = to_protenix(features)
    assert RESTYPES[protenix["restype"][2].argmax()] == parent
    assert protenix["modified_res_mask"].tolist() == [0] * 9 + [1]
    lucid = to_alphafold3_pytorch(features)
    assert RESTYPES[lucid["molecule_ids"][2]] == parent
    assert lucid["is_molecule_mod"].tolist() == [[False] * 4, [False] * 4, [True, False, False, False]]


def test_boltz_marks_whole_chains_of_paired_rows(features):
    features["msa"] = np.array([[7, 0, 20], [7, 31, 31], [31, 31, 20], [7, 3, 31]], np.int32)
    for name in ("has_deletion", "deletion_value"):
        features[name] = np.zeros((4, 3), np.float32)
    features["msa_mask"] = np.ones((4, 3), bool)
    paired = to_boltz(features, paired_rows=2)["msa_paired"]
    assert paired.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_unresolved_atoms_are_marked_as_each_package_does(features):
    lucid = to_alphafold3_pytorch(features)
    unresolved = np.flatnonzero(~features["coords_mask"])
    assert lucid["missing_atom_mask"].nonzero()[0].tolist() == unresolved.tolist()
    assert not np.isin(lucid["distogram_atom_indices"], unresolved).any()
    boltz = to_boltz(features)
    assert boltz["token_disto_mask"].tolist() == features["coords_mask"][features["rep_atom"]].tolist()
    assert len(boltz["ref_pos"]) % 32 == 0
    assert boltz["atom_pad_mask"].sum() == len(features["ref_pos"])


def test_windows_hold_the_pairs_of_the_reference_formula(features):
    window = 4
    pairs = to_alphafold3_pytorch(features, atoms_per_window=window)["atompair_inputs"]
    position, space = features["ref_pos"], features["ref_space_uid"]
    n_atom = len(position)
    for block, row, column in np.ndindex(pairs.shape[:3]):
        i, j = block * window + row, (block - 1) * window + column
        expected = np.zeros(5)
        if 0 <= i < n_atom and 0 <= j < n_atom and space[i] == space[j]:
            offset = position[i] - position[j]
            expected = np.array([*offset, 1 / (1 + offset @ offset), 1])
        np.testing.assert_allclose(pairs[block, row, column], expected, rtol=1e-6)


def test_template_vectors_point_from_ca_to_ca_in_the_frame(features):
    distogram, vector = template_pairs(features)
    _, ca, c = np.moveaxis(features["template_backbone_frame"][0].astype(np.float64), 1, 0)
    x = (c[0] - ca[0]) / np.linalg.norm(c[0] - ca[0])
    towards = (ca[1] - ca[0]) / np.linalg.norm(ca[1] - ca[0])
    np.testing.assert_allclose(vector[0, 0, 1, 0], x @ towards, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vector[0, 0, 1]), 1, atol=1e-6)
    beta = features["template_pseudo_beta"][0].astype(np.float64)
    place = int((np.linalg.norm(beta[0] - beta[1]) - 3.25) // 1.25)
    assert distogram[0, 0, 1].argmax() == place
    assert not vector[0, :, -1].any()  # the ion has no template


def test_neighbours_are_whole_residues_in_one_chain(features):
    found = backbone_neighbours(features)
    assert found[0, 1]
    assert found[1, 0]
    assert found.sum() == 2


def test_batches_pad_at_the_end(features):
    small = {name: value.copy() for name, value in features.items()}
    for to_one, to_batch in (
        (to_boltz, to_boltz_batch),
        (to_alphafold3_pytorch, to_alphafold3_pytorch_batch),
    ):
        batch = to_batch([to_one(small), to_one(features)])
        assert all(len(value) == 2 for value in batch.values())
    nested = to_openfold3_batch([to_openfold3(small), to_openfold3(features)])
    assert nested["ground_truth"]["atom_positions"].shape[0] == 2
    assert nested["loss_weights"]["mse"].shape == (2,)


@pytest.mark.parametrize(("resolution", "counts"), [(None, False), (0.05, False), (2.0, True), (4.1, False)])
def test_openfold3_weighs_confidence_by_resolution(features, resolution, counts):
    weights = to_openfold3(features, resolution=resolution)["loss_weights"]
    assert weights["mse"] == 4
    assert weights["distogram"] == np.float32(0.03)
    for name in ("plddt", "pde", "experimentally_resolved"):
        assert weights[name] == (np.float32(1e-4) if counts else 0)


def test_protenix_bonds_the_polymer_atom_nearest_to_the_ligand(features):
    features["token_bonds"][1, 2] = features["token_bonds"][2, 1] = True
    inputs, _, _ = to_protenix(features)
    ion = features["token_atom_start"][2]
    one, other = np.argwhere(inputs["bond_mask"])[0]
    assert {int(one), int(other)} == {int(ion), int(features["token_atom_start"][1]) + 1}
    assert inputs["bond_mask"].sum() == 2
