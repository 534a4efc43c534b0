"""Random small structures for hypothesis, and how gemmi writes them as mmCIF."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gemmi
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.pipeline.structure_files import definition

AMINO: Final = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL".split()
#: Modified residues of proteins, RNA and DNA: tokenised by atom.
CODES: Final = {
    "protein": [*AMINO, "SEP", "TPO", "CSO"],
    "rna": ["A", "C", "G", "U", "PSU", "OMC"],
    "dna": ["DA", "DC", "DG", "DT", "5CM"],
    "ligand": ["NAG", "ATP", "GOL", "BEN", "SAH"],
    "ion": ["ZN", "MG", "CL"],
    "water": ["HOH"],
}
#: Entities that bonds can be drawn between.
BONDED: Final[dict[str, list[tuple[str, tuple[str, ...]]]]] = {
    "": [],
    "disulfide": [("protein", ("CYS", "GLY", "CYS"))],
    "metal": [("protein", ("HIS", "VAL")), ("ion", ("ZN",))],
    "glycan": [("protein", ("ASN", "ALA", "SER")), ("ligand", ("NAG",))],
}
POLYMERS: Final = {
    "protein": gemmi.PolymerType.PeptideL,
    "rna": gemmi.PolymerType.Rna,
    "dna": gemmi.PolymerType.Dna,
}
#: Far enough apart that nothing looks bonded, near enough that chains touch.
SPACING: Final = 12.0
ALT_SHIFT: Final = 0.4


@dataclass(frozen=True)
class ResidueDraft:
    """One residue of a chain. ``missing``: how many of its last atoms the file has not; it keeps one."""

    code: str
    resolved: bool
    missing: int
    has_alternates: bool
    number: int
    ins_code: str


@dataclass(frozen=True)
class ChainDraft:
    """A chain of one of the draft's entities. ``occupancies`` are those of alternates A and B."""

    entity: int
    kind: str
    residues: tuple[ResidueDraft, ...]
    occupancies: tuple[float, float]
    offset: tuple[float, float, float]


@dataclass(frozen=True)
class LinkDraft:
    """A bond between two residues: type, and (chain, residue, atom) of either end."""

    kind: gemmi.ConnectionType
    ends: tuple[tuple[int, int, str], tuple[int, int, str]]


@dataclass(frozen=True)
class StructureDraft:
    """A file. ``shifts``, Å along z: the assembly's operators after the identity; odd ones turn, too."""

    chains: tuple[ChainDraft, ...]
    links: tuple[LinkDraft, ...]
    shifts: tuple[float, ...]
    models: int
    with_hydrogens: bool
    with_assembly: bool


@st.composite
def _residues(draw: DrawFn, codes: tuple[str, ...], kind: str) -> tuple[ResidueDraft, ...]:
    is_polymer = kind in POLYMERS
    residues = []
    number, ins_code = draw(st.integers(-3, 90)), ""
    for code in codes:
        residues.append(
            ResidueDraft(
                code=code,
                resolved=not is_polymer or draw(st.integers(0, 4)) > 0,
                missing=draw(st.sampled_from([0, 0, 0, 0, 1, 3])) if kind not in ("ion", "water") else 0,
                has_alternates=draw(st.integers(0, 4)) == 0,
                number=number,
                ins_code=ins_code,
            )
        )
        if is_polymer and draw(st.integers(0, 5)) == 0:
            ins_code = chr(ord(ins_code or "@") + 1)
        else:
            number, ins_code = number + draw(st.integers(1, 3)), ""
    if not any(residue.resolved for residue in residues):
        residues[0] = ResidueDraft(**{**vars(residues[0]), "resolved": True})
    return tuple(residues)


def _ends(chains: list[ChainDraft], codes: list[str], atom: str) -> list[tuple[int, int, str]]:
    """Atoms of residues of these codes that a bond may end at; an ion's atom is called like the ion."""
    return [
        (index, place, atom or residue.code)
        for index, chain in enumerate(chains)
        for place, residue in enumerate(chain.residues)
        if residue.code in codes and residue.resolved and not residue.has_alternates and not residue.missing
    ]


