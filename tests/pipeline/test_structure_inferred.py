"""Bonds that geometry shows: those that the files of the corpus tell of, found again without being told."""

from dataclasses import replace

import gemmi
import numpy as np
import pytest

from megafold.pipeline.schema import BondKind
from megafold.pipeline.structure.elements import COVALENT_RADII, IS_METAL
from tests.pipeline.structure_files import NO_FILTERS, CifFile, definition, make

#: gemmi's table has other values here: carbon sp2, and lutetium and hafnium the other way round.
OTHER_RADII = {"C", "Lu", "Hf"}


def test_radii_and_metals_are_those_of_gemmi():
    for number in range(1, 97):
        element = gemmi.Element(number)
        if element.name not in OTHER_RADII:
            assert COVALENT_RADII[number] == pytest.approx(element.covalent_r, abs=0.011), element.name
        # Arsenic, tellurium and astatine aside, which are no metals here.
        assert IS_METAL[number] == element.is_metal or element.name in ("Ge", "Sb", "Po", "At"), element.name


def place(file, code, asym, seq, name, at, **options):
    """A residue with one of its atoms at a given place."""
    component = definition(code)
    shift = np.asarray(at) - component.ideal_pos[component.atom_index[name]]
    return file.add(code, asym, seq, at=shift, **options)


def test_disulfide_and_a_third_sulfur(tmp_path):
    """The two closest sulfurs are bonded; one that touches both has no partner left."""
    file = CifFile().polymer("CYS GLY CYS GLY CYS")
    for seq, x in ((1, 0), (3, 2.05)):
        place(file, "CYS", "A", seq, "SG", (x, 0, 0), only=("CA", "CB", "SG"))
    place(file, "CYS", "A", 5, "SG", (1.0, 2.2, 0), only=("SG",))
    made = make(file.write(tmp_path))
    assert made.bonds() == [("0:CYS.SG", "0:CYS.SG", BondKind.DISULFIDE)]
    assert made.tables["residues"]["label_seq_id"][
        made.atom_residue[[made.tables["bonds"]["atom_i"][0], made.tables["bonds"]["atom_j"][0]]]
    ].tolist() == [1, 3]
    assert made.tables["bonds"]["order"].tolist() == [1]
    assert made.attributes["changed"] == {"bonds_inferred": 1}
    assert any(
        "1 bonds between residues are told by geometry" in text for text in made.attributes["warnings"]
    )
    off = make(tmp_path / "test.cif", replace(NO_FILTERS, infer_bonds=False))
    assert off.bonds() == []


def glycoprotein(distance=1.45):
    """ASN with NAG at its ND2 and a second NAG at the first one's O4, without a row that says so."""
    file = CifFile().polymer("GLY ASN GLY")
    place(file, "ASN", "A", 2, "ND2", (0, 0, 0))
    sugar = definition("NAG")
    heavy = np.flatnonzero(sugar.heavy)
    names = [sugar.atom_names[index] for index in heavy]
    pos = sugar.ideal_pos[heavy] - sugar.ideal_pos[sugar.atom_index["C1"]]
    # The ring points away from what C1 is bonded to.
    ring = pos[names.index("C4")] / np.linalg.norm(pos[names.index("C4")])
    nitrogen = -ring * distance
    asparagine = file.atoms[:]
    file.atoms.clear()
    for line in asparagine:
        fields = line.split()
        fields[10:13] = [f"{float(v) + shift:.3f}" for v, shift in zip(fields[10:13], nitrogen, strict=True)]
        file.atoms.append(" ".join(fields))
    for name, index, at in zip(names, heavy, pos, strict=True):
        if name != "O1":
            file.atom(name, "NAG", "B", ".", at, element=int(sugar.elements[index]), entity="2", auth=1)
    start = pos[names.index("O4")] + ring * 1.43
    for name, index, at in zip(names, heavy, pos, strict=True):
        if name != "O1":
            file.atom(
                name, "NAG", "B", ".", start + at, element=int(sugar.elements[index]), entity="2", auth=2
            )
    return file


def test_glycan_without_rows(tmp_path):
    made = make(glycoprotein().write(tmp_path))
    assert made.bonds() == [
        ("0:ASN.ND2", "1:NAG.C1", BondKind.GLYCOSIDIC),
        ("1:NAG.O4", "2:NAG.C1", BondKind.GLYCOSIDIC),
    ]
    # Both sugars have lost the oxygen of their anomeric carbon.
    assert ["O1" in made.names(residue) for residue in (-2 % len(made.codes), -1 % len(made.codes))] == [
        False
    ] * 2


@pytest.mark.parametrize("distance", [0.9, 1.8])
def test_what_is_no_bond_length_is_no_bond(tmp_path, distance):
    made = make(glycoprotein(distance).write(tmp_path))
    assert made.bonds() == [("1:NAG.O4", "2:NAG.C1", BondKind.GLYCOSIDIC)]


