"""For each tag of the corpus manifest: what it has to mean, read off the file by gemmi's CIF parser.

Nothing here uses the product's own reading of the file. A check gets a case and asserts.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from megafold.pipeline.schema import RESTYPES, BondKind, MolType
from tests.pipeline.structure_case import WATERS, Case

#: AF3 SI table 9.
AIDS = "SO4 GOL EDO PO4 ACT PEG DMS TRS PGE PG4 FMT EPE MPD MES CD IOD".split()
KINDS = {
    "polypeptide(L)": MolType.PROTEIN,
    "polydeoxyribonucleotide": MolType.DNA,
    "polyribonucleotide": MolType.RNA,
}


def _no_atom_is_lost(case: Case) -> None:
    """Every heavy atom of the file is in the object or counted."""
    left = case.asym.attributes["filtered"]
    gone = ("alternate_locations", "repeated_atoms", "atoms_outside_definition", "leaving_atoms")
    has_place = np.isfinite(case.coords(case.kept)).all(axis=1)
    resolved = int(case.asym.tables["atoms"]["resolved"].sum())
    assert resolved + sum(left.get(reason, 0) for reason in gone) == has_place.sum()


def _one_letter_a_residue(case: Case) -> None:
    """All atoms with a letter that a residue kept have the same letter."""
    rows = np.flatnonzero(case.kept & (case.sites["label_alt_id"] != ""))
    letters: dict[tuple[float, ...], set[str]] = {}
    for place, letter in zip(case.coords(rows).tolist(), case.sites["label_alt_id"][rows], strict=True):
        letters.setdefault(tuple(place), set()).add(letter)
    found: dict[int, list[set[str]]] = {}
    for place, residue in zip(case.asym.coords.astype(float), case.asym.atom_residue, strict=True):
        key = tuple((np.round(place, 3) + 0.0).tolist())
        if key in letters:
            found.setdefault(int(residue), []).append(letters[key])
    # The alternates may be of waters alone.
    assert bool(found) == bool(len(rows)) == bool(case.asym.attributes["filtered"].get("alternate_locations"))
    assert all(set.intersection(*of_residue) for of_residue in found.values())


def _assembly_one(case: Case) -> None:
    """Chains by operators, and the second copy at the place that its matrix says."""
    assert case.made.attributes["assembly"] == "1"
    wanted = Counter((asym, op) for asym, ops in case.operators.items() for op in ops)
    waters = set(case.asym_of_entity_type.get("water", ()))
    got = Counter(
        (label.split(".")[0], op)
        for label, op in zip(case.made.labels, case.made.attributes["chains"]["operator"], strict=True)
    )
    present = set(case.sites["label_asym_id"].tolist()) - waters
    assert {key for key in wanted if key[0] in present} == set(got)
    matrices = {row[0]: np.array(row[1:], float).reshape(3, 4) for row in case.rows(
        "pdbx_struct_oper_list", "id", *(f"{n}[{i}]{c}" for i in "123"
        for n, c in (("matrix", "[1]"), ("matrix", "[2]"), ("matrix", "[3]"), ("vector", ""))))}  # fmt: skip
    for chain, op in enumerate(case.made.attributes["chains"]["operator"]):
        label = case.made.labels[chain]
        ours = case.made.coords[case.made.atom_chain == chain]
        original = case.asym.coords[case.asym.atom_chain == case.asym.labels.index(label)].astype(float)
        moved = original @ matrices[op][:, :3].T + matrices[op][:, 3]
        np.testing.assert_allclose(ours, moved, atol=2e-3)


def _chains_of_the_unit(case: Case) -> None:
    """Chains by the file's own names, each once."""
    waters = set(case.asym_of_entity_type.get("water", ()))
    named = set(case.sites["label_asym_id"][case.kept].tolist()) - waters
    assert {label.split(".")[0] for label in case.asym.labels} == named
    assert len(set(case.asym.labels)) == len(case.asym.labels)


