"""What AlphaFold 3 changes in a structure before it looks at it (SI 2.1): selenomethionine, arginine's names.

Selenomethionine is methionine put in by the crystallographer. The two nitrogens at the end of an arginine
look alike, and files name them either way; the convention is that NH1 is the one closer to CD.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from megafold.pipeline.structure.entry import AtomSites, Entity, ParsedEntry, Partner, Report, SchemePosition
from megafold.pipeline.structure.layout import ARGININE_PAIR, Layout

_SULFUR: Final = 16
#: Coordinates are whole multiples of this, in Å.
_PRECISION: Final = 1e-3


def with_methionine(parsed: ParsedEntry, report: Report) -> ParsedEntry:
    """The same entry with MET for MSE and its SD for SE: atoms, sequences and bonds. Counts the residues."""
    if "MSE" not in parsed.sites.comp_names and not _in_sequences(parsed):
        return parsed
    sites, count = _methionine_sites(parsed.sites)
    report.change("selenomethionine_to_methionine", count)
    return replace(
        parsed,
        sites=sites,
        entities={
            name: replace(entity, sequence=tuple(map(_methionine_codes, entity.sequence)))
            for name, entity in parsed.entities.items()
        },
        schemes={
            asym: tuple(
                SchemePosition(
                    codes=_methionine_codes(position.codes),
                    auth_seq=position.auth_seq,
                    ins_code=position.ins_code,
                )
                for position in scheme
            )
            for asym, scheme in parsed.schemes.items()
        },
        connections=[
            replace(row, first=_methionine_partner(row.first), second=_methionine_partner(row.second))
            for row in parsed.connections
        ],
    )


def _in_sequences(parsed: ParsedEntry) -> bool:
    entities: list[Entity] = list(parsed.entities.values())
    return any("MSE" in codes for entity in entities for codes in entity.sequence) or any(
        "MSE" in position.codes for scheme in parsed.schemes.values() for position in scheme
    )


def _methionine_sites(sites: AtomSites) -> tuple[AtomSites, int]:
    if "MSE" not in sites.comp_names:
        return sites, 0
    comp_names, atom_names = list(sites.comp_names), list(sites.atom_names)
    is_seleno = sites.comp == comp_names.index("MSE")
    keys = np.stack([sites.asym, sites.label_seq, sites.auth_seq, sites.ins_code], axis=1)[is_seleno]
    comp, atom, element = sites.comp, sites.atom, sites.element
    comp = np.where(is_seleno, _place(comp_names, "MET"), comp).astype(comp.dtype)
    if "SE" in atom_names:
        is_selenium = is_seleno & (atom == atom_names.index("SE"))
        atom = np.where(is_selenium, _place(atom_names, "SD"), atom).astype(atom.dtype)
        element = np.where(is_selenium, _SULFUR, element).astype(element.dtype)
    changed = replace(
        sites, comp=comp, comp_names=comp_names, atom=atom, atom_names=atom_names, element=element
    )
    return changed, len(np.unique(keys, axis=0))


def _place(names: list[str], name: str) -> int:
    """Index of a name, which is added where it is missing."""
    if name not in names:
        names.append(name)
    return names.index(name)


def _methionine_codes(codes: tuple[str, ...]) -> tuple[str, ...]:
    if "MSE" not in codes:
        return codes
    return tuple(dict.fromkeys("MET" if code == "MSE" else code for code in codes))


def _methionine_partner(partner: Partner) -> Partner:
    if partner.comp != "MSE":
        return partner
    return replace(partner, comp="MET", atom="SD" if partner.atom == "SE" else partner.atom)


def with_ordered_arginines(layout: Layout, report: Report) -> Layout:
    """The same layout with NH1 and NH2 exchanged in each ARG whose NH2 is the one closer to CD.

    All three have to be resolved. Distances are compared as whole numbers, so that no machine's rounding
    decides; equal ones change nothing.
    """
    codes = [component.code for component in layout.components]
    if "ARG" not in codes:
        return layout
    index = codes.index("ARG")
    residues = np.flatnonzero(layout.component_of_residue == index)
    cd, first, second = (
        layout.first_atom[residues] + layout.slots[index][name] for name in ("CD", *ARGININE_PAIR)
    )
    grid = np.round(np.nan_to_num(layout.coords) / _PRECISION).astype(np.int64)
    squared = [((grid[cd] - grid[other]) ** 2).sum(axis=1) for other in (first, second)]
    resolved = layout.resolved
    wrong = resolved[cd] & resolved[first] & resolved[second] & (squared[0] > squared[1])
    report.change("arginine_nitrogens_exchanged", int(wrong.sum()))
    a, b = first[wrong], second[wrong]
    coords, occupancy_b = layout.coords.copy(), layout.occupancy_b.copy()
    for table in (coords, occupancy_b):
        table[a], table[b] = table[b], table[a]
    return replace(
        layout, coords=coords, occupancy_b=occupancy_b, exchanged=frozenset(residues[wrong].tolist())
    )
