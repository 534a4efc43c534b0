"""What holds for every object, whatever it was made from: what dtypes and shapes alone do not say.

Each check takes an object in memory and recomputes what it can in plain NumPy.
"""

import json
from typing import Any

import numpy as np

from megafold.cache_store import Content
from megafold.pipeline import schema
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.schema import GAP, N_RESTYPE, STRUCTURE, BondKind, MolType

INTERFACE_DISTANCE = 5.0
#: All pairs of atoms are compared up to here.
MOST_ATOMS_FOR_PAIRS = 1000
MAX_DELETION = 255


def check(content: Content) -> None:
    """Check an object of any kind."""
    attributes: Any = content.attributes
    schema.validate(attributes["kind"], content.arrays, attributes)
    json.dumps(attributes, default=dict, allow_nan=False)
    {"structure": check_structure, "msa": check_msa, "template": check_template, "pairing": check_pairing}[
        attributes["kind"]
    ](content)


def _partitions(first: Any, count: Any, total: int) -> None:
    """Consecutive ranges that cover everything once."""
    assert (count >= 0).all()
    assert first.tolist() == (np.cumsum(count) - count).tolist()
    assert int(count.sum()) == total


def check_structure(content: Content) -> None:
    names = ("chains", "residues", "tokens", "atoms", "bonds", "interfaces")
    tables = {name: STRUCTURE.table(name).unpack(content.arrays[name]) for name in names}
    _check_chains(tables, content.attributes)
    _check_tokens(tables, content.arrays["token_center"], content.arrays["atom_coords"])
    _check_frames(tables, content.arrays["atom_coords"])
    _check_atoms(tables, content)
    _check_bonds(tables)
    _check_interfaces(tables, content.arrays["atom_coords"])


def _check_chains(tables: dict[str, Any], attributes: Any) -> None:
    chains, residues, tokens, atoms = (tables[name] for name in ("chains", "residues", "tokens", "atoms"))
    n_chain = len(chains["asym_id"])
    assert n_chain > 0
    assert chains["asym_id"].tolist() == list(range(1, n_chain + 1))
    # Entities are numbered as they first occur, copies within them likewise.
    seen: dict[int, int] = {}
    for entity, copy in zip(chains["entity_id"].tolist(), chains["sym_id"].tolist(), strict=True):
        assert entity <= len(seen) + 1
        seen[entity] = seen.get(entity, 0) + 1
        assert copy == seen[entity]
    assert sorted(seen) == list(range(1, len(attributes["entities"]) + 1))
    assert set(chains["mol_type"].tolist()) <= {int(kind) for kind in MolType}
    _partitions(chains["first_residue"], chains["residue_count"], len(residues["chain"]))
    _partitions(chains["first_token"], chains["token_count"], len(tokens["residue"]))
    _partitions(chains["first_atom"], chains["atom_count"], len(atoms["element"]))
    order = np.arange(n_chain)
    assert residues["chain"].tolist() == np.repeat(order, chains["residue_count"]).tolist()
    assert residues["chain"][tokens["residue"]].tolist() == np.repeat(order, chains["token_count"]).tolist()
    for column in attributes["chains"].values():
        assert len(column) == n_chain
    used = attributes["components"]
    assert len(used) == len(set(used)) == len(attributes["component_digests"])
    assert sorted(set(residues["component"].tolist())) == list(range(len(used)))
    for index in range(n_chain):
        entity = attributes["entities"][chains["entity_id"][index] - 1]
        first, count = chains["first_residue"][index], chains["residue_count"][index]
        assert entity["components"] == residues["component"][first : first + count].tolist()
        assert entity["mol_type"] == chains["mol_type"][index]
        assert len(entity["sequence"]) == (0 if entity["mol_type"] == MolType.LIGAND else count)
        numbers = residues["label_seq_id"][first : first + count]
        if entity["mol_type"] == MolType.LIGAND:
            assert numbers.tolist() == list(range(1, count + 1))
        else:  # a file that does not state its sequence may begin anywhere, and skip
            assert (np.diff(numbers) > 0).all()
    assert all(count > 0 for count in attributes["filtered"].values())
    assert len(attributes["warnings"]) == len(set(attributes["warnings"]))


