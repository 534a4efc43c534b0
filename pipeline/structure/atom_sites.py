"""The atoms of a file: first model, no hydrogens, no waters, every identifier in one scheme."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.elements import HYDROGEN, atomic_number
from megafold.pipeline.structure.cif import MISSING, Block
from megafold.pipeline.structure.entry import AtomSites, Report

WATERS: Final = frozenset({"HOH", "DOD", "WAT"})

#: Å. What is farther from the origin is no atom, and distances from it would overflow in training.
_FARTHEST: Final = 1e5

_Coded = tuple[NDArray[np.int32], list[str]]


def read_atom_sites(block: Block, report: Report) -> AtomSites:
    """The ``_atom_site`` table.

    Raises:
        ValueError: a number that is none, or a coordinate that cannot be one.
    """
    coords = [block.numbers(f"_atom_site.Cartn_{axis}") for axis in "xyz"]
    count = max(len(column) for column in (*coords, block.text("_atom_site.id")) if column is not None)
    xyz = np.stack([column if column is not None else np.full(count, np.nan) for column in coords], axis=1)
    farthest = float(np.nanmax(np.abs(xyz), initial=0.0))
    if farthest > _FARTHEST:
        raise ValueError(f"_atom_site.Cartn_x, _y or _z is {farthest:g} Å, more than {_FARTHEST:g}")
    model = _first_model(block, count, report)

    atom, atom_names = _coded(block, count, "label_atom_id", "auth_atom_id")
    comp, comp_names = _coded(block, count, "label_comp_id", "auth_comp_id")
    auth_asym, auth_asym_names = _coded(block, count, "auth_asym_id", "label_asym_id")
    asym, asym_names = _label_asym(block, auth_asym, auth_asym_names, report)
    entity, entity_names = _coded(block, count, "label_entity_id")
    alt, alt_names = _sorted(*_coded(block, count, "label_alt_id"))
    ins, ins_names = _coded(block, count, "pdbx_PDB_ins_code")
    group, group_names = _coded(block, count, "group_PDB")
    label_seq = block.integers("_atom_site.label_seq_id")
    label_seq = np.full(count, MISSING, np.int32) if label_seq is None else label_seq
    auth_seq = block.integers("_atom_site.auth_seq_id")
    auth_seq = label_seq if auth_seq is None else np.where(auth_seq == MISSING, label_seq, auth_seq)
    occupancy = block.numbers("_atom_site.occupancy")
    b_factor = block.numbers("_atom_site.B_iso_or_equiv")
    sites = AtomSites(
        asym=asym,
        asym_names=asym_names,
        auth_asym=auth_asym,
        auth_asym_names=auth_asym_names,
        entity=entity,
        entity_names=entity_names,
        comp=comp,
        comp_names=comp_names,
        atom=atom,
        atom_names=atom_names,
        alt=alt,
        alt_names=alt_names,
        element=_elements(block, count, atom, atom_names),
        label_seq=label_seq,
        auth_seq=auth_seq,
        ins_code=np.array([ord(name[0]) if name else 0 for name in ins_names], np.int32)[ins],
        is_hetatm=np.array([name == "HETATM" for name in group_names], bool)[group],
        coords=xyz,
        occupancy=np.ones(count) if occupancy is None else np.nan_to_num(occupancy, nan=1.0),
        b_factor=np.full(count, np.nan) if b_factor is None else b_factor,
    ).select(model)
    return _without_water_and_hydrogen(sites, report)


def _first_model(block: Block, count: int, report: Report) -> NDArray[np.bool_]:
    """Rows of the first model; the others are told of, not merged."""
    model = block.integers("_atom_site.pdbx_PDB_model_num")
    if model is None or not count:
        return np.ones(count, bool)
    models = np.unique(model)
    if len(models) > 1:
        report.warn(f"{len(models)} models; the first one is used")
    return model == model[0]


def _without_water_and_hydrogen(sites: AtomSites, report: Report) -> AtomSites:
    is_water = np.array([name in WATERS for name in sites.comp_names], bool)[sites.comp]
    is_hydrogen = ~is_water & (sites.element == HYDROGEN)
    report.remove("waters", int((is_water & (sites.element != HYDROGEN)).sum()))
    report.remove("hydrogens", int(is_hydrogen.sum()))
    return sites.select(~(is_water | is_hydrogen))


def _coded(block: Block, count: int, *items: str) -> _Coded:
    """A text column, the first of ``items`` that the file has; all '' where it has none."""
    for item in items:
        coded = block.codes(f"_atom_site.{item}")
        if coded is not None:
            return coded
    return np.zeros(count, np.int32), [""]


def _sorted(codes: NDArray[np.int32], names: list[str]) -> _Coded:
    """The same with '' first and the names sorted."""
    ordered = ["", *sorted(set(names) - {""})]
    return np.array([ordered.index(name) for name in names], np.int32)[codes], ordered


def _label_asym(block: Block, auth: NDArray[np.int32], auth_names: list[str], report: Report) -> _Coded:
    """``label_asym_id``; where it is missing the author's chain, or ``A`` where that is missing too."""
    coded = block.codes("_atom_site.label_asym_id")
    asym, names = coded if coded is not None else (np.zeros(len(auth), np.int32), [""])
    if "" not in names:
        return asym, names
    report.warn("atoms without label_asym_id: chains are derived from the author's names and the residues")
    missing = asym == names.index("")
    # A derived chain must not join one that the file names so itself.
    derived = [_free_name(name or "A", names) for name in auth_names]
    merged: dict[str, int] = {name: index for index, name in enumerate(names)}
    target = np.array([merged.setdefault(name, len(merged)) for name in derived], np.int32)
    return np.where(missing, target[auth], asym), list(merged)


def _free_name(name: str, taken: list[str]) -> str:
    while name in taken:
        name += "p"
    return name


def _elements(block: Block, count: int, atom: NDArray[np.int32], atom_names: list[str]) -> NDArray[np.int16]:
    """Atomic numbers; where the file has no symbol, hydrogen is told by its name (``1HB``), others are 0."""
    symbol, symbols = _coded(block, count, "type_symbol")
    numbers = np.array([_number(text) for text in symbols], np.int16)[symbol]
    by_name = np.array([name.lstrip("0123456789")[:1] in ("H", "D") for name in atom_names], bool)
    unnamed = np.array([not text for text in symbols], bool)[symbol]
    return np.where(unnamed & by_name[atom], np.int16(HYDROGEN), numbers).astype(np.int16)


def _number(symbol: str) -> int:
    try:
        return atomic_number(symbol) if symbol else 0
    except KeyError:
        return 0