def _as_deposited(case: Case) -> None:
    """No ``pdbx_struct_assembly``: the coordinates as they are, unless generators tell of an assembly."""
    generators = [row[0] for row in case.rows("pdbx_struct_assembly_gen", "assembly_id")]
    if not generators:
        assert case.made.attributes["assembly"] == "asym"
        assert set(case.made.attributes["chains"]["operator"]) == {""}
    else:
        assert case.made.attributes["assembly"] == ("1" if "1" in generators else generators[0])


def _expanded(case: Case) -> None:
    _as_deposited(case)
    _chains_of_the_unit(case)
    mapped = case.mapping("pdbx_chain_remapping", "label_asym_id", "orig_label_asym_id")
    entity_of = dict(zip(case.asym.labels, case.asym.tables["chains"]["entity_id"].tolist(), strict=True))
    for copy, original in mapped.items():
        if copy in entity_of and original in entity_of:
            assert entity_of[copy] == entity_of[original]


def _file_name_is_the_id(case: Case) -> None:
    assert case.made.attributes["entry"] == case.path.name.split(".")[0]


def _bonds(*types: str, least: int = 1) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        told, found = case.told_bonds(*types), case.found_bonds()
        # Of alternates only some are there.
        missing = [bond for bonds in told if len(bonds) == 1 for bond in bonds if bond not in found]
        # Bonds between neighbours of a polymer are implied.
        coords = np.nan_to_num(case.asym.coords, nan=1e6)
        for bond in missing:
            ends = [int(np.argmin(np.linalg.norm(coords - place, axis=1))) for place in bond]
            residues = sorted(case.asym.atom_residue[ends].tolist())
            assert residues[1] - residues[0] == 1
            assert case.asym.atom_chain[ends[0]] == case.asym.atom_chain[ends[1]]
        assert len(told) >= least

    return check


def _metals(case: Case) -> None:
    found = {bond for bond, kind in case.found_bonds().items() if kind == BondKind.METAL}
    symbols = case.sites["type_symbol"][case.kept]
    elements = dict(zip(map(tuple, case.coords(case.kept).tolist()), map(str.upper, symbols), strict=True))
    nonmetals = {"C", "N", "O", "P", "S", "SE", "F", "CL", "BR", "I", "B"}
    for bonds in case.told_bonds("metalc"):
        has_metal = any(not {elements[place] for place in bond} <= nonmetals for bond in bonds)
        assert bonds & found or len(bonds) > 1 or not has_metal


def _disulfides(case: Case) -> None:
    found = {bond for bond, kind in case.found_bonds().items() if kind == BondKind.DISULFIDE}
    assert all(bonds & found or len(bonds) > 1 for bonds in case.told_bonds("disulf"))


def _glycans(case: Case) -> None:
    """Branched chains are one chain of linked residues, with a bond for each link."""
    chains = case.asym.tables["chains"]
    branched = [
        label
        for label, is_branched in zip(case.asym.labels, chains["is_branched"], strict=True)
        if is_branched
    ]
    assert sorted(branched) == sorted(case.asym_of_entity_type["branched"])
    entity_of = case.mapping("struct_asym", "id", "entity_id")
    links = Counter(row[0] for row in case.rows("pdbx_entity_branch_link", "entity_id"))
    table = case.asym.tables["bonds"]
    ends = case.asym.atom_chain[table["atom_i"]], case.asym.atom_chain[table["atom_j"]]
    for label in branched:
        chain = case.asym.labels.index(label)
        assert ((ends[0] == chain) & (ends[1] == chain)).sum() == links[entity_of[label]]


def _mol_types(*wanted: MolType) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        declared = {KINDS[kind] for kind in case.column("_entity_poly.type") if kind in KINDS}
        assert set(case.polymer_kinds()) >= set(wanted)
        assert set(case.polymer_kinds()) == (declared or set(wanted))

    return check