def _check_tokens(tables: dict[str, Any], center: Any, coords: Any) -> None:
    residues, tokens, atoms = tables["residues"], tables["tokens"], tables["atoms"]
    _partitions(tokens["first_atom"], tokens["atom_count"], len(atoms["element"]))
    assert (tokens["atom_count"] > 0).all()
    assert (np.diff(tokens["residue"]) >= 0).all()
    standard = residues["is_standard"][tokens["residue"]] == 1
    assert (tokens["atom_count"][~standard] == 1).all()
    per_residue = np.bincount(tokens["residue"], minlength=len(residues["chain"]))
    assert (per_residue[residues["is_standard"] == 1] == 1).all()
    last = tokens["first_atom"] + tokens["atom_count"]
    for column in ("center_atom", "rep_atom"):
        assert ((tokens[column] >= tokens["first_atom"]) & (tokens[column] < last)).all(), column
    assert ((tokens["restype"] >= 0) & (tokens["restype"] < GAP)).all()
    np.testing.assert_array_equal(center, coords[tokens["center_atom"]])


def _check_frames(tables: dict[str, Any], coords: Any) -> None:
    """Masked-in frames are three resolved atoms of one chain, the token's own in the middle for ligands."""
    tokens, atoms, residues = tables["tokens"], tables["atoms"], tables["residues"]
    frames = np.stack([tokens[f"frame_atom_{index}"] for index in range(3)], axis=1)
    n_atom = len(atoms["element"])
    assert ((frames >= -1) & (frames < n_atom)).all()
    mask = tokens["frame_mask"] == 1
    real = frames[mask]
    assert (real >= 0).all()
    assert (atoms["resolved"][real] == 1).all()
    assert (np.diff(np.sort(real, axis=1), axis=1) > 0).all()
    atom_chain = np.repeat(residues["chain"][tokens["residue"]], tokens["atom_count"])
    assert (atom_chain[real] == residues["chain"][tokens["residue"][mask]][:, None]).all()
    single = residues["is_standard"][tokens["residue"]] == 0
    assert (frames[mask & single, 1] == tokens["first_atom"][mask & single]).all()
    a, b, c = (coords[real[:, index]].astype(np.float64) for index in range(3))
    u, v = a - b, c - b
    cosine = (u * v).sum(axis=1) / np.maximum(np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1), 1e-9)
    assert (np.abs(cosine) < np.cos(np.deg2rad(24.9))).all()


def _check_atoms(tables: dict[str, Any], content: Content) -> None:
    tokens, atoms, residues = tables["tokens"], tables["atoms"], tables["residues"]
    coords, occupancy_b = content.arrays["atom_coords"], content.arrays["atom_occupancy_b"]
    resolved = atoms["resolved"] == 1
    finite = np.isfinite(coords)
    np.testing.assert_array_equal(finite.all(axis=1), resolved)
    np.testing.assert_array_equal(finite.any(axis=1), resolved)
    assert np.isnan(occupancy_b[~resolved]).all()
    assert np.isfinite(occupancy_b[resolved, 0]).all()
    assert (atoms["element"] != 1).all()
    assert ((atoms["element"] >= 0) & (atoms["element"] <= 118)).all()
    assert set(np.unique(atoms["resolved"]).tolist()) <= {0, 1}
    atom_residue = np.repeat(tokens["residue"], tokens["atom_count"])
    any_resolved = np.zeros(len(residues["chain"]), bool)
    any_resolved[atom_residue[resolved]] = True
    np.testing.assert_array_equal(residues["resolved"] == 1, any_resolved)
    # One atom of a component occurs once in a residue.
    assert (atoms["component_atom"] >= 0).all()
    keys = atom_residue.astype(np.int64) << 32 | atoms["component_atom"]
    assert len(np.unique(keys)) == len(keys)


def _check_bonds(tables: dict[str, Any]) -> None:
    bonds, tokens = tables["bonds"], tables["tokens"]
    i, j = bonds["atom_i"], bonds["atom_j"]
    assert ((i >= 0) & (i < j) & (j < len(tables["atoms"]["element"]))).all()
    assert len({*zip(i.tolist(), j.tolist(), strict=True)}) == len(i)
    assert set(bonds["kind"].tolist()) <= {int(kind) for kind in BondKind}
    assert set(bonds["order"].tolist()) <= {0, 1, 2, 3}
    atom_residue = np.repeat(tokens["residue"], tokens["atom_count"])
    assert (atom_residue[i] != atom_residue[j]).all()


