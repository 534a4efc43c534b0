"""The stream over real entries, against the files themselves as gemmi and a ten-line A3M reader see them."""

import gzip
from typing import Any

import gemmi
import numpy as np
import pytest

from megafold.cache_store import LocalStore
from megafold.pipeline import schema
from megafold.pipeline.alignments import ChainAlignments
from megafold.pipeline.builder.tasks import structure_row
from megafold.pipeline.chemistry import load_dictionary
from megafold.pipeline.chemistry.conformers import build_reference
from megafold.pipeline.chemistry.library import library_content
from megafold.pipeline.manifest import MANIFEST_SCHEMA, manifest_from_rows
from megafold.pipeline.msa import MsaRows, featurize_msa, pair_msas
from megafold.pipeline.schema import MolType
from megafold.pipeline.stream import (
    CropConfig,
    SamplingConfig,
    Stream,
    StreamConfig,
    TemplateConfig,
    validate_sample,
)
from megafold.pipeline.stream.symmetry import exchanges
from megafold.pipeline.structure import StructureOptions, featurize_structure
from megafold.pipeline.template import TemplateStructures, featurize_templates

pytestmark = pytest.mark.corpus

#: Haemoglobin with haems; two deep alignments; an antibody with glycans; a polymerase with DNA; NMR models;
#: two antibody fragments with a glycan each.
ENTRIES = ("2hhb", "7zzx", "5zyh", "1igt", "5ugo", "1lcd", "6mub")


def featurize_entry(store, corpus, entry, dictionary, components):
    """Build one entry and return its manifest row."""
    path = corpus / "structures" / f"{entry}.cif.gz"
    result = featurize_structure(path, entry, dictionary, StructureOptions())
    row = structure_row(result.content)
    components.update({component.key: component for component in result.own_components})
    components.update({key: dictionary.get(key) for key in set(row["components"]) - set(components)})
    templates = TemplateStructures((corpus / "structures",))
    by_entity: dict[int, dict[str, str]] = {}
    msas = []
    entities: Any = result.content.attributes["entities"]
    for chain in row["chains"]:
        number = chain["entity_id"]
        sequence = entities[number - 1]["sequence"]
        folder = corpus / "alignments" / chain["sequence_digest"][:16]
        if number not in by_entity:
            by_entity[number] = {"msa": "", "template": ""}
            if sequence and folder.is_dir():
                files = ChainAlignments.of_files(folder.iterdir())
                msa = featurize_msa(sequence, MolType[chain["mol_type"].upper()], files.msas).content
                template = featurize_templates(sequence, files.hits, templates).content
                if msa is not None:
                    msas.append(msa)
                    by_entity[number]["msa"] = str(store.put(msa))
                if template is not None:
                    by_entity[number]["template"] = str(store.put(template))
        chain.update(by_entity[number])
        chain.update(msa_depth=0, msa_status="ok" if chain["msa"] else "none", n_template=0, cluster="")
    pairing = pair_msas([MsaRows.from_content(msa) for msa in msas])
    wanted = set(MANIFEST_SCHEMA.names)
    return {name: value for name, value in row.items() if name in wanted} | {
        "structure": str(store.put(result.content)),
        "pairing": "" if pairing is None else str(store.put(pairing)),
        "recipes": {},
        "source": f"structures/{entry}.cif.gz",
        "source_digest": "",
    }