def _polymer_chains(case: Case) -> Counter[int]:
    chains = case.asym.tables["chains"]
    return Counter(chains["entity_id"][chains["mol_type"] != MolType.LIGAND].tolist())


def _monomer(case: Case) -> None:
    assert sum(_polymer_chains(case).values()) == 1


def _multimer(case: Case) -> None:
    kinds = case.mapping("entity_poly", "entity_id", "type")
    pairs = case.rows("struct_asym", "id", "entity_id")
    wanted = [asym for asym, entity in pairs if kinds.get(entity) in KINDS]
    count = sum(_polymer_chains(case).values())
    assert count == (len(wanted) or count) > 1


def _homomer(case: Case) -> None:
    _multimer(case)
    (entity,) = _polymer_chains(case)
    sym = case.asym.tables["chains"]["sym_id"][case.asym.tables["chains"]["entity_id"] == entity]
    assert sym.tolist() == list(range(1, len(sym) + 1))


def _heteromer(case: Case) -> None:
    _multimer(case)
    assert len(_polymer_chains(case)) > 1


def _method(case: Case) -> None:
    assert case.made.attributes["method"] == "; ".join(dict.fromkeys(case.column("_exptl.method")))


def _no_method(case: Case) -> None:
    assert case.made.attributes["method"] is None


def _no_resolution(case: Case) -> None:
    """None, or what an entry that is no crystal says in the crystals' categories."""
    tags = ("_refine.ls_d_res_high", "_reflns.d_resolution_high")
    refined = [text for tag in tags for text in case.column(tag) if text]
    assert case.made.attributes["resolution"] == (float(refined[0]) if refined else None)


def _coarse(case: Case) -> None:
    assert case.made.attributes["resolution"] == float(case.column("_em_3d_reconstruction.resolution")[0]) > 9


def _no_revision_history(case: Case) -> None:
    """Nothing, or what the older category says."""
    assert not case.column("_pdbx_audit_revision_history.revision_date")
    dates = [date for date in case.column("_database_PDB_rev.date") if date]
    assert case.made.attributes["release_date"] == (min(dates) if dates else None)


def _hydrogens(case: Case) -> None:
    light = np.isin(case.sites["type_symbol"], ["H", "D"]) & ~np.isin(case.sites["label_comp_id"], WATERS)
    assert case.made.attributes["filtered"]["hydrogens"] == (light & case.first_model).sum() > 0
    assert 1 not in case.made.tables["atoms"]["element"]


def _waters(case: Case) -> None:
    heavy = ~np.isin(case.sites["type_symbol"], ["H", "D"])
    water = np.isin(case.sites["label_comp_id"], WATERS) & heavy & case.first_model
    assert case.made.attributes["filtered"]["waters"] == water.sum() > 0
    assert not set(WATERS) & set(case.made.codes)


def _insertion_codes(case: Case) -> None:
    residues = zip(*(case.sites[name][case.kept].tolist() for name in (
        "label_asym_id", "label_seq_id", "auth_seq_id", "pdbx_PDB_ins_code")), strict=True)  # fmt: skip
    wanted = Counter((number, code) for _, _, number, code in set(residues) if code)
    table = case.asym.tables["residues"]
    resolved = table["resolved"].astype(bool) & (table["ins_code"] > 0)
    got = Counter(
        (str(number), chr(code))
        for number, code in zip(table["auth_seq_id"][resolved], table["ins_code"][resolved], strict=True)
    )
    assert got == wanted
    assert wanted


def _models(case: Case) -> None:
    count = len(set(case.sites["pdbx_PDB_model_num"].tolist()))
    assert count > 1
    assert f"{count} models; the first one is used" in case.made.attributes["warnings"]
    _no_atom_is_lost(case)


