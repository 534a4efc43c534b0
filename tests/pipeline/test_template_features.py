"""The ``template`` object: against gemmi's own reading of the template's residues, and every skip reason."""

import functools
import gzip
import hashlib
import shutil
from types import SimpleNamespace
from typing import Any

import gemmi
import numpy as np
import pytest

from megafold.cache_store import LocalStore
from megafold.pipeline import schema
from megafold.pipeline.builder.tasks import Outcome, TemplateTask
from megafold.pipeline.errors import InputError, TemplateError
from megafold.pipeline.schema import AMINO_ACIDS, RESTYPES
from megafold.pipeline.template import VERSION, TemplateStructures, featurize_templates
from megafold.pipeline.template.structures import TemplateEntry
from tests.pipeline.structure_files import write_binary

GAP = RESTYPES.index("-")
UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"

CIF = """data_X
_entry.id X
loop_
_entity.id
_entity.type
1 polymer
loop_
_entity_poly.entity_id
_entity_poly.type
_entity_poly.pdbx_seq_one_letter_code_can
1 'polypeptide(L)' GASMK
loop_
_entity_poly_seq.entity_id
_entity_poly_seq.num
_entity_poly_seq.mon_id
1 1 GLY
1 2 ALA
1 3 SER
1 4 MSE
1 5 LYS
{revision}
loop_
_struct_asym.id
_struct_asym.entity_id
B 1
loop_
_atom_site.group_PDB
_atom_site.id
_atom_site.type_symbol
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_asym_id
_atom_site.label_entity_id
_atom_site.label_seq_id
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.occupancy
_atom_site.B_iso_or_equiv
_atom_site.auth_seq_id
_atom_site.auth_asym_id
_atom_site.pdbx_PDB_model_num
ATOM 1 N N . GLY B 1 1 1.0 0.0 0.0 1 9 11 H 1
ATOM 2 C CA . GLY B 1 1 2.0 0.0 0.0 1 9 11 H 1
ATOM 3 C C . GLY B 1 1 3.0 0.0 0.0 1 9 11 H 1
ATOM 4 N N A ALA B 1 2 4.0 1.0 0.0 0.4 9 12 H 1
ATOM 5 N N B ALA B 1 2 4.0 2.0 0.0 0.6 9 12 H 1
ATOM 6 C CA A ALA B 1 2 5.0 1.0 0.0 0.4 9 12 H 1
ATOM 7 C CA B ALA B 1 2 5.0 2.0 0.0 0.6 9 12 H 1
ATOM 8 C C . ALA B 1 2 6.0 0.0 0.0 1 9 12 H 1
ATOM 9 C CB A ALA B 1 2 7.0 1.0 0.0 0.4 9 12 H 1
ATOM 10 C CB B ALA B 1 2 7.0 2.0 0.0 0.6 9 12 H 1
HETATM 11 N N . MSE B 1 4 8.1234 0.0 0.0 1 9 14 H 1
HETATM 12 C CA . MSE B 1 4 9.0 0.0 0.0 1 9 14 H 1
HETATM 13 C CB . MSE B 1 4 9.5 0.0 0.0 1 9 14 H 1
ATOM 14 N N . GLY B 1 1 91.0 0.0 0.0 1 9 11 H 2
"""
NEW_DATES = """loop_
_pdbx_audit_revision_history.ordinal
_pdbx_audit_revision_history.revision_date
2 2011-07-13
1 1998-03-18
"""
OLD_DATES = """loop_
_database_PDB_rev.num
_database_PDB_rev.date
_database_PDB_rev.date_original
1 1995-02-07 1994-10-12
2 2003-04-01 ?
"""


