"""A sample made by hand: glycine, alanine and a zinc ion, with two MSA rows and one template."""

import numpy as np

_NAMES = ("N", "CA", "C", "O", "N", "CA", "C", "O", "CB", "ZN")
_COORDS = [
    *([0, 0, 0], [1.46, 0, 0], [2, 1.4, 0], [1.3, 2.4, 0]),
    *([3.3, 1.5, 0], [4, 2.8, 0.1], [5.5, 2.6, 0], [6.1, 1.5, 0], [3.6, 3.6, 1.3], [3.9, 3.2, -2]),
]


def hand_made_sample():
    """Features of a sample as ``schema.SAMPLE`` has them. The alanine's O has no coordinates."""
    coords = np.array(_COORDS, np.float32)
    mask = np.ones(10, bool)
    mask[7] = False
    coords[7] = 0
    frame = np.array([[coords[0], coords[1], coords[2]], [coords[4], coords[5], coords[6]]], np.float32)
    return {
        "token_mask": np.ones(3, bool),
        "residue_index": np.array([5, 6, 1], np.int32),
        "token_index": np.array([5, 6, 40], np.int32),
        "asym_id": np.array([1, 1, 2], np.int32),
        "entity_id": np.array([1, 1, 2], np.int32),
        "sym_id": np.ones(3, np.int32),
        "restype": np.array([7, 0, 20], np.int32),
        "is_protein": np.array([True, True, False]),
        "is_rna": np.zeros(3, bool),
        "is_dna": np.zeros(3, bool),
        "is_ligand": np.array([False, False, True]),
        "deletion_mean": np.zeros(3, np.float32),
        "token_atom_start": np.array([0, 4, 9], np.int32),
        "token_atom_count": np.array([4, 5, 1], np.int32),
        "center_atom": np.array([1, 5, 9], np.int32),
        "rep_atom": np.array([1, 8, 9], np.int32),
        "frame_mask": np.array([True, True, False]),
        "profile": np.eye(32, dtype=np.float32)[[7, 0, 20]],
        "frame_atoms": np.array([[0, 1, 2], [4, 5, 6], [0, 0, 0]], np.int32),
        "token_bonds": np.zeros((3, 3), bool),
        "atom_mask": np.ones(10, bool),
        "atom_to_token": np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 2], np.int32),
        "ref_mask": np.ones(10, bool),
        "ref_element": np.array([7, 6, 6, 8, 7, 6, 6, 8, 6, 30], np.int32),
        "ref_charge": np.array([0] * 9 + [2], np.float32),
        "ref_space_uid": np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 2], np.int32),
        "ref_pos": np.array(_COORDS, np.float32) / 2,
        "ref_atom_name_chars": np.array([[ord(c) - 32 for c in n.ljust(4)] for n in _NAMES], np.int32),
        "msa": np.array([[7, 0, 20], [7, 3, 31]], np.int32),
        "has_deletion": np.zeros((2, 3), np.float32),
        "deletion_value": np.zeros((2, 3), np.float32),
        "msa_mask": np.ones((2, 3), bool),
        "template_restype": np.array([[7, 0, 31]], np.int32),
        "template_pseudo_beta_mask": np.array([[True, True, False]]),
        "template_backbone_frame_mask": np.array([[True, True, False]]),
        "template_pseudo_beta": np.array([[coords[1], coords[8], [0, 0, 0]]], np.float32),
        "template_backbone_frame": np.concatenate([frame, np.zeros((1, 3, 3), np.float32)])[None],
        "coords": coords,
        "coords_mask": mask,
        "b_factor": np.full(10, 20, np.float32),
    }