def _crystallisation_aids(case: Case) -> None:
    first = dict(zip(case.sites["label_asym_id"][::-1], case.sites["label_comp_id"][::-1], strict=True))
    aids = [asym for asym, code in first.items() if code in AIDS]
    is_crystal = "X-RAY DIFFRACTION" in "; ".join(case.column("_exptl.method")).upper()
    count = sum(len(case.operators[asym]) if case.operators else 1 for asym in aids if asym in case.operators
                or not case.operators)  # fmt: skip
    assert case.filtered.attributes["filtered"].get("crystallisation_aids", 0) == (count if is_crystal else 0)


def _ions(codes: tuple[str, ...]) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        single = {asym: code for asym, code in zip(
            case.sites["label_asym_id"][case.kept], case.sites["label_comp_id"][case.kept], strict=True)
            if not codes or code in codes}  # fmt: skip
        atoms = Counter(case.sites["label_asym_id"][case.kept].tolist())
        ions = [code for asym, code in single.items() if atoms[asym] == 1]
        chains = case.asym.tables["chains"]
        alone = chains["first_residue"][(chains["token_count"] == 1) & (chains["mol_type"] == MolType.LIGAND)]
        got = Counter(case.residue_codes()[residue] for residue in alone.tolist())
        assert not Counter(ions) - got
        assert got

    return check


def _ligands(case: Case) -> None:
    codes = set(case.sites["label_comp_id"][case.kept].tolist())
    assert codes
    assert {"MET" if code == "MSE" else code for code in codes} <= set(case.residue_codes())


def _missing_residues(case: Case) -> None:
    """Positions of the sequence without atoms are tokens without coordinates."""
    has_atoms = set(
        zip(case.sites["label_asym_id"][case.kept], case.sites["label_seq_id"][case.kept], strict=True)
    )
    residues, wanted = case.asym.tables["residues"], 0
    for asym, codes in case.sequences.items():
        chain = case.asym.labels.index(asym)
        resolved = residues["resolved"][residues["chain"] == chain].astype(bool).tolist()
        assert resolved == [(asym, str(number)) in has_atoms for number in range(1, len(codes) + 1)]
        wanted += resolved.count(False)
    assert wanted


def _sequences(case: Case) -> None:
    for asym, codes in case.sequences.items():
        chain = case.asym.labels.index(asym)
        ours = [
            case.residue_codes()[i] for i in np.flatnonzero(case.asym.tables["residues"]["chain"] == chain)
        ]
        assert ours == ["MET" if code == "MSE" else code for code in codes]


def _modified_residues(case: Case) -> None:
    """All that is neither standard nor selenomethionine is one token an atom."""
    _sequences(case)
    residues = case.asym.tables["residues"]
    tokens = np.bincount(case.asym.tables["tokens"]["residue"], minlength=len(case.asym.codes))
    codes = np.array(case.residue_codes())
    in_polymer = case.asym.tables["chains"]["mol_type"][residues["chain"]] != MolType.LIGAND
    standard = np.isin(codes, RESTYPES)
    assert (tokens[in_polymer & standard] == 1).all()
    odd = in_polymer & ~standard
    assert (residues["is_standard"][odd] == 0).all()
    assert (tokens[odd] == np.bincount(case.asym.atom_residue, minlength=len(codes))[odd]).all()


def _has(code: str) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        count = len({key for key in zip(case.sites["label_asym_id"], case.sites["auth_seq_id"],
                     case.sites["label_comp_id"], strict=True) if key[2] == code})  # fmt: skip
        assert case.residue_codes().count(code) == count > 0

    return check


def _selenomethionine(case: Case) -> None:
    sites = case.sites
    keys = set(zip(sites["label_asym_id"], sites["auth_seq_id"], sites["label_comp_id"], strict=True))
    count = sum(key[2] == "MSE" for key in keys)
    assert case.asym.attributes["changed"]["selenomethionine_to_methionine"] == count > 0


