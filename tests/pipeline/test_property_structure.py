"""Random structures, written and read by gemmi: what the featurizer makes of them, atom by atom."""

import tempfile
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
from hypothesis import HealthCheck, given, settings

from megafold.pipeline.schema import RESTYPE_INDEX, MolType
from tests.pipeline import invariants
from tests.pipeline.random_structures import StructureDraft, structures, write
from tests.pipeline.structure_files import Made, definition, make

EXAMPLES = 60
POLYMER_KIND = {
    gemmi.PolymerType.PeptideL: MolType.PROTEIN,
    gemmi.PolymerType.Rna: MolType.RNA,
    gemmi.PolymerType.Dna: MolType.DNA,
}
PURINES = {"A", "G", "DA", "DG"}
#: Operators turn float64 coordinates, which are then rounded and stored as float32.
TOLERANCE = 2e-3


class Expected:
    """What gemmi reads: the first model's chains without waters and hydrogens, one alternate each."""

    def __init__(self, path: Path) -> None:
        self.structure = gemmi.read_structure(str(path))
        self.chains: dict[str, dict[int, dict[str, Any]]] = {}
        for chain in self.structure[0]:
            for number, residue in enumerate(chain, 1):
                if residue.entity_type == gemmi.EntityType.Water:
                    continue
                place = residue.label_seq or number
                atoms = [atom for atom in residue if not atom.is_hydrogen()]
                self.chains.setdefault(residue.subchain, {})[place] = {
                    "residue": residue,
                    "atoms": {atom.name: atom for atom in atoms if atom.altloc in ("\0", _letter(atoms))},
                }
        for connection in self.structure.connections:
            if connection.type == gemmi.ConnectionType.Covale:  # the sugar's hydroxyl leaves
                self._item(connection.partner2)["atoms"].pop("O1", None)

    def _item(self, address: gemmi.AtomAddress) -> dict[str, Any]:
        residue = self.structure[0].find_cra(address).residue
        places = self.chains[residue.subchain].values()
        return next(item for item in places if item["residue"].seqid == residue.seqid)

    def bonds(self) -> list[tuple[str, str, str, str]]:
        """Chain and atom of either end, within one copy of the chains."""
        ends = [
            [self.structure[0].find_cra(partner) for partner in (connection.partner1, connection.partner2)]
            for connection in self.structure.connections
        ]
        return [
            (first.residue.subchain, first.atom.name, second.residue.subchain, second.atom.name)
            for first, second in ends
        ]

    def sequence(self, subchain: str) -> list[str]:
        entity = self._entity(subchain)
        if entity.entity_type == gemmi.EntityType.Polymer:
            return list(entity.full_sequence)
        return [item["residue"].name for item in self.chains[subchain].values()]

    def mol_type(self, subchain: str) -> MolType:
        return POLYMER_KIND.get(self._entity(subchain).polymer_type, MolType.LIGAND)

    def _entity(self, subchain: str) -> gemmi.Entity:
        return next(entity for entity in self.structure.entities if subchain in entity.subchains)

    def operators(self) -> dict[str, gemmi.Transform]:
        if not self.structure.assemblies:
            return {"": gemmi.Transform()}
        (generator,) = self.structure.assemblies[0].generators
        return {operator.name: operator.transform for operator in generator.operators}


def _letter(atoms: list[gemmi.Atom]) -> str:
    """The alternate of the higher occupancy, the first where they are equal."""
    return min((-atom.occ, atom.altloc) for atom in atoms)[1]


def check_chains(made: Made, expected: Expected) -> None:
    operators = expected.operators()
    chains = made.attributes["chains"]
    copies = list(zip(chains["label_asym_id"], chains["operator"], strict=True))
    wanted = [(asym, name) for asym in expected.chains for name in operators]
    if expected.structure.assemblies:
        assert sorted(copies) == sorted(wanted)
    else:
        assert sorted(made.labels) == sorted(expected.chains)
    # Chains are one entity exactly where type and residues are the same.
    keys = [(expected.mol_type(asym), tuple(expected.sequence(asym))) for asym in made.labels]
    entities = made.tables["chains"]["entity_id"].tolist()
    assert len(set(zip(keys, entities, strict=True))) == len(set(keys)) == len(set(entities))
    assert made.tables["chains"]["mol_type"].tolist() == [int(kind) for kind, _ in keys]