def test_a_sugar_with_its_oxygen_is_not_linked(tmp_path):
    """The atom that would have had to leave is there."""
    file = CifFile().polymer("GLY ASN GLY")
    place(file, "ASN", "A", 2, "ND2", (0, 0, 0))
    file.add("NAG", "B", at=-definition("NAG").ideal_pos[definition("NAG").atom_index["C1"]] + (0, 0, 1.45),
             entity="2", only=set(definition("NAG").atom_names))  # fmt: skip
    assert make(file.write(tmp_path)).bonds() == []


def test_atoms_that_are_only_too_close_are_not_bonded(tmp_path):
    """Methyl to methyl, hydroxyl to methyl, ammonium to carboxylate: none of them could react."""
    pairs = [("ALA", "CB", "ALA", "CB"), ("SER", "OG", "ALA", "CB"), ("LYS", "NZ", "ASP", "OD1")]
    for index, (first, atom, second, other) in enumerate(pairs):
        file = CifFile().polymer(f"GLY {first} GLY").polymer(f"GLY {second} GLY", entity="2")
        place(file, first, "A", 2, atom, (0, 0, 0), only=("CA", atom))
        place(file, second, "B", 2, other, (0, 0, 1.5), only=("CA", "CG", other), entity="2")
        assert make(file.write(tmp_path, f"{index}.cif")).bonds() == []


@pytest.mark.parametrize("has_rows", [False, True])
def test_metals_only_where_the_file_tells_of_no_bond_at_all(tmp_path, has_rows):
    file = CifFile().polymer("GLY HIS GLY").polymer("CYS GLY", entity="3")
    place(file, "HIS", "A", 2, "NE2", (0, 0, 0))
    place(file, "CYS", "C", 1, "SG", (0, 0, 4.3), only=("SG",), entity="3")
    file.atom("ZN", "ZN", "B", ".", (0, 0, 2.05), element=30, entity="2")
    if has_rows:
        file.loop("_struct_conn", "id conn_type_id", "1 hydrog")
    bonds = make(file.write(tmp_path)).bonds()
    zinc = [("0:HIS.NE2", "2:ZN.ZN", BondKind.METAL), ("1:CYS.SG", "2:ZN.ZN", BondKind.METAL)]
    assert bonds == ([] if has_rows else zinc)


@pytest.mark.parametrize(
    ("code", "atom", "bonded"),
    [
        ("PLP", "C4A", True),  # a thiol adds to an aldehyde, whose oxygen stays
        ("NAG", "C7", False),  # to an amide it does not,
        ("NAG", "C8", False),  # nor to a methyl
    ],
)
def test_what_a_thiol_adds_to(tmp_path, code, atom, bonded):
    file = CifFile().polymer("GLY CYS GLY")
    component = definition(code)
    centre = component.ideal_pos[component.atom_index[atom]]
    others = component.ideal_pos[component.heavy] - centre
    # Out of the way of the ligand's other atoms, a C-S bond from its carbon.
    rng = np.random.default_rng(5)
    ways = rng.normal(size=(500, 3))
    ways *= 1.82 / np.linalg.norm(ways, axis=1, keepdims=True)
    distance = np.linalg.norm(ways[:, None] - others[None], axis=2)
    distance[:, np.linalg.norm(others, axis=1) < 0.01] = np.inf
    way = ways[distance.min(axis=1).argmax()]
    place(file, "CYS", "A", 2, "SG", way, only=("SG",))
    names = {name for name, heavy in zip(component.atom_names, component.heavy, strict=True) if heavy}
    file.add(code, "B", at=-centre, entity="2", only=names)
    bonds = make(file.write(tmp_path)).bonds()
    assert bonds == ([("0:CYS.SG", f"1:{code}.{atom}", BondKind.COVALENT)] if bonded else [])


@pytest.mark.parametrize(("distance", "bonded"), [(1.47, True), (2.2, False)])
def test_boron_has_a_bond_to_take(tmp_path, distance, bonded):
    """Bortezomib at a serine: its boron keeps both hydroxyls."""
    component = definition("BO2")
    boron, *others = (component.ideal_pos[component.atom_index[name]] for name in ("B26", "O27", "O28"))
    normal = np.cross(others[0] - boron, others[1] - boron)
    file = CifFile().polymer("GLY SER GLY")
    place(file, "SER", "A", 2, "OG", distance * normal / np.linalg.norm(normal), only=("OG",))
    names = {name for name, heavy in zip(component.atom_names, component.heavy, strict=True) if heavy}
    file.add("BO2", "B", at=-boron, entity="2", only=names)
    bonds = make(file.write(tmp_path)).bonds()
    assert bonds == ([("0:SER.OG", "1:BO2.B26", BondKind.COVALENT)] if bonded else [])


