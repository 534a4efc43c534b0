"""The sample corpus against independent chemistry: gemmi, biotite and the component dictionary."""

import csv
import gzip
import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from functools import cache
from itertools import pairwise
from pathlib import Path

import biotite.structure.info as info
import gemmi
import numpy as np
import pytest
from biotite.structure import dihedral
from biotite.structure.io import pdbx

from megafold.pipeline.errors import InputError
from megafold.pipeline.sample_corpus import SampleCorpus, write_sample_corpus
from megafold.pipeline.sample_corpus.assembling import MOST_ENTRIES, entry_id
from megafold.pipeline.sample_corpus.family import family
from megafold.pipeline.sample_corpus.recipes import make_entry

ENTRIES, SEED = 24, 0
KINDS = {
    "dna", "disulfide", "glycoprotein", "heme", "heterodimer", "homodimer", "ligand", "modified", "monomer",
    "protein-dna", "protein-rna", "rna-duplex", "rna-hairpin", "zinc",
}  # fmt: skip


PARENT = {"MSE": "MET", "SEP": "SER", "TPO": "THR", "PTR": "TYR"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> SampleCorpus:
    return write_sample_corpus(tmp_path_factory.mktemp("sample") / "corpus", entries=ENTRIES, seed=SEED)


@pytest.fixture(scope="module")
def structures(corpus) -> dict[str, gemmi.Structure]:
    return {
        path.name.removesuffix(".cif.gz"): gemmi.read_structure(str(path))
        for path in sorted(corpus.structures.iterdir())
    }


@pytest.fixture(scope="module")
def blocks(corpus) -> dict[str, gemmi.cif.Block]:
    return {
        path.name.removesuffix(".cif.gz"): gemmi.cif.read(str(path)).sole_block()
        for path in sorted(corpus.structures.iterdir())
    }


@pytest.fixture(scope="module")
def chain_rows(corpus) -> list[dict[str, str]]:
    return read_table(corpus.structures.parent / "chains.tsv")


@cache
def ideal_component(code: str):
    """The component with its ideal coordinates and bonds, as biotite has it."""
    return info.residue(code)


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def read_gz(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def position(atom: gemmi.Atom) -> np.ndarray:
    return np.array(atom.pos.tolist())


def first_atoms(residue: gemmi.Residue) -> dict[str, np.ndarray]:
    """Coordinates by name; of alternate locations the first."""
    found: dict[str, np.ndarray] = {}
    for atom in residue:
        found.setdefault(atom.name, position(atom))
    return found


def sequence_number(residue: gemmi.Residue) -> int:
    assert residue.label_seq is not None
    return residue.label_seq


def fields(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that the text begins with."""
    match = re.match(pattern, text)
    assert match, (pattern, text)
    return match.groups()


def residues(structure: gemmi.Structure) -> Iterator[gemmi.Residue]:
    for chain in structure[0]:
        yield from chain


def neighbours(structure: gemmi.Structure) -> Iterator[tuple[gemmi.Residue, gemmi.Residue]]:
    """Consecutive residues of polymers, both resolved."""
    for chain in structure[0]:
        polymer = list(chain.get_polymer())
        for one, two in pairwise(polymer):
            if sequence_number(two) == sequence_number(one) + 1:
                yield one, two


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.gz")}


# --------------------------------------------------------------------------------------------------
# The corpus as a whole


def test_every_kind_is_there(corpus):
    assert set(corpus.counts) == KINDS
    assert sum(corpus.counts.values()) == ENTRIES
    assert len(list(corpus.structures.iterdir())) == ENTRIES


def test_every_trait_is_there(corpus):
    tags: set[str] = set()
    for row in read_table(corpus.structures.parent / "manifest.tsv"):
        if row["kind"] == "structure":
            tags.update(row["tags"].split(","))
    assert tags >= {
        "protein", "dna", "rna", "ligand", "ion", "metalc", "glycan", "covalent-link", "disulfide", "altloc",
        "missing-residues", "missing-atoms", "multimer", "assembly-operator", "modified:MSE", "modified:SEP",
        "modified:PTR",
    }  # fmt: skip


def test_manifest_lists_every_file_with_its_digest(corpus):
    root = corpus.structures.parent
    rows = {row["path"]: row for row in read_table(root / "manifest.tsv")}
    assert set(rows) == set(files_of(root))
    for path, row in rows.items():
        data = (root / path).read_bytes()
        assert row["sha256"] == hashlib.sha256(data).hexdigest()
        assert int(row["bytes"]) == len(data)


def test_same_seed_same_bytes_whatever_the_number_of_entries(corpus, tmp_path):
    make_entry.cache_clear()
    family.cache_clear()
    write_sample_corpus(tmp_path / "again", entries=9, seed=SEED)
    again, whole = files_of(tmp_path / "again"), files_of(corpus.structures.parent)
    assert len(again) > 20
    assert all(whole[name] == data for name, data in again.items())


def test_another_seed_gives_another_corpus(corpus, tmp_path):
    other = write_sample_corpus(tmp_path / "other", entries=2, seed=SEED + 1)
    for path in other.structures.iterdir():
        assert path.read_bytes() != (corpus.structures / path.name).read_bytes()


def test_progress_is_told(tmp_path):
    seen = []
    write_sample_corpus(
        tmp_path / "two", entries=2, progress=lambda done, wanted: seen.append((done, wanted))
    )
    assert seen == [(1, 2), (2, 2)]


def test_refuses_a_directory_in_use(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not an empty directory"):
        write_sample_corpus(tmp_path, entries=1)


@pytest.mark.parametrize("entries", [0, MOST_ENTRIES + 1])
def test_refuses_impossible_numbers(tmp_path, entries):
    with pytest.raises(InputError, match="ask for 1 to"):
        write_sample_corpus(tmp_path / "none", entries=entries)


def test_ids_are_unique_and_never_numbers():
    ids = [entry_id(index) for index in range(MOST_ENTRIES)]
    assert len(set(ids)) == MOST_ENTRIES
    assert all(re.fullmatch("0[a-df-z][0-9a-z]{2}", one) for one in ids)


# --------------------------------------------------------------------------------------------------
# Geometry


def test_peptide_bonds(structures):
    lengths, angles = [], []
    for structure in structures.values():
        for one, two in neighbours(structure):
            a, b = first_atoms(one), first_atoms(two)
            if "CA" in a and "CA" in b:
                lengths.append(np.linalg.norm(a["C"] - b["N"]))
                angles.append(abs(np.degrees(dihedral(a["CA"], a["C"], b["N"], b["CA"]))))
    assert len(lengths) > 1000
    np.testing.assert_allclose(lengths, 1.33, atol=0.05)
    assert min(angles) > 165


def test_amino_acids_are_l(structures):
    count = 0
    for structure in structures.values():
        for residue in residues(structure):
            atoms = first_atoms(residue)
            if {"N", "CA", "C", "CB"} <= set(atoms):
                n, c, cb = (atoms[name] - atoms["CA"] for name in ("N", "C", "CB"))
                # Seen from H to CA, C(O), R, N run clockwise: L ("CORN").
                assert np.cross(n, c) @ cb > 2.0
                count += 1
    assert count > 1000


def test_bonds_within_components_are_as_the_dictionary_says(structures):
    checked: set[str] = set()
    for name, structure in structures.items():
        for residue in residues(structure):
            atoms, ideal = first_atoms(residue), ideal_component(residue.name)
            bonds = [(ideal.atom_name[i], ideal.atom_name[j], i, j) for i, j, _ in ideal.bonds.as_array()]
            for a, b, i, j in bonds:
                if a in atoms and b in atoms:
                    expected = np.linalg.norm(ideal.coord[i] - ideal.coord[j])
                    found = np.linalg.norm(atoms[a] - atoms[b])
                    assert found == pytest.approx(expected, abs=0.15), (name, residue.name, a, b)
            checked.add(residue.name)
    assert len(checked) > 35


def test_stereocentres_are_as_the_dictionary_says(structures):
    """The signed volume of every centre with three bonded heavy atoms or more has the dictionary's sign."""
    count = 0
    for name, structure in structures.items():
        for residue in residues(structure):
            atoms, ideal = first_atoms(residue), ideal_component(residue.name)
            heavy = set(np.flatnonzero(ideal.element != "H"))
            for centre in heavy:
                around = [i for i in ideal.bonds.get_bonds(centre)[0] if i in heavy][:3]
                names = [ideal.atom_name[i] for i in (centre, *around)]
                if len(around) < 3 or not set(names) <= set(atoms) or ideal.element[centre] != "C":
                    continue
                expected = np.linalg.det(ideal.coord[around] - ideal.coord[centre])
                if abs(expected) > 1.5:
                    found = np.linalg.det(np.array([atoms[n] - atoms[names[0]] for n in names[1:]]))
                    assert found * expected > 0, (name, residue.name, names)
                    count += 1
    assert count > 1500


def test_no_clashes(structures):
    """No atoms of different residues nearer than 2.5 Å, but those of neighbours and linked residues."""
    for name, structure in structures.items():
        linked = {
            frozenset(str(structure[0].find_cra(p).residue) + p.chain_name for p in (c.partner1, c.partner2))
            for c in structure.connections
        }
        polymers = {chain.name: {str(r): r.label_seq for r in chain.get_polymer()} for chain in structure[0]}
        search = gemmi.NeighborSearch(structure[0], gemmi.UnitCell(), 3).populate(include_h=False)
        contacts = gemmi.ContactSearch(2.5)
        contacts.ignore = gemmi.ContactSearch.Ignore.SameResidue
        for contact in contacts.find_contacts(search):
            ends = (contact.partner1, contact.partner2)
            if frozenset(str(end.residue) + end.chain.name for end in ends) in linked:
                continue
            one, two = (polymers[end.chain.name].get(str(end.residue), -9) for end in ends)
            same_chain = ends[0].chain.name == ends[1].chain.name
            assert same_chain, (name, *map(str, ends), contact.dist)
            assert abs(one - two) == 1, (name, *map(str, ends), contact.dist)


def test_neighbouring_residues_touch_only_through_their_bond(structures):
    for name, structure in structures.items():
        for one, two in neighbours(structure):
            a, b = first_atoms(one), first_atoms(two)
            link = ("C", "N") if "CA" in a else ("O3'", "P")
            for m, p in a.items():
                for n, q in b.items():
                    assert (m, n) == link or np.linalg.norm(p - q) > 2.15, (name, str(one), str(two), m, n)


def test_nucleotides_are_linked(structures):
    count = 0
    for structure in structures.values():
        for one, two in neighbours(structure):
            a, b = first_atoms(one), first_atoms(two)
            if "O3'" in a and "P" in b:
                assert np.linalg.norm(a["O3'"] - b["P"]) == pytest.approx(1.6, abs=0.1)
                count += 1
    assert count > 100


def test_bases_pair(structures, blocks):
    """The first strand's N1 or N3 is at hydrogen bond distance from its partner in the other strand."""
    for name, block in blocks.items():
        if "double helix" not in block.find_value("_struct.title"):
            continue
        first, second = list(structures[name][0])[:2]
        strand = [first_atoms(r) for r in first.get_polymer()]
        partner = [first_atoms(r) for r in second.get_polymer()][::-1]
        for a, b in zip(strand, partner, strict=True):
            is_purine = "N9" in a
            distance = np.linalg.norm(a["N1" if is_purine else "N3"] - b["N3" if is_purine else "N1"])
            assert 2.7 < distance < 3.1


DISTANCES = {
    ("CYS", "CYS"): (2.05, 0.1),
    ("ASN", "NAG"): (1.45, 0.1),
    ("NAG", "NAG"): (1.4, 0.1),
    ("BMA", "NAG"): (1.4, 0.1),
    ("BMA", "MAN"): (1.4, 0.1),
    ("HIS", "ZN"): (2.1, 0.2),
    ("CYS", "ZN"): (2.33, 0.2),
    ("HEM", "HIS"): (2.08, 0.1),
    ("HOH", "MG"): (2.1, 0.1),
    ("HOH", "ZN"): (2.1, 0.1),
}


def test_bonds_between_residues(structures):
    seen = set()
    for name, structure in structures.items():
        for connection in structure.connections:
            one, two = (structure[0].find_cra(p) for p in (connection.partner1, connection.partner2))
            assert one.atom is not None, (name, str(connection))
            assert two.atom is not None, (name, str(connection))
            distance = one.atom.pos.dist(two.atom.pos)
            assert distance == pytest.approx(connection.reported_distance, abs=0.002)
            pair = tuple(sorted((one.residue.name, two.residue.name)))
            if pair in DISTANCES:
                expected, tolerance = DISTANCES[pair]
                assert distance == pytest.approx(expected, abs=tolerance), (name, str(connection))
                seen.add(pair)
            elif connection.type == gemmi.ConnectionType.Covale:
                assert distance == pytest.approx(1.33, abs=0.05), (name, str(connection))
    assert seen >= {("CYS", "CYS"), ("ASN", "NAG"), ("NAG", "NAG"), ("HEM", "HIS"), ("HOH", "MG")}
    assert seen & {("HIS", "ZN"), ("CYS", "ZN")}


def test_linked_sugars_have_lost_their_leaving_oxygen(structures):
    count = 0
    for structure in structures.values():
        for residue in residues(structure):
            if residue.name in ("NAG", "BMA", "MAN"):
                assert "O1" not in first_atoms(residue)
                count += 1
    assert count >= 4


def test_proteins_are_compact(structures):
    """Radius of gyration at most 1.7 times that of globular proteins, 2.2 N^0.38 Å (Skolnick et al. 1997)."""
    for structure in structures.values():
        for chain in structure[0]:
            trace = np.array([position(r["CA"][0]) for r in chain.get_polymer() if "CA" in r])
            if len(trace) > 20:
                radius = np.sqrt(((trace - trace.mean(axis=0)) ** 2).sum(axis=1).mean())
                assert radius < 1.7 * 2.2 * len(trace) ** 0.38


def test_homodimers_touch(corpus, structures):
    found = 0
    for structure in structures.values():
        assembly = structure.assemblies[0]
        count = sum(len(generator.operators) for generator in assembly.generators)
        if count == 1:
            continue
        whole = gemmi.make_assembly(assembly, structure[0], gemmi.HowToNameCopiedChain.AddNumber)
        coords = [np.array([position(a) for r in chain for a in r]) for chain in whole]
        assert len(coords) == 2
        distances = np.linalg.norm(coords[0][:, None] - coords[1][None], axis=-1)
        assert 3.2 < distances.min() < 3.4
        # A two-fold axis: applied twice it is the identity.
        operator = assembly.generators[0].operators[1].transform
        twice = operator.combine(operator)
        np.testing.assert_allclose(twice.mat.tolist(), np.eye(3), atol=1e-9)
        np.testing.assert_allclose(twice.vec.tolist(), 0, atol=1e-6)
        found += 1
    assert found == corpus.counts["homodimer"]


# --------------------------------------------------------------------------------------------------
# The files as others read them


def test_gemmi_reads_entities_and_sequences(structures, blocks):
    kinds = set()
    for name, structure in structures.items():
        block = blocks[name]
        sequences = defaultdict(list)
        for entity, code in block.find("_entity_poly_seq.", ["entity_id", "mon_id"]):
            sequences[entity].append(code)
        letters = {
            row.str(0): row.str(1)
            for row in block.find("_entity_poly.", ["entity_id", "pdbx_seq_one_letter_code_can"])
        }
        for entity in structure.entities:
            kinds.add(entity.entity_type)
            if entity.entity_type == gemmi.EntityType.Polymer:
                assert entity.full_sequence == sequences[entity.name]
                one_letter = gemmi.one_letter_code([PARENT.get(code, code) for code in entity.full_sequence])
                assert one_letter == letters[entity.name]
        for chain in structure[0]:
            polymer = chain.get_polymer()
            entity = structure.get_entity_of(polymer)
            assert [entity.full_sequence[r.label_seq - 1] for r in polymer] == [r.name for r in polymer]
        assert structure.resolution > 1 or "NMR" in structure.info["_exptl.method"]
    kind = gemmi.EntityType
    assert kinds == {kind.Polymer, kind.Branched, kind.NonPolymer, kind.Water}


def test_gemmi_knows_every_component_type(blocks):
    for block in blocks.values():
        for row in block.find("_chem_comp.", ["id", "type"]):
            kind = gemmi.ChemComp.read_group(row.str(1))
            expected = gemmi.find_tabulated_residue(row.str(0))
            if expected.is_amino_acid():
                assert kind in (gemmi.ChemComp.Group.Peptide, gemmi.ChemComp.Group.PPeptide), row.str(1)
            if expected.is_nucleic_acid() and len(row.str(0)) <= 2:
                assert kind in (gemmi.ChemComp.Group.Rna, gemmi.ChemComp.Group.Dna), row.str(1)


def test_biotite_reads_structures_assemblies_and_sequences(corpus, chain_rows):
    sequences = {(row["entry"], row["entity"]): row["sequence"] for row in chain_rows}
    for path in sorted(corpus.structures.iterdir()):
        file = pdbx.CIFFile.read(io.StringIO(read_gz(path)))
        entry = path.name.removesuffix(".cif.gz")
        atoms = pdbx.get_structure(file, model=1, include_bonds=True, use_author_fields=False)
        assembly = pdbx.get_assembly(file, model=1)
        count = len(file.block["pdbx_struct_oper_list"]["id"])
        assert assembly.array_length() == count * atoms.array_length()
        found = sorted(str(one) for one in pdbx.get_sequence(file).values())
        strands = file.block["entity_poly"]["pdbx_strand_id"].as_array(str)
        entities = file.block["entity_poly"]["entity_id"].as_array(str)
        expected = sorted(
            sequences[entry, entity].replace("U", "T")
            for entity, names in zip(entities, strands, strict=True)
            for _ in names.split(",")
        )
        assert [one.replace("U", "T") for one in found] == expected


def test_missing_residues_are_in_the_sequence_alone(structures):
    missing = 0
    for structure in structures.values():
        for chain in structure[0]:
            polymer = chain.get_polymer()
            if len(polymer):
                missing += len(structure.get_entity_of(polymer).full_sequence) - len(polymer)
    assert missing > 20


def test_branched_entities_have_their_links(blocks):
    count = 0
    for block in blocks.values():
        residues_of = defaultdict(list)
        for row in block.find("_pdbx_entity_branch_list.", ["entity_id", "comp_id"]):
            residues_of[row[0]].append(row[1])
        links = block.find(
            "_pdbx_entity_branch_link.",
            ["entity_id", "entity_branch_list_num_1", "comp_id_1", "leaving_atom_id_1"],
        )
        for entity, codes in residues_of.items():
            rows = [row for row in links if row[0] == entity]
            assert len(rows) == len(codes) - 1
            assert all(codes[int(row[1]) - 1] == row[2] and row[3] == "O1" for row in rows)
            count += 1
    assert count >= 2


# --------------------------------------------------------------------------------------------------
# Alignments


def read_a3m(path: Path) -> list[tuple[str, str]]:
    lines = read_gz(path).splitlines()
    return list(zip((line[1:] for line in lines[::2]), lines[1::2], strict=True))


def read_stockholm(path: Path) -> tuple[dict[str, str], str]:
    """Rows by name and the reference line, interleaved blocks joined."""
    rows: dict[str, str] = defaultdict(str)
    reference = ""
    for line in read_gz(path).splitlines():
        if line.startswith("#=GC RF"):
            reference += line.split()[2]
        elif line and line[0] not in "#/":
            name, text = line.split()
            rows[name] += text
    return dict(rows), reference


def test_alignments_belong_to_their_chains(corpus, chain_rows):
    root = corpus.structures.parent
    deletions = insertions = fragments = 0
    for row in chain_rows:
        sequence = row["sequence"]
        assert hashlib.sha256(sequence.encode()).hexdigest() == row["sequence_sha256"]
        if row["kind"] == "dna":
            assert row["alignments"] == ""
            continue
        assert row["alignments"] == f"alignments/{row['sequence_sha256'][:16]}"
        files = {path.name: path for path in (root / row["alignments"]).iterdir()}
        for name, path in files.items():
            if ".a3m" in name:
                rows = read_a3m(path)
                assert rows[0][1] == sequence
                assert 50 <= len(rows) <= 300
                for _, text in rows:
                    assert sum(not letter.islower() for letter in text) == len(sequence)
                    insertions += sum(letter.islower() for letter in text)
                    deletions += text.strip("-").count("-")
                    fragments += text.count("-") > len(text) / 4
            elif not name.startswith("hmmsearch"):
                texts, reference = read_stockholm(path)
                columns = [i for i, mark in enumerate(reference) if mark == "x"]
                assert "".join(texts["query"][i] for i in columns) == sequence
                assert texts["query"].replace("-", "") == sequence
                assert {len(text) for text in texts.values()} == {len(reference)}
    assert deletions > 100
    assert insertions > 100
    assert fragments > 50


def test_row_names_count_their_residues(corpus):
    for path in corpus.alignments.glob("*/uniprot_hits.a3m.gz"):
        for name, text in read_a3m(path)[1:]:
            first, last = map(int, fields(r".*?/(\d+)-(\d+) ", name))
            assert last - first + 1 == sum(letter.isalpha() for letter in text)


def test_heterodimers_share_species(corpus, chain_rows):
    root, by_entry = corpus.structures.parent, defaultdict(list)
    for row in chain_rows:
        if row["kind"] == "protein":
            by_entry[row["entry"]].append(row["alignments"])
    pairs = [folders for folders in by_entry.values() if len(folders) == 2]
    assert len(pairs) == corpus.counts["heterodimer"]
    for folders in pairs:
        species = [
            {
                fields(r"tr\|[^|]+\|\w+_(\w+)/", name)[0]
                for name, _ in read_a3m(root / folder / "uniprot_hits.a3m.gz")[1:]
            }
            for folder in folders
        ]
        assert len(species[0] & species[1]) >= 15


def test_rna_alignments_keep_base_pairs(corpus, structures, chain_rows):
    """Compensating changes: columns that pair in the hairpin pair in most homologs too."""
    found = 0
    for row in chain_rows:
        if row["kind"] != "rna" or not structures[row["entry"]].info["_struct.title"].startswith(
            "An RNA hairpin"
        ):
            continue
        folder = corpus.structures.parent / row["alignments"]
        rows = [
            "".join(c for c in text if not c.islower())
            for _, text in read_a3m(folder / "rnacentral_hits.a3m.gz")
        ]
        pairs = [
            (text[i], text[-1 - i]) for text in rows for i in range(6) if "-" not in (text[i], text[-1 - i])
        ]
        canonical = {("A", "U"), ("U", "A"), ("G", "C"), ("C", "G"), ("G", "U"), ("U", "G")}
        assert np.mean([pair in canonical for pair in pairs]) > 0.99
        assert len(set(pairs)) >= 4
        found += 1
    assert found == corpus.counts["rna-hairpin"]


def released(block: gemmi.cif.Block) -> date:
    return date.fromisoformat(block.find_loop("_pdbx_audit_revision_history.revision_date")[0])


def test_template_hits_match_their_entries(corpus, structures, blocks, chain_rows):
    sequences = {
        (row["entry"], chain): row["sequence"] for row in chain_rows for chain in row["subchains"].split(",")
    }
    others = gaps = inserted = 0
    for row in chain_rows:
        if row["kind"] != "protein":
            continue
        rows, reference = read_stockholm(
            corpus.structures.parent / row["alignments"] / "hmmsearch_hits.sto.gz"
        )
        assert reference.count("x") == len(row["sequence"])
        assert any(name.startswith(row["entry"]) for name in rows)
        for name, text in rows.items():
            entry, chain, first, last = fields(r"(\w{4})_(\w)/(\d+)-(\d+)$", name)
            letters = re.sub("[-.]", "", text).upper()
            assert letters == sequences[entry, chain][int(first) - 1 : int(last)]
            assert all(
                letter.isupper() or letter == "-" if mark == "x" else letter.islower() or letter == "."
                for letter, mark in zip(text, reference, strict=True)
            )
            inserted += sum(letter.islower() for letter in text)
            gaps += text.strip("-.").count("-")
            if entry != row["entry"]:
                assert (released(blocks[row["entry"]]) - released(blocks[entry])).days >= 60
                assert structures[entry][0][chain]
                others += 1
    assert others > 20
    assert gaps > 0
    assert inserted > 0


def test_templates_have_the_query_fold(corpus, structures, chain_rows):
    """Aligned CA atoms superpose: relatives share a fold, as superposed by gemmi."""
    deviations = []
    for row in chain_rows:
        if row["kind"] != "protein":
            continue
        rows, reference = read_stockholm(
            corpus.structures.parent / row["alignments"] / "hmmsearch_hits.sto.gz"
        )
        query = alpha_carbons(structures[row["entry"]][0][row["subchains"]])
        for name, text in rows.items():
            entry, chain, first = fields(r"(\w{4})_(\w)/(\d+)-", name)
            hit = alpha_carbons(structures[entry][0][chain])
            position_, residue, pairs = 0, int(first) - 1, []
            for letter, mark in zip(text, reference, strict=True):
                position_ += mark == "x"
                residue += letter.isalpha()
                if mark == "x" and letter.isupper() and position_ in query and residue in hit:
                    pairs.append((query[position_], hit[residue]))
            one, two = zip(*pairs, strict=True)
            assert len(pairs) > 20
            deviations.append(gemmi.superpose_positions(list(one), list(two)).rmsd)
    assert max(deviations) < 6
    assert np.median([d for d in deviations if d > 0.01]) < 3.5


def alpha_carbons(chain: gemmi.Chain) -> dict[int, gemmi.Position]:
    return {sequence_number(residue): residue["CA"][0].pos for residue in chain.get_polymer()}