@st.composite
def _links(draw: DrawFn, chains: list[ChainDraft]) -> tuple[LinkDraft, ...]:
    """Disulfides, metal coordination, N-glycosylation: some of what could be, each residue at most once."""
    sulfurs = _ends(chains, ["CYS"], "SG")
    possible = [
        (gemmi.ConnectionType.Disulf, pair) for pair in zip(sulfurs[::2], sulfurs[1::2], strict=False)
    ]
    for kind, first, second in (
        (gemmi.ConnectionType.MetalC, _ends(chains, ["ZN", "MG"], ""), _ends(chains, AMINO, "O")),
        (gemmi.ConnectionType.Covale, _ends(chains, ["ASN"], "ND2"), _ends(chains, ["NAG"], "C1")),
    ):
        possible += [(kind, pair) for pair in zip(first, second, strict=False)]
    chosen = [LinkDraft(kind, ends) for kind, ends in possible if draw(st.integers(0, 3))]
    used: set[tuple[int, int]] = set()
    links = []
    for link in chosen:
        residues = {end[:2] for end in link.ends}
        if not residues & used:
            links.append(link)
            used |= residues
    return tuple(links)


@st.composite
def structures(draw: DrawFn) -> StructureDraft:
    """Proteins, RNA, DNA, ligands, ions and waters, in any order, some of them several times."""
    entities: list[tuple[str, tuple[str, ...]]] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(CODES)))
        length = draw(st.integers(2, 6)) if kind in POLYMERS else 1
        codes = draw(st.lists(st.sampled_from(CODES[kind]), min_size=length, max_size=length))
        if (kind, tuple(codes)) not in entities:
            entities.append((kind, tuple(codes)))
    entities += [item for item in BONDED[draw(st.sampled_from(list(BONDED)))] if item not in entities]
    if all(kind == "water" for kind, _ in entities):
        entities.append(("protein", ("GLY", "ALA", "TRP")))
    order = draw(st.lists(st.integers(0, len(entities) - 1), max_size=3))
    chains = []
    for place, entity in enumerate([*range(len(entities)), *order]):
        kind, codes = entities[entity]
        first = draw(st.sampled_from([0.3, 0.5, 0.7]))
        chains.append(
            ChainDraft(
                entity=entity,
                kind=kind,
                residues=draw(_residues(codes, kind)),
                occupancies=(first, round(1 - first, 2)),
                offset=(
                    draw(st.floats(-5, 5, width=32)),
                    SPACING * place + draw(st.floats(-1, 1, width=32)),
                    draw(st.sampled_from([0.0, 2.0, 30.0])),
                ),
            )
        )
    return StructureDraft(
        chains=tuple(chains),
        links=draw(_links(chains)),
        shifts=tuple(
            draw(st.lists(st.sampled_from([40.0, 62.5, -111.125]), unique=True, min_size=1, max_size=2))
        ),
        models=draw(st.sampled_from([1, 1, 2])),
        with_hydrogens=draw(st.booleans()),
        with_assembly=draw(st.booleans()),
    )


def chain_name(index: int) -> str:
    """The author's name of a chain."""
    return "ABCDEFGH"[index]


def subchain_name(index: int) -> str:
    """``label_asym_id`` of a chain: not the author's."""
    return f"{'ZYXWVUTS'[index]}{index}"


def write(draft: StructureDraft, path: Path) -> None:
    """Write a draft with gemmi."""
    structure = gemmi.Structure()
    structure.name = "test"
    for number in range(draft.models):
        model = gemmi.Model(number + 1)
        for index, chain in enumerate(draft.chains):
            model.add_chain(_chain(index, chain, draft.with_hydrogens, shift=3.0 * number))
        structure.add_model(model)
    for number in sorted({chain.entity for chain in draft.chains}):
        structure.entities.append(_entity(number, draft))
    if draft.with_assembly:
        structure.assemblies.append(_assembly(draft))
    for number, link in enumerate(draft.links):
        structure.connections.append(_connection(f"link{number}", link, draft))
    structure.make_mmcif_document().write_file(str(path))