@pytest.fixture(scope="module")
def cache(corpus_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "cache"
    store = LocalStore.create(path)
    dictionary = load_dictionary()
    components: dict[str, Any] = {}
    rows = [featurize_entry(store, corpus_dir, entry, dictionary, components) for entry in ENTRIES]
    library = store.put(library_content([build_reference(item) for item in components.values()]))
    attributes = {"components": str(library), "config": {}, "versions": {}}
    store.move_ref("main", None, store.put_manifest(manifest_from_rows(rows, attributes)))
    return path


def stream_of(cache, entry, **changes):
    values: dict[str, Any] = {
        "sampling": SamplingConfig(entries=(entry,), epoch_size=1000),
        "crop": CropConfig(tokens=96, atoms=800),
        # 2hhb is older than all its templates
        "template": TemplateConfig(days_before_release=-100_000),
    }
    return Stream(cache, StreamConfig(**values | changes))


def gemmi_atoms(corpus, entry):
    """{(label_asym_id, label_seq_id or None, component, atom name): [positions]} of the first model."""
    structure = gemmi.read_structure(str(corpus / "structures" / f"{entry}.cif.gz"))
    structure.remove_alternative_conformations()
    atoms: dict[Any, list[Any]] = {}
    for chain in structure[0]:
        for residue in chain:
            for atom in residue:
                key = (residue.subchain, residue.label_seq, residue.name, atom.name)
                atoms.setdefault(key, []).append(np.array(atom.pos.tolist()))
    return atoms


def atom_keys(stream, sample):
    """The same keys for a sample's atoms, from its own features and its manifest row."""
    features = sample.features
    labels = [chain.label_asym_id for chain in stream.entry(row_of(stream)).chains]
    token = features["atom_to_token"]
    names = ["".join(chr(c + 32) for c in chars).strip() for chars in features["ref_atom_name_chars"]]
    for atom, name in enumerate(names):
        place = token[atom]
        label = labels[features["asym_id"][place] - 1]
        is_ligand = features["is_ligand"][place]
        yield label, None if is_ligand else int(features["residue_index"][place]), name


def row_of(stream):
    return int(stream.sampler.rows[0])


@pytest.mark.parametrize("entry", ENTRIES)
def test_samples_of_real_entries_fit_the_schema(cache, entry):
    for tokens, atoms in ((384, 4608), (64, 300)):
        stream = stream_of(cache, entry, crop=CropConfig(tokens=tokens, atoms=atoms))
        for index in range(6):
            sample = stream.sample(index)
            validate_sample(sample.features)
            assert sample.meta["entry"] == entry
            assert len(sample.features["token_mask"]) <= tokens
            assert len(sample.features["atom_mask"]) <= atoms
            assert sample.features["coords_mask"].any()
            assert sample.features["ref_mask"].all()


@pytest.mark.parametrize("entry", ["2hhb", "5zyh", "1igt"])
def test_labels_are_the_files_coordinates(corpus_dir, cache, entry):
    atoms = gemmi_atoms(corpus_dir, entry)
    by_name: dict[Any, list[Any]] = {}
    for (label, seq, _, name), positions in atoms.items():
        by_name.setdefault((label, seq, name), []).extend(positions)
    stream = stream_of(cache, entry)
    compared = 0
    for index in range(4):
        sample = stream.sample(index)
        moved, in_file = [], []
        for atom, key in enumerate(atom_keys(stream, sample)):
            found = by_name.get(key, [])
            if key[2] in {"NH1", "NH2"}:  # of arginine; the featurizer may have exchanged their names
                continue
            if len(found) == 1 and sample.features["coords_mask"][atom]:
                moved.append(sample.features["coords"][atom].astype(np.float64))
                in_file.append(found[0])
        ours, theirs = np.array(moved), np.array(in_file)
        assert len(ours) > 100
        compared += len(ours)
        distance = [np.linalg.norm(p[:, None] - p[None], axis=-1) for p in (ours, theirs)]
        assert abs(distance[0] - distance[1]).max() < 2e-3
    assert compared > 1000


def test_bonds_of_a_haem_are_its_short_distances(cache):
    stream = stream_of(cache, "2hhb")
    seen = 0
    for index in range(40):
        features = stream.sample(index).features
        for asym in np.unique(features["asym_id"][features["is_ligand"]]):
            tokens = np.flatnonzero(features["asym_id"] == asym)
            atoms = features["center_atom"][tokens]
            if len(tokens) < 43 or not features["coords_mask"][atoms].all():
                continue
            seen += 1
            position = features["coords"][atoms].astype(np.float64)
            distance = np.linalg.norm(position[:, None] - position[None], axis=-1)
            organic = features["ref_element"][atoms] != 26
            close = (distance < 1.8) & (distance > 0) & organic[:, None] & organic
            bonds = features["token_bonds"][np.ix_(tokens, tokens)]
            np.testing.assert_array_equal(bonds & organic[:, None] & organic, close)
            iron = int(np.flatnonzero(~organic)[0])
            nitrogen = features["ref_element"][atoms] == 7
            np.testing.assert_array_equal(np.flatnonzero(bonds[iron]), np.flatnonzero(nitrogen))
    assert seen


def a3m_rows(path):
    """Aligned rows of an A3M file, insertions dropped."""
    rows = set()
    with gzip.open(path, "rt") as file:
        for block in file.read().split(">")[1:]:
            sequence = "".join(block.split("\n")[1:])
            rows.add("".join(letter for letter in sequence if not letter.islower()))
    return rows


def test_msa_rows_are_rows_of_the_files(corpus_dir, cache):
    stream = stream_of(cache, "7zzx", crop=CropConfig(tokens=500, atoms=6000))
    features = stream.sample(0).features
    row = stream.entry(row_of(stream))
    folder = corpus_dir / "alignments" / row.chains[0].sequence_digest[:16]
    in_files = set().union(*(a3m_rows(path) for path in folder.glob("*.a3m.gz")))
    letters = np.array([*schema.AMINO_ACID_LETTERS, "X", *"?" * 10, "-"])
    protein = np.flatnonzero(features["is_protein"])
    _, first = np.unique(features["residue_index"][protein], return_index=True)
    rows = ["".join(letters[classes]) for classes in features["msa"][:, protein[first]]]
    assert len(rows) == 1024
    assert rows[0] in in_files
    # Ambiguity codes (B, Z, U, …) are classes of their own in no alphabet of 20: rows with them differ.
    assert sum(text in in_files for text in rows) > 1000


def test_paired_rows_fill_both_chains_of_a_haemoglobin(cache):
    stream = stream_of(cache, "2hhb", crop=CropConfig(tokens=400, atoms=6000))
    for index in range(6):
        sample = stream.sample(index)
        features, n_paired = sample.features, sample.meta["paired_rows"]
        entities = [features["entity_id"] == number for number in (1, 2)]
        if not all(entity.any() for entity in entities) or not n_paired:
            continue
        is_gap = features["msa"] == schema.GAP
        has = np.array([~is_gap[:, entity].all(axis=1) for entity in entities])
        assert has[:, 0].all()
        assert has[:, 1 : 1 + n_paired].any(axis=0).all()
        assert (has[:, 1 + n_paired :].sum(axis=0) <= 1).all()
        return
    pytest.fail("no crop held both chains")


def test_templates_lie_on_their_residues(cache):
    stream = stream_of(cache, "2hhb")
    seen = 0
    for index in range(12):
        features = stream.sample(index).features
        frame, mask = features["template_backbone_frame"], features["template_backbone_frame_mask"]
        seen += int(mask.sum())
        # N-CA and CA-C bonds of any protein
        for a, b, length in ((0, 1, 1.46), (1, 2, 1.53)):
            distance = np.linalg.norm(frame[:, :, a] - frame[:, :, b], axis=-1)[mask]
            # A median of a few bonds says little.
            assert len(distance) < 20 or abs(np.median(distance) - length) < 0.03
        assert not mask[:, ~features["is_protein"]].any()
    assert seen > 100


def rmsd_superposed(a, b):
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    return gemmi.superpose_positions([gemmi.Position(*p) for p in a], [gemmi.Position(*p) for p in b]).rmsd


#: The pairs of atoms whose names do not say which is which: the rest of an amino acid's equivalent atoms, and
#: a nucleotide's, are named by handedness (AlphaFold 2 SI table 3, and the carboxylate of the last residue).
AMBIGUOUS = {
    "ASP": {("OD1", "OD2")},
    "GLU": {("OE1", "OE2")},
    "PHE": {("CD1", "CD2"), ("CE1", "CE2")},
    "TYR": {("CD1", "CD2"), ("CE1", "CE2")},
}


@pytest.mark.parametrize("entry", ["2hhb", "5ugo"])
def test_atoms_that_are_named_by_handedness_keep_their_names(cache, entry):
    stream = stream_of(cache, entry, crop=CropConfig(tokens=4000, atoms=40000))
    features, symmetry = stream.sample(0).features, stream.symmetry(0)
    text = ["".join(chr(c + 32) for c in chars).strip() for chars in features["ref_atom_name_chars"]]
    restype = features["restype"][features["atom_to_token"]]
    is_polymer = ~features["is_ligand"][features["atom_to_token"]]
    codes = [schema.RESTYPES[number] for number in restype]
    found: dict[str, set[tuple[str, ...]]] = {}
    for orders in symmetry.automorphisms:
        names = [text[atom] for atom in orders[0]]
        if not is_polymer[orders[0, 0]] or "OP3" in names:  # three oxygens of a first phosphate may turn
            continue
        moved = [
            tuple(sorted((name, text[atom]))) for row in orders for name, atom in zip(names, row, strict=True)
        ]
        found.setdefault(codes[orders[0, 0]], set()).update(pair for pair in moved if pair[0] != pair[1])
    found = {code: pairs - {("O", "OXT")} for code, pairs in found.items()}
    assert {code: pairs for code, pairs in found.items() if pairs} == {
        code: pairs for code, pairs in AMBIGUOUS.items() if code in codes
    }
    assert "VAL" in codes
    assert ("DG" in codes) == (entry == "5ugo")


def test_copies_of_a_chain_superpose_and_equivalent_atoms_are_alike(cache):
    stream = stream_of(cache, "2hhb", crop=CropConfig(tokens=300, atoms=4000))
    features, symmetry = stream.sample(1).features, stream.symmetry(1)
    proteins = [chain for chain in symmetry.chains if len(chain.atoms) > 300]
    assert proteins
    for chain in proteins:
        assert len(chain.candidate_asym_id) == 2
        both = chain.coords_mask.all(axis=0)
        assert both.sum() > 300
        assert rmsd_superposed(*chain.coords[:, both].astype(float)) < 1.0
    names = features["ref_atom_name_chars"]
    rings = 0
    for orders in symmetry.automorphisms:
        element = features["ref_element"][orders]
        assert (element == element[0]).all()
        assert (features["ref_space_uid"][orders] == features["ref_space_uid"][orders[0, 0]]).all()
        assert (np.sort(orders, axis=1) == orders[0]).all()
        text = ["".join(chr(c + 32) for c in chars).strip() for chars in names[orders[0]]]
        if text[-1] in ("CZ", "OH") and "CE2" in text and "NE1" not in text:  # PHE or TYR
            moved = ["".join(chr(c + 32) for c in chars).strip() for chars in names[orders[1]]]
            swapped = {a: b for a, b in zip(text, moved, strict=True) if a != b}
            assert swapped == {"CD1": "CD2", "CD2": "CD1", "CE1": "CE2", "CE2": "CE1"}
            rings += 1
    assert rings


def test_bonded_sugars_go_together(cache):
    """Two glycans whose file has a chain for each of their five sugars, which are 1.3 to 1.6 Å apart."""
    stream = stream_of(cache, "6mub", crop=CropConfig(tokens=990, atoms=8000))
    features = stream.sample(0).features
    found = exchanges(features, stream.symmetry(0))["chains"]
    glycans = [chain for chain in found if chain["candidates"].shape[1] > 1]
    assert [chain["candidates"].shape for chain in glycans] == [(2, 5), (2, 5)]
    assert {tuple(sorted(ids)) for ids in glycans[0]["candidates"].tolist()} == {
        tuple(sorted(ids)) for ids in glycans[1]["candidates"].tolist()
    }
    atom_of_token = features["center_atom"]
    for chain in glycans:
        place = {atom: row for row, atom in enumerate(chain["atoms"].tolist())}
        pairs = [
            (place[int(atom_of_token[i])], place[int(atom_of_token[j])])
            for i, j in np.argwhere(np.triu(features["token_bonds"]))
            if features["asym_id"][i] != features["asym_id"][j] and atom_of_token[i] in place
        ]
        assert len(pairs) == 4
        for coords in chain["coords"]:
            lengths = [np.linalg.norm(coords[i] - coords[j]) for i, j in pairs]
            assert 1.3 < min(lengths) < max(lengths) < 1.6