@pytest.mark.parametrize(("absent", "bonded"), [("O2P", True), ("", False), ("C5A", False)])
def test_a_phosphate_that_lost_a_hydroxyl_is_bonded(tmp_path, absent, bonded):
    """Pyridoxal phosphate at a histidine: no definition marks the hydroxyl, but it is not there."""
    file = CifFile().polymer("GLY HIS GLY")
    component = definition("PLP")
    atoms = {
        name: component.ideal_pos[component.atom_index[name]] for name in ("P", "O1P", "O2P", "O3P", "O4P")
    }
    out = atoms["P"] - (atoms["O1P"] + atoms["O3P"] + atoms["O4P"]) / 3
    place(file, "HIS", "A", 2, "NE2", 1.7 * out / np.linalg.norm(out), only=("NE2",))
    names = {name for name, heavy in zip(component.atom_names, component.heavy, strict=True) if heavy}
    file.add("PLP", "B", at=-atoms["P"], entity="2", only=names - {absent})
    bonds = make(file.write(tmp_path)).bonds()
    assert bonds == ([("0:HIS.NE2", "1:PLP.P", BondKind.COVALENT)] if bonded else [])


@pytest.mark.parametrize(
    ("code", "seq", "atom", "bonded"),
    [
        ("GLY", 1, "N", True),  # an amine has a lone pair
        ("GLY", 2, "N", False),  # the nitrogen of a peptide bond has none
        ("ASN", 2, "ND2", False),  # nor has an amide's
        ("ASN", 2, "OD1", True),
        ("HIS", 2, "ND1", True),
        ("ALA", 2, "CB", False),
    ],
)
def test_what_holds_a_metal(tmp_path, code, seq, atom, bonded):
    codes = ["GLY", "GLY", "GLY"]
    codes[seq - 1] = code
    file = CifFile().polymer(" ".join(codes))
    place(file, code, "A", seq, atom, (0, 0, 0), only=("CA", atom))
    file.atom("ZN", "ZN", "B", ".", (0, 0, 2.1), element=30, entity="2")
    assert make(file.write(tmp_path)).bonds() == (
        [(f"0:{code}.{atom}", "1:ZN.ZN", BondKind.METAL)] if bonded else []
    )


def without_rows(path, target):
    """The file without what it says about bonds between residues."""
    document = gemmi.cif.read(str(path))
    for category in ("_struct_conn.", "_pdbx_entity_branch_link."):
        document[0].find_mmcif_category(category).erase()
    document.write_file(str(target))
    return target


def bonds_at(made):
    """Bonds by the coordinates of their atoms."""
    table = made.tables["bonds"]
    ends = np.round(np.stack([made.coords[table["atom_i"]], made.coords[table["atom_j"]]], axis=1), 3)
    return {
        frozenset(map(tuple, pair.tolist())): BondKind(kind)
        for pair, kind in zip(ends, table["kind"], strict=True)
    }


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("path", "least"),
    [
        ("more/structures/1b5f", 10),  # glycans with a branch, disulfides
        ("more/structures/1u19", 8),  # retinal's Schiff base, palmitates, acetyl caps, sugars as ligands
        ("more/structures/3vfj", 8),  # a cross-linked glycopeptide
        ("more/structures/6lu7", 2),  # a peptide-like inhibitor at a cysteine
        ("more/structures/6tzg", 4),  # boronic acids at serines
        ("more/structures/3nig", 20),
        ("more/structures/6yrq", 8),
        ("more/structures/8u4l", 20),
        ("structures/1igt", 20),
        ("structures/1ncb", 10),
    ],
)
def test_told_covalent_bonds_are_found_without_being_told(corpus_dir, tmp_path, path, least):
    source = corpus_dir / f"{path}.cif.gz"
    options = replace(NO_FILTERS, assembly="asym")
    told = make(source, replace(options, infer_bonds=False))
    found = make(without_rows(source, tmp_path / "bare.cif"), options)
    wanted, got = (
        {bond: kind for bond, kind in bonds_at(made).items() if kind != BondKind.METAL}
        for made in (told, found)
    )
    across = told.attributes["filtered"].get("bonds_out_of_assembly", 0)
    assert got == wanted
    assert len(wanted) >= least
    assert across == 0
    # The same atoms have left.
    assert told.content.arrays["atoms"].shape == found.content.arrays["atoms"].shape


@pytest.mark.corpus
@pytest.mark.parametrize("entry", ["1ehz", "1juh", "3vd8", "7avw", "1fbl"])
def test_most_told_metal_bonds_are_found_and_few_others(corpus_dir, tmp_path, entry):
    """Files draw them up to 3.4 Å; by the radii only the closer ones are."""
    source = corpus_dir / f"more/structures/{entry}.cif.gz"
    options = replace(NO_FILTERS, assembly="asym")
    told = make(source, replace(options, infer_bonds=False))
    found = make(without_rows(source, tmp_path / "bare.cif"), options)
    wanted, got = (
        {bond for bond, kind in bonds_at(made).items() if kind == BondKind.METAL} for made in (told, found)
    )
    assert len(got & wanted) > 0.6 * len(wanted)
    assert len(got - wanted) <= 2