def _connection(name: str, link: LinkDraft, draft: StructureDraft) -> gemmi.Connection:
    connection = gemmi.Connection()
    connection.name = name
    connection.type = link.kind
    for partner, (chain, place, atom) in zip(("partner1", "partner2"), link.ends, strict=True):
        residue = draft.chains[chain].residues[place]
        number = gemmi.SeqId(residue.number, residue.ins_code or " ")
        setattr(connection, partner, gemmi.AtomAddress(chain_name(chain), number, residue.code, atom))
    return connection


def _chain(index: int, draft: ChainDraft, with_hydrogens: bool, shift: float) -> gemmi.Chain:
    chain = gemmi.Chain(chain_name(index))
    is_polymer = draft.kind in POLYMERS
    for place, item in enumerate(draft.residues):
        if not item.resolved:
            continue
        residue = gemmi.Residue()
        residue.name = item.code
        residue.seqid = gemmi.SeqId(item.number, item.ins_code or " ")
        residue.subchain = subchain_name(index)
        residue.entity_id = str(draft.entity + 1)
        residue.entity_type = _entity_type(draft.kind)
        residue.het_flag = "A" if is_polymer else "H"
        if is_polymer:
            residue.label_seq = place + 1
        at = np.array(draft.offset) + [SPACING * place + shift, 0, 0]
        for atom in _atoms(item, draft.occupancies, at, with_hydrogens, is_polymer):
            residue.add_atom(atom)
        chain.add_residue(residue)
    return chain


def _atoms(
    draft: ResidueDraft,
    occupancies: tuple[float, float],
    at: np.ndarray,
    with_hydrogens: bool,
    is_polymer: bool,
) -> list[gemmi.Atom]:
    component = definition(draft.code)
    leaves = component.leaving if is_polymer else np.zeros(len(component), bool)
    rows = np.flatnonzero((component.heavy | with_hydrogens) & ~leaves).tolist()
    atoms = []
    for row in rows[: max(1, len(rows) - draft.missing)]:
        for letter, occupancy in (
            zip("AB", occupancies, strict=True) if draft.has_alternates else (("", 1.0),)
        ):
            atom = gemmi.Atom()
            atom.name = component.atom_names[row]
            atom.element = gemmi.Element(int(component.elements[row]))
            atom.altloc = letter or "\0"
            atom.occ = occupancy
            atom.b_iso = 10.0 + row
            atom.pos = gemmi.Position(*(component.ideal_pos[row] + at + ALT_SHIFT * (letter == "B")).tolist())
            atoms.append(atom)
    return atoms


def _entity_type(kind: str) -> gemmi.EntityType:
    if kind in POLYMERS:
        return gemmi.EntityType.Polymer
    return gemmi.EntityType.Water if kind == "water" else gemmi.EntityType.NonPolymer


def _entity(number: int, draft: StructureDraft) -> gemmi.Entity:
    entity = gemmi.Entity(str(number + 1))
    members = [index for index, chain in enumerate(draft.chains) if chain.entity == number]
    first = draft.chains[members[0]]
    entity.entity_type = _entity_type(first.kind)
    entity.subchains = [subchain_name(index) for index in members]
    if first.kind in POLYMERS:
        entity.polymer_type = POLYMERS[first.kind]
        entity.full_sequence = [residue.code for residue in first.residues]
    return entity


def _assembly(draft: StructureDraft) -> gemmi.Assembly:
    assembly = gemmi.Assembly("1")
    generator = gemmi.Assembly.Gen()
    generator.subchains = [subchain_name(index) for index in range(len(draft.chains))]
    for number, shift in enumerate((0.0, *draft.shifts)):
        operator = gemmi.Assembly.Operator()
        operator.name = str(number + 1)
        turn = -1.0 if number % 2 else 1.0
        matrix = gemmi.Mat33([[turn, 0, 0], [0, turn, 0], [0, 0, 1]])
        operator.transform = gemmi.Transform(matrix, gemmi.Vec3(0, 0, shift))
        generator.operators.append(operator)
    assembly.generators.append(generator)
    return assembly
