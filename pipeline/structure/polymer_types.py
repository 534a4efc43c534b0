"""What kind of chain a polymer is, and the one-letter code of its residues."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from megafold.pipeline.chemistry import Component
from megafold.pipeline.schema import (
    AMINO_ACID_LETTERS,
    AMINO_ACIDS,
    DNA_BASES,
    RESTYPE_INDEX,
    RNA_BASES,
    UNKNOWN_RESTYPE,
    MolType,
)

_MOL_TYPES: Final = {
    "polypeptide(l)": MolType.PROTEIN,
    "polypeptide(d)": MolType.PROTEIN,
    "cyclic-pseudo-peptide": MolType.PROTEIN,
    "polyribonucleotide": MolType.RNA,
    "polydeoxyribonucleotide": MolType.DNA,
}
#: Which residue class a one-letter code means in a chain of each type.
_LETTERS: Final = {
    MolType.PROTEIN: dict(zip(AMINO_ACID_LETTERS, AMINO_ACIDS, strict=True)),
    MolType.RNA: {base: base for base in RNA_BASES},
    MolType.DNA: {base[1]: base for base in DNA_BASES},
}
_NUCLEOTIDES: Final = frozenset((*RNA_BASES, *DNA_BASES, "N", "DN"))
_RESIDUES: Final = frozenset((*AMINO_ACIDS, "UNK"))

#: The component that stands for a residue of which nothing is known.
UNKNOWN_RESIDUE: Final = {MolType.PROTEIN: "UNK", MolType.RNA: "N", MolType.DNA: "DN"}


def residue_kind(component: Component) -> MolType | None:
    """The type of polymer that a component links into, None for others."""
    kind = component.type.upper()
    if "PEPTIDE" in kind and "PEPTIDE-LIKE" not in kind:
        return MolType.PROTEIN
    if "RNA" in kind:
        return MolType.RNA
    return MolType.DNA if "DNA" in kind else None


def majority_kind(components: Iterable[Component]) -> MolType | None:
    """The kind of at least half of the components; of RNA and DNA in equal parts, DNA."""
    kinds = [residue_kind(component) for component in components]
    counts = Counter(kind for kind in kinds if kind is not None)
    if not counts:
        return None
    best = max(sorted(counts, reverse=True), key=lambda kind: counts[kind])
    nucleic = counts[MolType.RNA] + counts[MolType.DNA]
    total = nucleic if best in (MolType.RNA, MolType.DNA) else counts[best]
    return best if 2 * total >= len(kinds) else None


def polymer_mol_type(declared: str, components: Sequence[Component]) -> MolType:
    """Type of a polymer chain: what its residues are, where most agree; else what the file declares.

    Polymers that are neither protein nor nucleic acid (peptide nucleic acids, polysaccharides) count as
    ligands of several residues. A DNA/RNA hybrid is what most of its residues are.
    """
    majority = majority_kind(components)
    return majority if majority is not None else _MOL_TYPES.get(declared.lower(), MolType.LIGAND)


def declared_mol_type(declared: str) -> MolType | None:
    """What ``_entity_poly.type`` says, None where it says nothing of the three kinds."""
    return _MOL_TYPES.get(declared.lower())


def is_whole(code: str, mol_type: MolType) -> bool:
    """Whether a residue is one token: the standard and the unknown residues of polymers (AF3 SI 2.6)."""
    if mol_type == MolType.PROTEIN:
        return code in _RESIDUES
    return mol_type in (MolType.RNA, MolType.DNA) and code in _NUCLEOTIDES


def restype(component: Component, mol_type: MolType) -> int:
    """Class of a residue's tokens in RESTYPES.

    Standard residues have their own class. A modified residue has the class of the residue it is a
    modification of, by the dictionary's one-letter code, else by its parent, as AlphaFold 3 encodes its
    polymer residues; without either, and in ligands, the unknown class.
    """
    if mol_type == MolType.LIGAND:
        return UNKNOWN_RESTYPE[mol_type]
    if component.code in UNKNOWN_RESIDUE.values():
        return UNKNOWN_RESTYPE[mol_type]  # N in a chain of DNA is an unknown residue of DNA
    if is_whole(component.code, mol_type):
        return RESTYPE_INDEX[component.code]
    code = _LETTERS[mol_type].get(component.one_letter)
    if code is None and not component.one_letter and component.parent in _LETTERS[mol_type].values():
        code = component.parent
    return RESTYPE_INDEX[code] if code else UNKNOWN_RESTYPE[mol_type]


def letter(component: Component, mol_type: MolType) -> str:
    """One letter for a residue of a polymer: ``X`` for an unknown amino acid, ``N`` for a nucleotide."""
    index = restype(component, mol_type)
    for one, code in _LETTERS[mol_type].items():
        if RESTYPE_INDEX[code] == index:
            return one
    if component.code in _NUCLEOTIDES:  # DNA residues in RNA chains and the other way round
        return component.code[-1]
    return "X" if mol_type == MolType.PROTEIN else "N"