def _d_amino_acids(case: Case) -> None:
    d_codes = {
        code for code, kind in case.rows("chem_comp", "id", "type") if kind.upper().startswith("D-PEPTIDE")
    }
    present = d_codes & set(case.sites["label_comp_id"].tolist())
    assert present
    for residue, code in enumerate(case.residue_codes()):
        if code in present:
            assert case.asym.tables["residues"]["is_standard"][residue] == 0


def _labels(case: Case) -> None:
    _chains_of_the_unit(case)
    assert any(len(label) > 1 for label in case.asym.labels)


def _negative_numbers(case: Case) -> None:
    lowest = min(map(int, case.sites["auth_seq_id"][case.kept].tolist()))
    resolved = case.asym.tables["residues"]["resolved"].astype(bool)
    assert case.asym.tables["residues"]["auth_seq_id"][resolved].min() == lowest < 0


def _no_polymer_categories(case: Case) -> None:
    """A polymer is read off the atoms, or there is none."""
    assert not case.column("_entity_poly.entity_id")
    for entity in case.asym.attributes["entities"]:
        assert bool(entity["sequence"]) == (entity["mol_type"] != MolType.LIGAND)


def _saccharides(case: Case) -> None:
    kinds = case.mapping("chem_comp", "id", "type")
    sugars = {code for code, kind in kinds.items() if "SACCHARIDE" in kind.upper()}
    wanted = {code for code in case.sites["label_comp_id"].tolist() if code in sugars}
    assert wanted
    standard = case.asym.tables["residues"]["is_standard"]
    assert wanted == {
        code
        for code, whole in zip(case.residue_codes(), standard, strict=True)
        if code in sugars and not whole
    }


def _unbranched_sugars(case: Case) -> None:
    """Sugars that the file calls non-polymers are chains of their own, bonded all the same."""
    sugars = {"NAG", "NDG", "MAN", "BMA", "BGC", "BOG", "GCS", "T55"} & set(
        case.sites["label_comp_id"].tolist()
    )
    chains = case.asym.tables["chains"]
    codes = case.residue_codes()
    alone = [
        codes[first]
        for first, n in zip(chains["first_residue"], chains["residue_count"], strict=True)
        if n == 1
    ]
    assert sugars
    assert set(alone) & sugars


def _zero_occupancy(case: Case) -> None:
    zero = case.kept & (case.sites["occupancy"].astype(float) == 0) & (case.sites["label_alt_id"] == "")
    resolved = case.asym.tables["atoms"]["resolved"].astype(bool)
    assert (case.asym.occupancy[resolved] == 0).sum() >= zero.sum()


def _unknown_ligands(case: Case) -> None:
    assert {"UNL", "UNX"} & set(case.residue_codes())


def _unknown_residues(case: Case) -> None:
    unknown = np.flatnonzero(np.isin(case.residue_codes(), ["UNK", "N", "DN"]))
    classes = case.asym.tables["tokens"]["restype"][np.isin(case.asym.tables["tokens"]["residue"], unknown)]
    assert len(unknown)
    assert {RESTYPES[index] for index in classes} <= {"UNK", "N", "DN"}


def _own(code: str) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        assert code in {component.code for component in case.asym.own}
        assert f"~{code}:" in " ".join(case.asym.attributes["components"])

    return check


def _predicted(case: Case) -> None:
    """All there, confidence where the B factor is, no experiment."""
    assert case.made.attributes["method"] is None
    assert case.made.tables["atoms"]["resolved"][:-1].all()
    ours = case.asym.content.arrays["atom_occupancy_b"][:, 1]
    theirs = case.sites["B_iso_or_equiv"][case.kept].astype(float)
    assert np.nanmean(ours) == np.float32(theirs.mean()) or abs(np.nanmean(ours) - theirs.mean()) < 1e-3


def _same_places_as(entry: str) -> Callable[[Case], None]:
    """Another program's file has the atoms of the entry that it was made from."""

    def check(case: Case) -> None:
        original = Case(case.path.parents[1] / f"structures/{entry}.cif.gz")
        ours = case.asym.coords[np.isfinite(case.asym.coords[:, 0])]
        theirs = original.asym.coords[np.isfinite(original.asym.coords[:, 0])]
        np.testing.assert_allclose(np.sort(ours, axis=0), np.sort(theirs, axis=0), atol=2e-3)

    return check


