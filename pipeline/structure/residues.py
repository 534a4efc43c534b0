"""Residues of the file: which atoms belong to each, and which alternate of them is taken."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.structure.altloc import choose_letters, mean_occupancies
from megafold.pipeline.structure.cif import MISSING
from megafold.pipeline.structure.entry import AtomSites, Report

#: Items that tell residues apart: chain, both numbers, insertion code and component.
_PLAIN_KEY: Final = 5


@dataclass(kw_only=True)
class SiteResidue:
    """Atoms of one residue: rows of the :class:`AtomSites`, and what identifies it.

    ``label_seq`` and ``auth_seq`` may be :data:`.cif.MISSING`. ``is_plain``: no alternates, no atom twice.
    """

    asym: str
    label_seq: int
    auth_seq: int
    ins_code: int
    is_hetatm: bool
    code: str
    rows: NDArray[np.int64]
    is_plain: bool = False


def group_residues(sites: AtomSites) -> dict[str, list[SiteResidue]]:
    """Residues by chain, in the order of their first atoms.

    A residue is what shares chain, numbers, insertion code and component; alternates of each other may be of
    different components. Atoms that come round again under the same numbers are the next residue, whose
    insertion code got lost: residues are never fused.
    """
    if not len(sites):
        return {}
    keys = np.stack([sites.asym, sites.label_seq, sites.auth_seq, sites.ins_code, sites.comp], axis=1)
    starts = np.concatenate([[0], np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1])
    ends = np.append(starts[1:], len(sites))
    has_alt = np.logical_or.reduceat(sites.alt > 0, starts)
    pieces: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for start, end, alternate, key in zip(
        starts.tolist(), ends.tolist(), has_alt.tolist(), keys[starts].tolist(), strict=True
    ):
        # Alternates of one residue may be of several components.
        pieces.setdefault(tuple(key[:-1]) if alternate else tuple(key), []).append((start, end))
    by_asym: dict[str, list[SiteResidue]] = defaultdict(list)
    atoms = sites.atom.tolist()
    every = np.arange(len(sites))
    for key, spans in pieces.items():
        asym = sites.asym_names[key[0]]
        (start, end), *further = spans
        # Most residues are one run of different atoms without alternates, and need no more looking at.
        is_plain = len(key) == _PLAIN_KEY and not further and len(set(atoms[start:end])) == end - start
        if is_plain:
            residues = [every[start:end]]
        else:
            residues = _rounds(sites, np.concatenate([every[first:last] for first, last in spans]))
        for rows in residues:
            by_asym[asym].append(
                SiteResidue(
                    asym=asym,
                    label_seq=key[1],
                    auth_seq=key[2],
                    ins_code=key[3],
                    is_hetatm=bool(sites.is_hetatm[rows[0]]),
                    code=sites.comp_names[int(sites.comp[rows[0]])],
                    rows=rows,
                    is_plain=is_plain,
                )
            )
    return by_asym


def _rounds(sites: AtomSites, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """One residue's rows, or several residues' where most atoms come several times without being
    alternates."""
    atoms = sites.atom[rows].tolist()
    distinct = set(atoms)
    if 2 * (len(atoms) - len(distinct)) <= len(distinct) or sites.alt[rows].any():
        return [rows]
    seen: Counter[int] = Counter()
    number = []
    for atom in atoms:
        number.append(seen[atom])
        seen[atom] += 1
    return [rows[np.array(number) == index] for index in range(max(number) + 1)]


def choose_conformers(
    sites: AtomSites, residues: list[SiteResidue], is_linear: bool, report: Report
) -> NDArray[np.int32]:
    """Keep one alternate of each residue and one component where there are several: changes ``residues``.

    ``is_linear``: neighbours in the list are bonded (a polymer, a glycan); else every residue is alone.
    Returns the letter taken of each residue, 0 for none.
    """
    alternates: list[dict[int, int]] = []
    no_alternates = np.empty(0, np.int32)
    for residue in residues:
        alt = no_alternates if residue.is_plain else sites.alt[residue.rows]
        alternates.append(mean_occupancies(alt, sites.occupancy[residue.rows]) if alt.any() else {})
    follows = [
        is_linear and index > 0 and _are_neighbours(residues[index - 1], residue)
        for index, residue in enumerate(residues)
    ]
    letters = choose_letters(alternates, follows)
    for residue, letter in zip(residues, letters, strict=True):
        if residue.is_plain:
            continue
        alt = sites.alt[residue.rows]
        kept = residue.rows[(alt == 0) | (alt == letter)]
        report.remove("alternate_locations", len(residue.rows) - len(kept))
        kept = _one_component(sites, residue, kept, letter, report)
        residue.rows = _one_of_each(sites, kept, report)
        residue.code = sites.comp_names[int(sites.comp[residue.rows[0]])]
    return np.array(letters, np.int32)


def _are_neighbours(first: SiteResidue, second: SiteResidue) -> bool:
    if MISSING in (first.label_seq, second.label_seq):
        return True
    return second.label_seq - first.label_seq == 1


def _one_component(
    sites: AtomSites, residue: SiteResidue, rows: NDArray[np.int64], letter: int, report: Report
) -> NDArray[np.int64]:
    """Microheterogeneity: the component of the letter taken, else that of the highest mean occupancy."""
    every = sites.comp[residue.rows]
    if (every == every[0]).all():
        return rows
    comp = sites.comp[rows]
    lettered = comp[sites.alt[rows] == letter] if letter else comp
    # dict.fromkeys: the file's order, so that the first of equals wins.
    candidates = list(dict.fromkeys(lettered.tolist()))
    taken = max(candidates, key=lambda code: round(float(sites.occupancy[rows][comp == code].mean()), 3))
    names = "/".join(sites.comp_names[code] for code in dict.fromkeys(every.tolist()))
    report.warn(
        f"chain {residue.asym}, residue {residue.auth_seq}: {names} share a position; "
        f"{sites.comp_names[taken]} is used"
    )
    report.remove("alternate_locations", int((comp != taken).sum()))
    return rows[comp == taken]


def _one_of_each(sites: AtomSites, rows: NDArray[np.int64], report: Report) -> NDArray[np.int64]:
    """An atom that is there twice counts once: the first."""
    atoms = sites.atom[rows]
    if len(set(atoms.tolist())) == len(atoms):
        return rows
    _, first = np.unique(atoms, return_index=True)
    report.remove("repeated_atoms", len(rows) - len(first))
    return rows[np.sort(first)]
