"""Structures as mmCIF files, from coordinates and the features of a sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megafold.trainer.cif import item, loop

#: Component codes of the 32 classes of ``restype`` (AF3 SI table 5), in class order; the last is the gap.
RESTYPE_COMPONENTS: Final = (
    *"ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL UNK".split(),
    *"A G C U N DA DG DC DT DN -".split(),
)
#: Chemical symbols by atomic number; 0 is unknown.
ELEMENTS: Final = tuple(
    "X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr "
    "Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb "
    "Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf "
    "Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og".split()
)
#: Stands for a component whose code the sample does not tell.
UNKNOWN_COMPONENT: Final = "UNL"

_POLYMERS: Final = (
    ("is_protein", "polypeptide(L)", "L-peptide linking", "UNK"),
    ("is_rna", "polyribonucleotide", "RNA linking", "N"),
    ("is_dna", "polydeoxyribonucleotide", "DNA linking", "DN"),
)
_ATOM_COLUMNS: Final = (
    "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
    "label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id "
    "auth_comp_id auth_asym_id auth_atom_id pdbx_PDB_model_num"
).split()


@dataclass(frozen=True)
class _Residue:
    """A residue of a chain: what all of its atoms share."""

    comp_id: str
    comp_type: str
    label_asym_id: str
    auth_asym_id: str
    entity_id: str
    polymer: int  # index into _POLYMERS, -1 for ligands
    label_seq_id: int  # 0 for ligands
    auth_seq_id: int
    is_standard: bool


def write_mmcif(
    path: Path,
    coords: ArrayLike,
    features: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    b_factors: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> None:
    """Write one or several models of a sample.

    The features tell chains, residues, elements and atom names; positions of a sequence that the sample
    does not hold (it may be a crop) are ``UNK`` in the entity's sequence and have no atoms. Components of
    ligands and modified residues are not among the features: without ``meta["comp_ids"]`` they are called
    ``UNL``, and the file says so.

    Args:
        path: file to write, whole or not at all.
        coords: positions [N_atom, 3], or [N_model, N_atom, 3] for several models, Å.
        features: features of one sample, named as in the sample schema, without a batch axis.
        meta: optional names: ``entry``; ``comp_ids``, a component code for each token; ``label_asym_ids``
            and ``auth_asym_ids``, chain names by ``asym_id``.
        b_factors: B factors, or confidences, [N_atom], or [N_model, N_atom] for several models; 0 without.
        mask: bool [N_atom], atoms to write; all real ones without.

    Raises:
        ValueError: lengths do not agree, or a position that is to be written is not finite.
    """
    meta = meta or {}
    arrays = {name: np.asarray(value) for name, value in features.items() if name in _USED}
    models = np.asarray(coords, np.float64)
    models = models[None] if models.ndim == 2 else models
    n_atom = len(arrays["atom_mask"])
    if models.shape[1:] != (n_atom, 3):
        raise ValueError(f"{path}: coordinates {models.shape} for {n_atom} atoms")
    written = arrays["atom_mask"].astype(bool)
    if mask is not None:
        written = written & np.asarray(mask, bool)
    if not np.isfinite(models[:, written]).all():
        raise ValueError(f"{path}: a position is not finite")
    b_iso = np.zeros(n_atom) if b_factors is None else np.asarray(b_factors, np.float64)
    b_iso = np.broadcast_to(b_iso, models.shape[:2])
    residues = _residues(arrays, meta)
    entry = str(meta.get("entry", path.stem))
    text = [
        f"data_{''.join(entry.split()) or 'model'}\n",
        item("_entry.id", entry),
        *_categories(residues),
        loop("atom_type", ["symbol"], ([_symbol(z)] for z in np.unique(arrays["ref_element"][written]))),
        loop("atom_site", _ATOM_COLUMNS, _atom_rows(arrays, residues, models, written, b_iso)),
        "#\n",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(text), encoding="utf-8")
    temporary.replace(path)


_USED: Final = frozenset(
    "token_mask residue_index asym_id entity_id restype is_protein is_rna is_dna is_ligand token_atom_count "
    "atom_mask atom_to_token ref_element ref_space_uid ref_atom_name_chars".split()
)


def chain_name(index: int) -> str:
    """Name of the ``index``-th chain, from 1: A to Z, AA to ZZ and on."""
    name = ""
    while index > 0:
        index, letter = divmod(index - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def label_of_chain(asym_id: int, meta: Mapping[str, Any]) -> str:
    """Name that a chain has in a file with these names (``label_asym_ids``)."""
    return str(meta.get("label_asym_ids", {}).get(asym_id, chain_name(asym_id)))


def _symbol(atomic_number: int) -> str:
    known = 0 < atomic_number < len(ELEMENTS)
    return ELEMENTS[atomic_number].upper() if known else ELEMENTS[0]


def _residues(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> list[_Residue | None]:
    """The residue of each token; tokens of one residue share it. None for padding."""
    atom_mask = arrays["atom_mask"].astype(bool)
    space_of_token = np.full(len(arrays["token_mask"]), -1, np.int64)
    space_of_token[arrays["atom_to_token"][atom_mask]] = arrays["ref_space_uid"][atom_mask]
    found: dict[tuple[int, int], _Residue] = {}
    ligands: dict[int, int] = {}  # residues so far of each chain of ligands
    residues: list[_Residue | None] = []
    for token in range(len(space_of_token)):
        if not arrays["token_mask"][token]:
            residues.append(None)
            continue
        asym_id = int(arrays["asym_id"][token])
        key = (asym_id, int(space_of_token[token]))
        if key not in found:
            is_ligand = bool(arrays["is_ligand"][token])
            if is_ligand:
                ligands[asym_id] = ligands.get(asym_id, 0) + 1
            found[key] = _residue(arrays, meta, token, ligands.get(asym_id, 0) if is_ligand else None)
        residues.append(found[key])
    return residues


def _residue(
    arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], token: int, ligand_number: int | None
) -> _Residue:
    """The residue that a token belongs to; ``ligand_number`` counts those of a chain of ligands."""
    asym_id = int(arrays["asym_id"][token])
    polymer = next((i for i, (flag, *_) in enumerate(_POLYMERS) if arrays[flag][token]), -1)
    if ligand_number is not None:
        polymer = -1
    # A standard residue is one token with all of its atoms; anything else has a token for each atom.
    is_standard = polymer >= 0 and arrays["token_atom_count"][token] > 1
    if "comp_ids" in meta:
        comp_id = str(meta["comp_ids"][token])
    elif is_standard:
        comp_id = RESTYPE_COMPONENTS[int(arrays["restype"][token])]
    else:
        comp_id = UNKNOWN_COMPONENT
    comp_type = _POLYMERS[polymer][2] if polymer >= 0 else "non-polymer"
    label = label_of_chain(asym_id, meta)
    position = int(arrays["residue_index"][token])
    return _Residue(
        comp_id=comp_id,
        comp_type="peptide linking" if comp_id == "GLY" else comp_type,
        label_asym_id=label,
        auth_asym_id=str(meta.get("auth_asym_ids", {}).get(asym_id, label)),
        entity_id=str(int(arrays["entity_id"][token])),
        polymer=polymer,
        label_seq_id=0 if polymer < 0 else position,
        auth_seq_id=position if ligand_number is None else ligand_number,
        is_standard=is_standard,
    )


def _categories(residues: list[_Residue | None]) -> list[str]:
    """Entities, sequences, chains and components."""
    present = [residue for residue in residues if residue is not None]
    # A chain of a polymer may hold several kinds (a DNA with an RNA base); the commonest names it.
    members: dict[str, list[int]] = {}
    for residue in present:
        members.setdefault(residue.entity_id, []).append(residue.polymer)
    kinds = {entity: max(set(polymers), key=polymers.count) for entity, polymers in members.items()}
    unknown = {residue.entity_id for residue in present if residue.comp_id == UNKNOWN_COMPONENT}
    note = f"{UNKNOWN_COMPONENT}: components whose codes were not recorded"
    chains = {residue.label_asym_id: residue.entity_id for residue in present}
    components = {residue.comp_id: residue.comp_type for residue in present}
    sequence_rows = []
    for entity in sorted(kinds, key=int):
        if kinds[entity] < 0:
            continue
        known = {r.label_seq_id: r.comp_id for r in present if r.entity_id == entity and r.label_seq_id}
        filler = _POLYMERS[kinds[entity]][3]
        for number in range(1, max(known) + 1):
            comp_id = known.get(number, filler)
            components.setdefault(comp_id, _POLYMERS[kinds[entity]][2])
            sequence_rows.append((entity, str(number), comp_id, "n"))
    return [
        loop(
            "entity",
            ["id", "type", "details"],
            (
                (
                    entity,
                    "polymer" if kinds[entity] >= 0 else "non-polymer",
                    note if entity in unknown else "",
                )
                for entity in sorted(kinds, key=int)
            ),
        ),
        loop(
            "entity_poly",
            ["entity_id", "type"],
            ((e, _POLYMERS[kinds[e]][1]) for e in sorted(kinds, key=int) if kinds[e] >= 0),
        ),
        loop("chem_comp", ["id", "type"], sorted(components.items())),
        loop("entity_poly_seq", ["entity_id", "num", "mon_id", "hetero"], sequence_rows),
        loop("struct_asym", ["id", "entity_id"], chains.items()),
    ]


def _atom_rows(
    arrays: Mapping[str, NDArray[Any]],
    residues: list[_Residue | None],
    models: NDArray[np.float64],
    written: NDArray[np.bool_],
    b_iso: NDArray[np.float64],
) -> list[tuple[str, ...]]:
    """The rows of ``atom_site``, model after model."""
    characters = np.where(arrays["ref_atom_name_chars"] > 0, arrays["ref_atom_name_chars"] + 32, 32)
    rows: list[tuple[str, ...]] = []
    for number, positions in enumerate(models, start=1):
        for atom in np.flatnonzero(written):
            residue = residues[int(arrays["atom_to_token"][atom])]
            if residue is None:
                raise ValueError(f"atom {atom} belongs to a token that is padding")
            name = "".join(map(chr, characters[atom])).strip()
            x, y, z = (f"{value:.3f}" for value in positions[atom])
            rows.append(
                (
                    "ATOM" if residue.is_standard else "HETATM",
                    str(len(rows) + 1),
                    _symbol(int(arrays["ref_element"][atom])),
                    name,
                    "",
                    residue.comp_id,
                    residue.label_asym_id,
                    residue.entity_id,
                    str(residue.label_seq_id) if residue.label_seq_id else "",
                    "",
                    *(x, y, z),
                    "1.00",
                    f"{b_iso[number - 1, atom]:.2f}",
                    str(residue.auth_seq_id),
                    residue.comp_id,
                    residue.auth_asym_id,
                    name,
                    str(number),
                )
            )
    return rows