def check_residues(made: Made, expected: Expected) -> None:
    residues, tokens, codes = made.tables["residues"], made.tables["tokens"], made.codes
    for index, asym in enumerate(made.labels):
        first, count = (made.tables["chains"][name][index] for name in ("first_residue", "residue_count"))
        rows = range(first, first + count)
        assert [codes[row] for row in rows] == expected.sequence(asym)
        is_polymer = expected.mol_type(asym) != MolType.LIGAND
        for place, row in enumerate(rows, 1):
            known = expected.chains[asym].get(place)
            assert residues["label_seq_id"][row] == place
            assert residues["resolved"][row] == (known is not None)
            standard = is_polymer and gemmi.find_tabulated_residue(codes[row]).is_standard()
            assert residues["is_standard"][row] == standard
            own = np.flatnonzero(tokens["residue"] == row)
            if standard:
                assert tokens["restype"][own].tolist() == [RESTYPE_INDEX[codes[row]]]
                check_anchors(made, row, int(own[0]))
            if known is not None:
                assert residues["auth_seq_id"][row] == known["residue"].seqid.num
                assert residues["ins_code"][row] == ord(known["residue"].seqid.icode.strip() or "\0")


def check_anchors(made: Made, residue: int, token: int) -> None:
    code = made.codes[residue]
    if code in RESTYPE_INDEX and RESTYPE_INDEX[code] < 20:
        center, representative = "CA", "CA" if code == "GLY" else "CB"
    else:
        center, representative = "C1'", "C4" if code in PURINES else "C2"
    names, first = made.names(residue), made.tables["tokens"]["first_atom"][token]
    assert names[made.tables["tokens"]["center_atom"][token] - first] == center
    assert names[made.tables["tokens"]["rep_atom"][token] - first] == representative


def check_atoms(made: Made, expected: Expected) -> None:
    """Each atom that gemmi reads is there, where the operator puts it; nothing else has coordinates."""
    operators = expected.operators()
    resolved = made.tables["atoms"]["resolved"] == 1
    total = 0
    for index, asym in enumerate(made.labels):
        name = made.attributes["chains"]["operator"][index]
        transform = operators[name] if expected.structure.assemblies else gemmi.Transform()
        for place, item in expected.chains[asym].items():
            for atom in item["atoms"].values():
                row = made.atom(index, place, atom.name)
                moved = transform.apply(atom.pos).tolist()
                np.testing.assert_allclose(made.coords[row], moved, atol=TOLERANCE)
                assert made.tables["atoms"]["element"][row] == atom.element.atomic_number
                stored = made.content.arrays["atom_occupancy_b"][row]
                np.testing.assert_allclose(stored, [atom.occ, atom.b_iso], rtol=1e-6)
                total += 1
    assert int(resolved.sum()) == total


def check_bonds(made: Made, expected: Expected) -> None:
    """What struct_conn says, in every copy, and nothing else: no two residues lie near each other."""
    bonds, chains = made.tables["bonds"], made.attributes["chains"]
    found = []
    for i, j in zip(bonds["atom_i"].tolist(), bonds["atom_j"].tolist(), strict=True):
        copies = {chains["operator"][made.atom_chain[end]] for end in (i, j)}
        assert len(copies) == 1
        ends = [(chains["label_asym_id"][made.atom_chain[end]], atom_name(made, end)) for end in (i, j)]
        found.append(tuple(sorted(ends)))
    wanted = [tuple(sorted([bond[:2], bond[2:]])) for bond in expected.bonds()]
    assert sorted(found) == sorted(len(expected.operators()) * wanted)


def atom_name(made: Made, atom: int) -> str:
    residue = made.atom_residue[atom]
    return definition(made.codes[residue]).atom_names[made.tables["atoms"]["component_atom"][atom]]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(structures())
def test_random_structures(draft: StructureDraft) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.cif"
        write(draft, path)
        made, again = make(path), make(path)
        expected = Expected(path)
    invariants.check(made.content)
    check_chains(made, expected)
    check_residues(made, expected)
    check_atoms(made, expected)
    check_bonds(made, expected)
    assert again.content.digest() == made.content.digest()
