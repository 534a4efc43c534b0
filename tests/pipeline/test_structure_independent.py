"""Every entry of the corpus against independent readings by gemmi and by biotite."""

import csv
import gzip
import itertools
import warnings
from collections import Counter
from dataclasses import replace

import biotite.structure.io.pdbx as pdbx
import gemmi
import numpy as np
import pytest
from scipy.spatial import cKDTree

from megafold.pipeline.schema import MolType
from tests.pipeline.structure_files import NO_FILTERS, make

WATERS = ("HOH", "DOD", "WAT")

#: Entries whose files name no entities (or, 721p, put ligands into the polymer's): gemmi leaves the ligands
#: in their polymer's chain. Value: chains in gemmi's reading, chains in ours.
LIGANDS_IN_CHAINS = {"6mub": (6, 14), "721p-assembly1": (2, 6)}
#: A and B alternate over ten residues with occupancies that change sides from one to the next: residue by
#: residue means a torn backbone, and that is what the independent readings do. Value: atoms that differ.
RUNS_OF_ALTERNATES = {"2rtg": 90}
#: A chromophore stands for three letters of the table's sequence.
THREE_LETTERS_IN_ONE = {"3kcs"}
#: biotite knows letters as alternates, not the digits 1 and 2 of this entry, and drops all of them.
DIGITS_AS_ALTERNATES = {"1k6p": 54}

ENTRIES = sorted(
    """102m 1a7g 1a8o 1aki 1as5 1ay7 1bna 1cbs 1crn 1dix 1f2n 1fix 1fp7 1gbt 1gid 1gl4 1gya 1hml 1igt 1j8z
    1k1a 1k6p 1l2y 1lcd 1lol 1mol 1ncb 1o1z 1p4k 1pfe 1psm 1qgi 1tqh 1twr 1wym 1xnr 209d-assembly1 2beg
    2crb 2d0f 2hhb 2nwd 2ofg 2q2k 2rtg 2xhe 3kcs 3lsj 3lzm 3o5r 3rd3 3u8v 3wip 3zee 4cup 4gpg 4i6p 4opj
    4osx 4q8n 4y60 4zey 4zhl 5eil 5i55 5kc1 5ugo 5y2e 5zyh 6lyz 6mub 6oa8 6s61 6wg6 6wqa 6ydw
    721p-assembly1 7cfn 7rye 7zzx 8f9h""".split()
)


class GemmiReading:
    """Chains, positions and sequences of assembly 1 with gemmi's own parser, entities and operators."""

    def __init__(self, path):
        structure = gemmi.read_structure(str(path))
        structure.setup_entities()
        while len(structure) > 1:
            del structure[1]
        structure.remove_hydrogens()
        structure.remove_waters()
        chains = [subchain for chain in structure[0] for subchain in chain.subchains()]
        by_name: dict[str, list] = {}
        for chain in chains:
            by_name.setdefault(chain.subchain_id(), []).append(chain)
        assembly = next((assembly for assembly in structure.assemblies if assembly.name == "1"), None)
        copies = [(chain, gemmi.Transform()) for chain in chains]
        if assembly is not None:
            expanded = [
                (chain, operator.transform)
                for generator in assembly.generators
                for operator in generator.operators
                for name in generator.subchains
                for chain in by_name.get(name, ())
            ]
            copies = expanded or copies
        entity_of = {name: entity for entity in structure.entities for name in entity.subchains}
        self.chain_count = len(copies)
        self.coords = np.array(
            [
                transform.apply(atom.pos).tolist()
                for chain, transform in copies
                for atom in chosen_atoms(chain)
            ]
        )
        self.sequences = Counter(
            sequence
            for chain, _ in copies
            if (sequence := polymer_sequence(chain, entity_of.get(chain.subchain_id())))
        )


def polymer_sequence(chain, entity):
    if entity is None or entity.entity_type != gemmi.EntityType.Polymer:
        return ()
    # Some files name no sequence: the residues with atoms are all there is.
    names = list(map(gemmi.Entity.first_mon, entity.full_sequence)) or [residue.name for residue in chain]
    return tuple("MET" if name == "MSE" else name for name in names)