def _builds(case: Case) -> None:
    _no_atom_is_lost(case)
    _chains_of_the_unit(case)


_PROTEIN, _DNA, _RNA = MolType.PROTEIN, MolType.DNA, MolType.RNA

#: What to check of an entry with the tag. Tags of files that are refused or broken are in the test itself.
CHECKS: dict[str, Callable[[Case], None]] = {
    "afdb": _predicted,
    "altloc": _one_letter_a_residue,
    "antibody": _heteromer,
    "assemblies>1": _assembly_one,
    "assembly-expanded": _expanded,
    "assembly-operators": _assembly_one,
    "capping-group": _modified_residues,
    "colon-in-comp-id": _own("L:0"),
    "covalent-ligand": _bonds("covale"),
    "crosslink": _bonds("covale", least=3),
    "crystallization-aid": _crystallisation_aids,
    "cut-from-entry": _builds,
    "d-amino-acid": _d_amino_acids,
    "disulfide": _disulfides,
    "dna": _mol_types(_DNA),
    "edited-chain-ids": _labels,
    "electron-microscopy": _method,
    "entry-id:XXXX": _file_name_is_the_id,
    "fiber-diffraction": _method,
    "glycan-branched": _glycans,
    "glycosylation": _bonds("covale"),
    "halide-ion": _ions(("CL", "BR", "IOD", "F")),
    "heteromer": _heteromer,
    "homomer": _homomer,
    "hydrogens": _hydrogens,
    "insertion-code": _insertion_codes,
    "integrative-model": _no_method,
    "interchain-covalent": _bonds("covale"),
    "large-assembly": _multimer,
    "legacy-mmcif": _no_revision_history,
    "ligand": _ligands,
    "metal-ion": _ions(()),
    "metalc": _metals,
    "missing-loop": _missing_residues,
    "missing-residues": _missing_residues,
    "modelarchive": _predicted,
    "modelcif": _predicted,
    "modified-nucleotide": _modified_residues,
    "modified-residue": _modified_residues,
    "modified:KCX": _has("KCX"),
    "modified:MSE": _selenomethionine,
    "modified:PTR": _has("PTR"),
    "monomer": _monomer,
    "multi-letter-chain": _labels,
    "multi-model": _models,
    "multimer": _multimer,
    "negative-numbering": _negative_numbers,
    "no-assembly": _as_deposited,
    "no-entity-poly": _no_polymer_categories,
    "no-entry-id": _file_name_is_the_id,
    "no-method": _no_method,
    "no-release-date": _no_revision_history,
    "no-resolution": _no_resolution,
    "pdbe-updated": _builds,
    "predicted": _predicted,
    "protein": _mol_types(_PROTEIN),
    "protein-dna": _mol_types(_PROTEIN, _DNA),
    "protein-rna": _mol_types(_PROTEIN, _RNA),
    "resolution>9": _coarse,
    "rewritten-by:AtomWorks": _builds,
    "rewritten-by:ChimeraX": _same_places_as("1ake"),
    "rewritten-by:Phenix": _builds,
    "rewritten-by:PyMOL": _same_places_as("1fbl"),
    "rewritten-by:Scipion": _builds,
    "rna": _mol_types(_RNA),
    "rna-only": _mol_types(_RNA),
    "saccharide": _saccharides,
    "solution-nmr": _method,
    "unbranched-sugar": _unbranched_sugars,
    "unknown-ligand": _unknown_ligands,
    "unknown-residue": _unknown_residues,
    "user-component": _ligands,
    "user-component:UNL": _own("UNL"),
    "water": _waters,
    "x-ray-diffraction": _method,
    "zero-occupancy": _zero_occupancy,
}