def _check_interfaces(tables: dict[str, Any], coords: Any) -> None:
    chains, interfaces = tables["chains"], tables["interfaces"]
    pairs = list(zip(interfaces["chain_i"].tolist(), interfaces["chain_j"].tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    assert all(0 <= i < j < len(chains["asym_id"]) for i, j in pairs)
    known = np.flatnonzero(np.isfinite(coords[:, 0]))
    if len(known) > MOST_ATOMS_FOR_PAIRS:
        return
    points = coords[known].astype(np.float64)
    near = np.linalg.norm(points[:, None] - points[None], axis=2)
    chain = np.repeat(np.arange(len(chains["asym_id"])), chains["atom_count"])[known]
    # Rounding decides at the limit itself.
    for limit, compare in ((-1e-3, set.issuperset), (1e-3, set.issubset)):
        rows, columns = np.nonzero(near < INTERFACE_DISTANCE + limit)
        close = {(i, j) for i, j in zip(chain[rows].tolist(), chain[columns].tolist(), strict=True) if i < j}
        assert compare(set(pairs), close), (pairs, close)


def check_msa(content: Content) -> None:
    attributes: Any = content.attributes
    msa, deletion = content.arrays["msa"], content.arrays["deletion"]
    n_residue, n_row = msa.shape
    assert n_residue == len(attributes["sequence"])
    assert n_row >= 1
    assert ((msa >= 0) & (msa < N_RESTYPE)).all()
    alphabet = Alphabet.of(MolType[attributes["mol_type"].upper()])
    query = alphabet.encode(attributes["sequence"])
    assert msa[:, 0].tolist() == query.tolist()
    assert (query != GAP).all()
    assert (deletion[:, 0] == 0).all()
    assert (msa != GAP).any(axis=0).all()
    counts = np.stack([(msa == code).sum(axis=1) for code in range(N_RESTYPE)], axis=1)
    np.testing.assert_allclose(content.arrays["profile"], counts / n_row, atol=1e-3)
    np.testing.assert_allclose(content.arrays["profile"].astype(np.float64).sum(axis=1), 1, atol=5e-3)
    mean = content.arrays["deletion_mean"]
    unclipped = deletion.max(axis=1) < MAX_DELETION
    np.testing.assert_allclose(mean[unclipped], deletion[unclipped].mean(axis=1), rtol=1e-5, atol=1e-6)
    assert (mean >= deletion.mean(axis=1) * (1 - 1e-5)).all()
    rows = schema.MSA.table("rows").unpack(content.arrays["rows"])
    assert rows["source"].tolist() == sorted(rows["source"].tolist())
    assert rows["source"][0] == -1
    kept = np.bincount(rows["source"][1:], minlength=len(attributes["sources"])).tolist()
    assert kept == [source["kept"] for source in attributes["sources"]]
    assert all(source["kept"] <= source["rows"] for source in attributes["sources"])
    assert ((rows["species"] >= -1) & (rows["species"] < len(attributes["species"]))).all()
    aligned = (msa != GAP).sum(axis=0)
    equal = ((msa == query[:, None]) & (query != alphabet.unknown)[:, None]).sum(axis=0)
    np.testing.assert_allclose(rows["coverage"], 1000 * aligned / n_residue, atol=0.51)
    np.testing.assert_allclose(rows["identity"], 1000 * equal / np.maximum(aligned, 1), atol=0.51)


def check_template(content: Content) -> None:
    attributes: Any = content.attributes
    restype, pos = content.arrays["template_restype"], content.arrays["template_atom_pos"]
    hits = schema.TEMPLATE.table("hits").unpack(content.arrays["hits"])
    n_residue = len(attributes["sequence"])
    assert restype.shape[1:] == (n_residue,)
    assert ((restype >= 0) & (restype < N_RESTYPE)).all()
    aligned = restype != GAP
    assert hits["aligned"].tolist() == aligned.sum(axis=1).tolist()
    assert hits["first"].tolist() == aligned.argmax(axis=1).tolist()
    assert hits["last"].tolist() == (n_residue - 1 - aligned[:, ::-1].argmax(axis=1)).tolist()
    np.testing.assert_allclose(hits["coverage"], 1000 * hits["aligned"] / n_residue, atol=0.51)
    assert ((hits["identity"] >= 0) & (hits["identity"] <= 1000)).all()
    known = np.isfinite(pos)
    np.testing.assert_array_equal(known.all(axis=-1), known.any(axis=-1))
    assert not known[~aligned].any()
    assert all(len(column) == len(restype) for column in attributes["hits"].values())
    assert sum(source["kept"] for source in attributes["sources"]) == len(restype)


def check_pairing(content: Content) -> None:
    pairing = content.arrays["pairing"]
    assert (pairing[0] == 0).all()
    assert (pairing[1:] != 0).all()
    assert ((pairing >= 0).sum(axis=1) >= 2).all()
    for column in pairing.T:
        rows = column[column >= 0]
        assert len(set(rows.tolist())) == len(rows)
