"""Whether ``to_boltz`` gives what the package's own featurizer gives: ``features_boltz.py CACHE …``.

The sample's crop and its paired rows are written as the package's ``Structure`` and ``MSA`` and go through
its tokenizer and featurizer. Names and dtypes must be those recorded, shapes and values the adapter's, but
for what is drawn at random; ``exchange.py`` is for what is exchanged. Runs in the package's environment;
arguments as for the examples.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np
from boltz.data import const, types
from boltz.data.feature.featurizer import BoltzFeaturizer
from boltz.data.tokenize.boltz import BoltzTokenizer
from one_sample import arguments, draw, seed

from megafold.pipeline.schema import GAP, RESTYPES
from megafold.pipeline.stream.adapters import to_boltz
from megafold.pipeline.stream.adapters.terminal import without_terminal_atoms

SCHEMA = Path(__file__).parents[1] / "pipeline" / "adapter_schemas" / "boltz.json"
#: Rotated at random; over the batch's rows, where ours are over the whole alignment.
OTHER_VALUES = {"ref_pos", "deletion_mean", "profile"}
#: Rows come in another order.
ROWS = {"msa", "msa_mask", "msa_paired", "has_deletion", "deletion_value"}
EXCHANGES = {"all_coords", "all_resolved_mask", "crop_to_all_atom_map", "chain_symmetries"}
EXCHANGES |= {"amino_acids_symmetries", "ligand_symmetries"}


def structure_of(features):
    """The crop as the package stores structures."""
    token = features["atom_to_token"]
    atoms = np.zeros(len(token), types.Atom)
    atoms["name"] = features["ref_atom_name_chars"]
    atoms["element"], atoms["charge"] = features["ref_element"], features["ref_charge"]
    atoms["coords"], atoms["conformer"] = features["coords"], features["ref_pos"]
    atoms["is_present"] = features["coords_mask"]

    starts = np.unique(features["ref_space_uid"], return_index=True)[1]
    ends = [*starts[1:], len(token)]
    residues = np.zeros(len(starts), types.Residue)
    for residue, start, end in zip(residues, starts, ends, strict=True):
        own = token[start]
        residue["res_type"] = token_id(features["restype"][own])
        residue["res_idx"] = features["residue_index"][own] - 1
        residue["atom_idx"], residue["atom_num"] = start, end - start
        residue["atom_center"], residue["atom_disto"] = (
            features["center_atom"][own],
            features["rep_atom"][own],
        )
        residue["is_standard"] = features["token_atom_count"][own] > 1
        residue["is_present"] = True

    asym = features["asym_id"][token]
    chains = np.zeros(len(np.unique(asym)), types.Chain)
    for place, (chain, number) in enumerate(zip(chains, np.unique(asym), strict=True)):
        own = token[np.argmax(asym == number)]
        kinds = ("is_protein", "PROTEIN"), ("is_rna", "RNA"), ("is_dna", "DNA"), ("is_ligand", "NONPOLYMER")
        chain["mol_type"] = const.chain_type_ids[next(kind for name, kind in kinds if features[name][own])]
        chain["entity_id"], chain["sym_id"] = features["entity_id"][own] - 1, features["sym_id"][own] - 1
        chain["asym_id"] = place
        chain["atom_idx"], chain["atom_num"] = np.argmax(asym == number), (asym == number).sum()
        inside = np.flatnonzero(asym[starts] == number)
        chain["res_idx"], chain["res_num"] = inside[0], len(inside)

    pairs = np.argwhere(np.triu(features["token_bonds"]))
    bonds = np.zeros(len(pairs), types.Bond)
    bonds["atom_1"], bonds["atom_2"] = features["token_atom_start"][pairs].T
    return types.Structure(
        atoms=atoms,
        bonds=bonds,
        residues=residues,
        chains=chains,
        connections=np.zeros(0, types.Connection),
        interfaces=np.zeros(0, types.Interface),
        mask=np.ones(len(chains), bool),
    )


def paired_rows(features, n_row):
    """The query and the paired rows of each chain, as the package stores alignments; a row is a species."""
    found = {}
    counts = np.rint(3 * np.tan(features["deletion_value"] * np.pi / 2)).astype(int)
    for place, number in enumerate(np.unique(features["asym_id"])):
        own = np.flatnonzero(features["asym_id"] == number)
        column = features["residue_index"][own] - 1
        length = column.max() + 1
        rows = [row for row in range(n_row) if row == 0 or (features["msa"][row, own] != GAP).any()]
        sequences = np.zeros(len(rows), types.MSASequence)
        residues = np.full((len(rows), length), const.token_ids["-"], types.MSAResidue)
        deletions: list[tuple[int, int]] = []
        for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            residues["res_type"][index, column] = [token_id(value) for value in features["msa"][row, own]]
            first = len(deletions)
            deletions += dict.fromkeys(
                (at, count) for at, count in zip(column, counts[row, own], strict=True) if count
            )
            sequence["seq_idx"], sequence["taxonomy"] = index, row or -1
            sequence["res_start"], sequence["res_end"] = index * length, (index + 1) * length
            sequence["del_start"], sequence["del_end"] = first, len(deletions)
        found[place] = types.MSA(sequences, np.array(deletions, types.MSADeletion), residues.ravel())
    return found


def token_id(restype):
    return const.token_ids[RESTYPES[restype]]


def has_the_same_frame(features):
    """Not ligands' atoms whose neighbours lie outside the crop: the package takes others inside it."""
    return features["frame_mask"] & (features["is_ligand"] | (features["token_atom_count"] > 1))