def write_structure(folder, entry, revision="", pack=bytes, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{entry}.cif{suffix}"
    path.write_bytes(pack(CIF.format(revision=revision).encode()))
    return path


def write_hits(folder, *rows, width=5):
    """A Stockholm hit list of aligned rows without insertions."""
    path = folder / "hmmsearch_hits.sto"
    body = "".join(f"{name} {row}\n" for name, row in rows)
    path.write_text(f"# STOCKHOLM 1.0\n#=GF AU hmmsearch\n{body}#=GC RF {'x' * width}\n//\n")
    return path


def make(sequence, files, structures):
    """The object that the readable files give."""
    content = featurize_templates(sequence, files, structures).content
    if content is not None:
        schema.validate("template", content.arrays, content.attributes)
    return content


def load(structures, entry):
    loaded = structures.load(entry)
    assert isinstance(loaded, TemplateEntry)
    return loaded


def test_by_hand(tmp_path):
    write_structure(tmp_path / "pdb", "1abc", NEW_DATES)
    hits = write_hits(tmp_path, ("1abc_H/2-5", "-ASMK"), ("1abc_B/1-4", "GASM-"))
    content = make("GASMR", [hits], TemplateStructures([tmp_path / "pdb"]))
    assert content.attributes["hits"] == {
        "entry": ["1abc", "1abc"],
        "chain": ["H", "B"],  # the author's id, then the file's own
        "release_date": ["1998-03-18"] * 2,
    }
    assert content.attributes["skipped"] == {}
    assert content.arrays["hits"].T.tolist() == [[750, 800, 4, 1, 4], [1000, 800, 4, 0, 3]]
    names = ["GLY", "ALA", "SER", "MET", "LYS"]
    classes = [RESTYPES.index(name) for name in names]
    assert content.arrays["template_restype"].tolist() == [[GAP, *classes[1:]], [*classes[:4], GAP]]
    nan = [np.nan] * 3
    glycine = [[1, 0, 0], [2, 0, 0], [3, 0, 0], [2, 0, 0]]  # pseudo-beta: CA
    alanine = [[4, 2, 0], [5, 2, 0], [6, 0, 0], [7, 2, 0]]  # the conformer of higher occupancy, whole
    methionine = [[8.123, 0, 0], [9, 0, 0], nan, [9.5, 0, 0]]
    expected = np.array(
        [
            [[nan] * 4, alanine, [nan] * 4, methionine, [nan] * 4],
            [glycine, alanine, [nan] * 4, methionine, [nan] * 4],
        ],
        np.float32,
    )
    np.testing.assert_array_equal(content.arrays["template_atom_pos"], expected)


@pytest.mark.parametrize(
    ("revision", "date"), [(NEW_DATES, "1998-03-18"), (OLD_DATES, "1995-02-07"), ("", None)]
)
def test_release_date(tmp_path, revision, date):
    write_structure(tmp_path, "1abc", revision)
    assert load(TemplateStructures([tmp_path]), "1abc").release_date == date


def test_letters_are_those_of_the_entrys_canonical_sequence(tmp_path):
    """Pyroglutamate was glutamine, as the wwPDB writes it; tables of residues say glutamate."""
    path = write_structure(tmp_path, "1abc")
    text = (
        path.read_text().replace("GASMK", "QASMK").replace("1 1 GLY", "1 1 PCA").replace("GLY B 1", "PCA B 1")
    )
    path.write_text(text)
    (chain,) = load(TemplateStructures([tmp_path]), "1abc").chains
    assert chain.sequence == "QASMK"
    assert chain.atom_pos[0, :3, 0].tolist() == [1, 2, 3]
    path.write_text(text.replace("QASMK", "QASM"))  # not one letter a residue: then the tables' letters
    (chain,) = load(TemplateStructures([tmp_path]), "1abc").chains
    assert chain.sequence == "EASMK"


def test_every_reason_to_skip(tmp_path):
    write_structure(tmp_path / "pdb", "1abc")
    (tmp_path / "pdb" / "2bad.cif").write_text("data_x\nloop_\n_a.b\n_a.c\n1 2 3\n")
    hits = write_hits(
        tmp_path,
        ("1abc_H/1-5", "GASMK"),
        ("1abc_H/1-2", "GA---"),
        ("9xyz_A/1-5", "GASMK"),
        ("1abc_Z/1-5", "GASMK"),
        ("1abc_B/1-5", "GWSMK"),
        ("2bad_A/1-5", "GASMK"),
        ("AF-P01112-F1/1-5", "GASMK"),
    )
    content = make("GASMK", [hits], TemplateStructures([tmp_path / "pdb"]))
    assert content.attributes["skipped"] == {
        "chain-not-found": 1,
        "no-chain-id": 1,
        "no-structure": 1,
        "sequence-mismatch": 1,
        "too-short": 1,
        "unreadable-structure": 1,
    }
    assert content.arrays["hits"].shape == (5, 1)
    (source,) = content.attributes["sources"]
    assert (source["hits"], source["kept"]) == (7, 1)
    assert content.attributes["warnings"] == ["2bad: its structure file cannot be read"]
    (failure,) = featurize_templates("GASMK", [hits], TemplateStructures([tmp_path / "pdb"])).failures
    assert failure.reason == "unreadable-structure"
    assert "2bad.cif" in str(failure)


def test_hits_all_skipped_are_an_object_that_says_so(tmp_path):
    (tmp_path / "pdb").mkdir()
    hits = write_hits(tmp_path, ("9xyz_A/1-5", "GASMK"))
    content = make("GASMK", [hits], TemplateStructures([tmp_path / "pdb"]))
    assert content.arrays["template_restype"].shape == (0, 5)
    assert content.attributes["skipped"] == {"no-structure": 1}
    store = LocalStore.create(tmp_path / "cache")
    with store.open(store.put(content)) as reader:
        assert reader.read_all().digest() == content.digest()


def test_golden_digest(tmp_path):
    """What the stage makes of these inputs. Where it changes, raise ``VERSION`` in features.py."""
    write_structure(tmp_path / "pdb", "1abc", NEW_DATES)
    hits = write_hits(tmp_path, ("1abc_H/2-5", "-ASMK"), ("9xyz_A/1-5", "GASMK"))
    content = make("GASMR", [hits], TemplateStructures([tmp_path / "pdb"]))
    assert VERSION == 3
    assert str(content.digest()) == "1b389b53fbb84ceaa7579750cdc080b1f2d8123e6a3d022c0f2a0455827af801"


def test_a_wrong_offset_is_found_by_the_letters(tmp_path):
    write_structure(tmp_path, "1abc")
    shifted = write_hits(tmp_path, ("1abc_H/101-104", "-ASMK"))
    content = make("GASMK", [shifted], TemplateStructures([tmp_path]))
    assert content.arrays["template_atom_pos"][0, 1, 1].tolist() == [5, 2, 0]
    unknown = write_hits(tmp_path, ("1abc_H", "-AXXK"))
    content = make("GASMK", [unknown], TemplateStructures([tmp_path]))
    assert content.arrays["template_atom_pos"][0, 1, 1].tolist() == [5, 2, 0]


def test_unsupported_and_broken_files(tmp_path):
    write_structure(tmp_path, "1abc")
    (tmp_path / "a.m8").write_text("101\t1abc_H\t1.0\t5\n")
    (tmp_path / "b.hhr.gz").write_bytes(gzip.compress(b"Query q\n" * 99)[:-9])
    hits = write_hits(tmp_path, ("1abc_H/1-5", "GASMK"))
    structures = TemplateStructures([tmp_path])
    files = [tmp_path / "a.m8", tmp_path / "b.hhr.gz", hits]
    result = featurize_templates("GASMK", files, structures)
    (failure,) = result.failures
    assert isinstance(failure, TemplateError)
    assert failure.reason == "broken-compression"
    assert "b.hhr.gz" in str(failure)
    content = make("GASMK", files, structures)
    assert content.attributes["skipped"] == {"unsupported-hit-format": 1}
    assert content.arrays["hits"].shape == (5, 1)
    (mismatch,) = featurize_templates("WWWWWW", [hits], structures).failures
    assert mismatch.reason == "query-mismatch"
    assert str(hits) in str(mismatch)
    assert make("WWWWWW", [hits], structures) is None
    assert make("GASMK", [], structures) is None


def test_folders(tmp_path):
    first, second = tmp_path / "mine", tmp_path / "pdb"
    mine = write_structure(first, "1ABC")
    write_structure(second / "ab", "1abc")
    divided = write_structure(second / "xy", "2xyz", pack=gzip.compress, suffix=".gz")
    structures = TemplateStructures([first, second])
    assert len(structures) == 2
    assert structures.path("1abc") == mine  # the earlier folder wins
    assert structures.path("2XYZ") == divided
    assert "2xyz" in structures
    assert "3abc" not in structures
    assert structures.path("3abc") is None
    assert structures.load("3abc") is None
    assert structures.digest("3abc") is None
    assert structures.digest("2xyz") == load(structures, "2xyz").digest
    assert [chain.auth_asym_id for chain in load(structures, "2xyz").chains] == ["H"]
    assert len(TemplateStructures([mine])) == 1


def same_entry(one: TemplateEntry, other: TemplateEntry) -> bool:
    return (one.entry, one.release_date) == (other.entry, other.release_date) and all(
        (a.label_asym_id, a.auth_asym_id, a.sequence) == (b.label_asym_id, b.auth_asym_id, b.sequence)
        and np.array_equal(a.atom_pos, b.atom_pos, equal_nan=True)
        for a, b in zip(one.chains, other.chains, strict=True)
    )


@pytest.mark.parametrize("suffix", [".bcif", ".bcif.gz"])
def test_binary_files_are_the_same_templates(tmp_path, suffix):
    text = write_structure(tmp_path / "text", "1abc", NEW_DATES)
    (tmp_path / "binary").mkdir()
    binary = tmp_path / "binary" / f"1ABC{suffix}"
    write_binary(text, binary)
    structures = TemplateStructures([binary.parent])
    assert structures.path("1abc") == binary
    assert load(structures, "1abc").chains[0].sequence == "GASMK"
    assert same_entry(load(structures, "1abc"), load(TemplateStructures([text.parent]), "1abc"))


def test_a_binary_file_that_is_none_is_named(tmp_path):
    (tmp_path / "1abc.bcif").write_bytes(b"dear reader")
    with pytest.raises(TemplateError, match=r"1abc\.bcif") as caught:
        TemplateStructures([tmp_path]).load("1abc")
    assert caught.value.reason == "unreadable-structure"


@pytest.mark.corpus
@pytest.mark.parametrize("entry", ["1cbs", "1ay7", "2hhb", "4cup"])
def test_binary_files_of_the_corpus_are_the_same_templates(corpus_dir, tmp_path, entry):
    source = corpus_dir / f"structures/{entry}.cif.gz"
    write_binary(source, tmp_path / f"{entry}.bcif")
    as_text = load(TemplateStructures([source]), entry)
    assert len(as_text.chains) > 0
    assert same_entry(load(TemplateStructures([tmp_path]), entry), as_text)


def test_the_same_bytes_count_once(tmp_path):
    write_structure(tmp_path, "1abc")
    hits = write_hits(tmp_path, ("1abc_H/1-5", "GASMK"))
    twin = shutil.copy(hits, tmp_path / "more_hits.sto")
    content = make("GASMK", [hits, twin], TemplateStructures([tmp_path]))
    assert content.arrays["hits"].shape == (5, 1)
    assert content.attributes["warnings"] == [
        "more_hits.sto: the same bytes as hmmsearch_hits.sto, counted once"
    ]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(TemplateError, match="nowhere") as caught:
        TemplateStructures([tmp_path / "nowhere"])
    assert caught.value.reason == "no-such-folder"


def test_memory_is_bounded(tmp_path):
    for index in range(4):
        write_structure(tmp_path, f"{index}abc")
    structures = TemplateStructures([tmp_path], capacity=2)
    kept = load(structures, "0abc")
    load(structures, "1abc")
    assert structures.load("0abc") is kept
    load(structures, "2abc")  # 1abc was used longest ago
    assert structures.load("0abc") is kept
    (tmp_path / "1abc.cif").unlink()
    with pytest.raises(TemplateError, match="1abc"):
        structures.load("1abc")


def test_a_template_of_the_entry_itself_is_kept(tmp_path):
    """Which templates a sample may see is the stream's choice, by date and entry."""
    write_structure(tmp_path, "1abc")
    content = make("GASMK", [write_hits(tmp_path, ("1abc_H/1-5", "GASMK"))], TemplateStructures([tmp_path]))
    assert content.attributes["hits"]["entry"] == ["1abc"]


@pytest.mark.corpus
def test_real_hits_have_the_coordinates_gemmi_reads(corpus_dir):
    """Rows of the corpus' own hit lists: each aligned residue has the template residue's atoms."""
    structures = TemplateStructures([corpus_dir / "structures"])
    lines = (corpus_dir / "chains.tsv").read_text().splitlines()
    header = lines[0].split("\t")
    rows = [dict(zip(header, line.split("\t"), strict=True)) for line in lines[1:]]
    n_hit = n_residue = 0
    for row in rows[::4]:
        path = corpus_dir / row["alignments"] / "hmmsearch_hits.sto.gz"
        if not row["alignments"] or not path.exists():
            continue
        content = make(row["sequence"], [path], structures)
        assert content.attributes["skipped"].keys() <= {"no-structure", "too-short"}
        hits = content.attributes["hits"]
        for index, (entry, chain) in enumerate(zip(hits["entry"], hits["chain"], strict=True)):
            restype = content.arrays["template_restype"][index]
            positions = content.arrays["template_atom_pos"][index]
            assert np.isnan(positions[restype == GAP]).all()
            expected = read_by_columns(corpus_dir / "structures" / f"{entry}.cif.gz", chain)
            n_residue += compare(restype, positions, expected)
            n_hit += 1
    assert n_hit > 100
    assert n_residue > 3000


@functools.cache
def read_by_columns(path, chain):
    """[(component, {atom name: its positions})] of a chain's residues, from the atom table's columns.

    ``chain`` may be of either scheme; altlocs give an atom several positions. Rounded to 1e-3 Å.
    """
    tags = "label_asym_id auth_asym_id label_comp_id label_atom_id label_seq_id ?pdbx_PDB_model_num"
    table = gemmi.cif.read(str(path))[0].find("_atom_site.", ["Cartn_x", "Cartn_y", "Cartn_z", *tags.split()])
    residues: dict[tuple, dict[str, set]] = {}
    for item in table:
        label, author, component, atom, number = (item.str(k) for k in range(3, 8))
        if chain in (label, author):
            where = (label, number, component, item.str(8) if item.has(8) else "")
            xyz = np.round([float(item[k]) for k in range(3)], 3).astype(np.float32)
            residues.setdefault(where, {}).setdefault(atom, set()).add(tuple(xyz))
    return [(where[2], atoms) for where, atoms in residues.items()]


def compare(restype, positions, residues):
    """Every aligned residue with a CA must be one of the file's, and all its atoms from that residue.

    Returns how many there are.
    """
    by_ca = {xyz: residue for residue in residues for xyz in residue[1].get("CA", ())}
    present = np.flatnonzero((restype != GAP) & ~np.isnan(positions[:, 1, 0]))
    for index in present:
        component, atoms = by_ca[tuple(positions[index, 1])]
        if component in AMINO_ACIDS:
            assert RESTYPES[restype[index]] == component
        for slot, name in enumerate(("N", "CA", "C", "CA" if component == "GLY" else "CB")):
            if np.isnan(positions[index, slot, 0]):
                assert name not in atoms
            else:
                assert tuple(positions[index, slot]) in atoms[name]
    return len(present)


@pytest.mark.corpus
def test_ubiquitin_to_the_letter(corpus_dir, tmp_path):
    """1ubq chain A as its own template: all 76 residues, coordinates as deposited, released 1987-04-16."""
    shutil.copy(corpus_dir / "more" / "structures" / "1ubq.cif.gz", tmp_path)
    hits = write_hits(tmp_path, ("1ubq_A/1-76", UBIQUITIN), width=76)
    content = make(UBIQUITIN, [hits], TemplateStructures([tmp_path]))
    assert content.arrays["hits"].T.tolist() == [[1000, 1000, 76, 0, 75]]
    assert content.attributes["hits"]["release_date"] == ["1987-04-16"]
    positions = content.arrays["template_atom_pos"][0]
    np.testing.assert_array_equal(
        positions[0], np.array([[27.340, 24.430, 2.614], [26.266, 25.413, 2.842],
                                [26.913, 26.639, 3.531], [25.112, 24.880, 3.649]], np.float32)
    )  # fmt: skip
    chain = gemmi.read_structure(str(tmp_path / "1ubq.cif.gz"))[0]["A"]
    for index, residue in enumerate(list(chain)[:76]):
        beta = "CA" if residue.name == "GLY" else "CB"
        expected = [residue.find_atom(name, "*").pos.tolist() for name in ("N", "CA", "C", beta)]
        np.testing.assert_allclose(positions[index], expected, atol=1e-5)


@pytest.mark.corpus
def test_every_structure_of_the_corpus_loads(corpus_dir):
    """Re-written, legacy and odd files: a template source must not stumble over them."""
    structures = TemplateStructures([corpus_dir / "more" / "variants"], capacity=1)
    n_chain = 0
    for path in sorted((corpus_dir / "more" / "variants").iterdir()):
        loaded = load(structures, path.name.removesuffix(".cif.gz"))
        for chain in loaded.chains:
            assert chain.atom_pos.shape == (len(chain.sequence), 4, 3)
            assert np.isfinite(chain.atom_pos[:, 1]).any()
            n_chain += 1
    assert n_chain > 20


def test_a_structure_that_changes_is_told_from_the_one_that_was_read(tmp_path):
    """Also once others have been read, which are kept in its place."""
    first, second = write_structure(tmp_path, "1abc"), write_structure(tmp_path, "2xyz")
    structures = TemplateStructures([tmp_path], capacity=1)
    digests = {"1ABC": sha256(first), "2xyz": sha256(second), "9zzz": ""}
    assert structures.changed(digests) == []
    load(structures, "1abc")
    load(structures, "2xyz")
    assert structures.agrees_with(digests)
    write_structure(tmp_path, "1abc", NEW_DATES)
    edited = {**digests, "1ABC": sha256(first)}
    assert structures.changed(edited) == ["1ABC"]
    assert not structures.agrees_with(edited)
    load(structures, "1abc")
    assert structures.changed(digests) == ["1ABC"]
    assert structures.agrees_with(edited)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_structure_edited_during_a_build_is_never_anothers_template(tmp_path):
    """The recipe has the digest of the file as the build found it, the worker reads it later."""
    path, hits = write_structure(tmp_path / "pdb", "1abc"), write_hits(tmp_path, ("1abc_H/1-5", "GASMK"))
    worker: Any = SimpleNamespace(
        sequence=lambda structure, entity: "GASMK",
        templates=lambda digests: TemplateStructures([tmp_path / "pdb"]),
        publish=lambda content: "published",
    )
    task = TemplateTask(
        recipe="r",
        label="protein",
        structure="s",
        entity_id=1,
        files=(hits,),
        structures={"1abc": sha256(path)},
    )
    assert task.run(worker) == Outcome(result={"object": "published", "hits": 1})
    write_structure(tmp_path / "pdb", "1abc", NEW_DATES)
    with pytest.raises(InputError, match="protein: template structure 1abc changed") as caught:
        task.run(worker)
    assert caught.value.reason == "changed-meanwhile"