def chosen_atoms(chain):
    """Of each residue the alternate of the highest mean occupancy, ties to the first letter."""
    groups: dict[tuple, list] = {}
    for residue in chain:
        position = residue.label_seq if residue.label_seq is not None else residue.name
        groups.setdefault((str(residue.seqid), position), []).append(residue)
    for residues in groups.values():
        atoms = [atom for residue in residues for atom in residue]
        letters = sorted({atom.altloc for atom in atoms} - {"\0"})
        means = {
            letter: round(float(np.mean([atom.occ for atom in atoms if atom.altloc == letter])), 3)
            for letter in letters
        }
        best = max(letters, key=means.__getitem__, default=None)
        yield from (a for a in atoms if a.altloc in ("\0", best) and np.isfinite(a.pos.x))


def biotite_coords(path):
    """Heavy atoms of assembly 1 in biotite's reading; of the coordinates as they are where it finds none."""
    with gzip.open(path, "rt") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cif = pdbx.CIFFile.read(file)
        options = {"model": 1, "altloc": "occupancy", "use_author_fields": False}
        if set(cif.block) >= {"pdbx_struct_assembly_gen", "pdbx_struct_assembly"}:
            atoms = pdbx.get_assembly(cif, assembly_id="1", **options)
        else:
            atoms = pdbx.get_structure(cif, **options)
    is_heavy = ~np.isin(atoms.element, ["H", "D"]) & ~np.isin(atoms.res_name, WATERS)
    return atoms.coord[is_heavy & np.isfinite(atoms.coord[:, 0])]


def far_atoms(ours, theirs):
    """How many of our atoms are at no place where they have one."""
    distance, _ = cKDTree(theirs).query(ours)
    return int((distance > 0.01).sum())


@pytest.mark.corpus
def test_the_list_is_the_corpus(corpus_dir):
    assert sorted(path.name.split(".")[0] for path in (corpus_dir / "structures").iterdir()) == ENTRIES


@pytest.mark.corpus
@pytest.mark.parametrize("entry", ENTRIES)
def test_entry(corpus_dir, entry):
    path = corpus_dir / "structures" / f"{entry}.cif.gz"
    made = make(path)
    gemmi_says = GemmiReading(path)
    coords = made.coords[np.isfinite(made.coords[:, 0])].astype(float)

    counts = gemmi_says.chain_count, made.content.arrays["chains"].shape[1]
    assert counts == LIGANDS_IN_CHAINS.get(entry, (counts[0], counts[0]))

    assert len(coords) == len(gemmi_says.coords)
    assert far_atoms(coords, gemmi_says.coords) == RUNS_OF_ALTERNATES.get(entry, 0)

    theirs = biotite_coords(path)
    assert len(coords) - len(theirs) == DIGITS_AS_ALTERNATES.get(entry, 0)
    differing = RUNS_OF_ALTERNATES.get(entry, 0) + DIGITS_AS_ALTERNATES.get(entry, 0)
    assert far_atoms(coords, theirs) == differing

    if entry not in LIGANDS_IN_CHAINS:
        assert component_sequences(made) == gemmi_says.sequences


def component_sequences(made):
    chains, codes = made.tables["chains"], made.codes
    return Counter(
        tuple(codes[first : first + count])
        for first, count, mol_type in zip(
            chains["first_residue"], chains["residue_count"], chains["mol_type"], strict=True
        )
        if mol_type != MolType.LIGAND
    )


def table_rows(path):
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.corpus
def test_one_letter_sequences_are_those_of_the_corpus_table(corpus_dir):
    rows = table_rows(corpus_dir / "chains.tsv")
    compared = 0
    for entry, of_entry in itertools.groupby(rows, key=lambda row: row["entry"]):
        if entry in THREE_LETTERS_IN_ONE:
            continue
        options = replace(NO_FILTERS, assembly="asym")
        made = make(corpus_dir / "structures" / f"{entry}.cif.gz", options)
        entity_of = dict(zip(made.labels, made.tables["chains"]["entity_id"], strict=True))
        for row in of_entry:
            for label in row["subchains"].split():
                entity = made.attributes["entities"][entity_of[label] - 1]
                assert MolType(entity["mol_type"]).name.lower() == row["kind"]
                assert len(entity["components"]) == len(entity["sequence"]) == int(row["length"])
                # The table has X for modified residues.
                pairs = zip(entity["sequence"], row["sequence"], strict=True)
                assert [pair for pair in pairs if pair[0] != pair[1] and pair[1] not in "XN"] == []
                compared += 1
    assert compared > 100