def differences(ours, theirs, features):
    recorded = json.loads(SCHEMA.read_text())["features"]
    yield from (f"{name}: recorded, not given" for name in recorded.keys() - theirs.keys() - EXCHANGES)
    yield from (f"{name}: given, not recorded" for name in theirs.keys() - recorded.keys())
    for name in sorted(theirs.keys()):
        mine, value = ours[name], theirs[name].numpy()
        if name == "asym_id":
            mine = np.unique(mine, return_inverse=True)[1]
        if recorded[name].split()[0] != str(value.dtype):
            yield f"{name}: {value.dtype}, recorded is {recorded[name]}"
        if name in OTHER_VALUES:
            same = mine.ndim == value.ndim and mine.shape[1:] == value.shape[1:]
        elif name in ("coords", "disto_center"):
            mask = ours["atom_resolved_mask" if name == "coords" else "token_disto_mask"] > 0
            offset = (mine - value)[..., mask, :]
            same = mine.shape == value.shape and np.ptp(offset, axis=-2).max() < 1e-3
        elif name in ROWS:
            # The package has rows that it has paired once more, unpaired.
            rows = [array[: len(mine)].reshape(len(mine), -1).tolist() for array in (mine, value)]
            same = np.allclose(sorted(rows[0]), sorted(rows[1]))
        elif name in ("frames_idx", "frame_resolved_mask"):
            mask = has_the_same_frame(features)
            same = np.array_equal(mine[mask], value[mask])
        elif name == "disto_target":
            mask = ours["token_disto_mask"] > 0
            same = np.array_equal(mine[np.ix_(mask, mask)], value[np.ix_(mask, mask)])
        else:
            same = np.array_equal(mine, value)
        if not same:
            yield f"{name}: {mine.shape} is not the package's {value.shape}, or other values"


def main():
    args = arguments()
    sample = draw(args)
    features, n_row = dict(without_terminal_atoms(sample.features, None)[0]), 1 + sample.meta["paired_rows"]
    for name in ("msa", "msa_mask", "has_deletion", "deletion_value"):
        features[name] = features[name][:n_row]
    data = types.Input(structure=structure_of(features), msa=paired_rows(features, n_row))
    seed(0)
    theirs = BoltzFeaturizer().process(BoltzTokenizer().tokenize(data), training=False)
    ours = to_boltz(features, paired_rows=n_row - 1)
    wrong = list(differences(ours, theirs, features))
    entry, n_right = sample.meta["entry"], len(theirs) - len(wrong)
    print(f"boltz, {entry}: {n_right} of {len(theirs)} features as its own featurizer's")
    if wrong:
        sys.exit("\n".join(wrong))


main()
