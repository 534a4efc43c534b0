"""The deterministic filters of AF3 SI 2.5.4 that remove whole chains. Each counts what it removes."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import StructureError
from megafold.pipeline.schema import MolType
from megafold.pipeline.structure.assembly import Copy
from megafold.pipeline.structure.components import UNKNOWN_LIGANDS
from megafold.pipeline.structure.entry import Report
from megafold.pipeline.structure.neighbours import ChainTrees, candidate_pairs
from megafold.pipeline.structure.options import StructureOptions
from megafold.pipeline.structure.polymer_types import UNKNOWN_RESIDUE
from megafold.pipeline.structure.unit import Unit

_UNKNOWN: Final = frozenset(UNKNOWN_RESIDUE.values())
#: Å; no bond is shorter: atoms that are closer lie on each other, as copies of an ion on a symmetry axis do.
_NO_BOND: Final = 0.8


def check_polymer_count(unit: Unit, options: StructureOptions, entry: str) -> None:
    """Refuse entries with too many polymer chains in the deposited coordinates (copies do not count).

    Raises:
        StructureError: ``too-many-chains``.
    """
    count = sum(chain.is_polymer for chain in unit.chains)
    if options.max_polymer_chains and count > options.max_polymer_chains:
        raise StructureError(
            f"entry {entry} has {count} polymer chains, more than {options.max_polymer_chains}; raise "
            "max_polymer_chains to keep it",
            reason="too-many-chains",
        )


def removed_chains(unit: Unit, method: str | None, options: StructureOptions) -> dict[int, str]:
    """Chains of the unit to be left out, with the reason: everything but clashes."""
    is_crystal = method is not None and _is_crystallography(method)
    return {
        index: reason
        for index in range(len(unit.chains))
        if (reason := _reason(unit, index, is_crystal, options))
    }


def _is_crystallography(method: str) -> bool:
    method = method.upper()
    return "CRYSTALLOGRAPHY" in method or ("DIFFRACTION" in method and "FIBER" not in method)


def _reason(unit: Unit, index: int, is_crystal: bool, options: StructureOptions) -> str:
    chain = unit.chains[index]
    if not chain.is_polymer:
        code = chain.residues[0].code
        if is_crystal and len(chain.residues) == 1 and code in options.crystallisation_aids:
            return "crystallisation_aids"
        if options.remove_unknown_ligands and code in UNKNOWN_LIGANDS and not _has_bonds(unit, index):
            return "unknown_ligands"
        return ""
    first, count = unit.spans["residue"][index]
    resolved = unit.residues["resolved"][first : first + count] > 0
    codes = [residue.code for residue, there in zip(chain.residues, resolved.tolist(), strict=True) if there]
    if options.remove_unknown_chains and codes and _UNKNOWN.issuperset(codes):
        return "unknown_polymer_chains"
    if len(codes) < options.min_resolved_residues:
        return "polymers_with_few_resolved_residues"
    if options.max_ca_gap and chain.mol_type == MolType.PROTEIN and _has_gap(unit, index, options.max_ca_gap):
        return "ca_gaps"
    return ""


def _has_bonds(unit: Unit, index: int) -> bool:
    """Whether the definition of a one-residue chain says how its atoms are bonded."""
    return bool(unit.has_bonds[int(unit.residues["component"][unit.spans["residue"][index][0]])])


def _has_gap(unit: Unit, index: int, limit: float) -> bool:
    """Whether neighbours in sequence have CA atoms further apart than ``limit`` Å."""
    ca = unit.ca_atom[slice(*_bounds(unit.spans["residue"][index]))]
    coords = np.where((ca >= 0)[:, None], unit.coords[np.maximum(ca, 0)], np.nan)
    step = np.diff(coords, axis=0)
    with np.errstate(invalid="ignore"):
        is_wide = (step * step).sum(axis=1) > limit * limit
    if unit.chains[index].is_derived:
        # Where only atoms tell of the sequence, a jump of the author's numbers is a gap in the model.
        numbers = unit.residues["auth_seq_id"][slice(*_bounds(unit.spans["residue"][index]))]
        is_wide &= np.abs(np.diff(numbers)) <= 1
    return bool(is_wide.any())


def _bounds(span: NDArray[np.int64]) -> tuple[int, int]:
    return int(span[0]), int(span[0] + span[1])


def clashing_copies(
    unit: Unit, copies: list[Copy], coords: list[NDArray[np.float64]], options: StructureOptions
) -> set[int]:
    """Copies to be removed because more than ``clash_fraction`` of their atoms clash with one other chain.

    ``coords``: of every copy, resolved or not. Of two that clash the one with the greater share of clashing
    atoms goes; at equal shares the one with fewer atoms; at equal numbers the later one. Atoms with a bond to
    another residue may be at bonding distance: else every covalent ligand of a few atoms would go.
    """
    if options.clash_fraction >= 1 or not options.clash_distance:
        return set()
    resolved = [points[np.isfinite(points[:, 0])] for points in coords]
    bonded = _bonded_atoms(unit)
    trees = ChainTrees(resolved)
    clashes: list[tuple[float, int, int, int]] = []
    for pair in candidate_pairs(resolved, options.clash_distance):
        shares = []
        for here, there in (pair, pair[::-1]):
            near = trees.near(here, there, options.clash_distance)
            if not len(near):
                shares = [0.0, 0.0]
                break
            if bonded.any():
                rows = np.flatnonzero(np.isfinite(coords[here][:, 0]))[near]
                may_touch = bonded[unit.spans["atom"][copies[here].chain, 0] + rows]
                near = near[~may_touch | np.isin(near, trees.near(here, there, _NO_BOND))]
            shares.append(len(near) / len(resolved[here]))
        if max(shares) > options.clash_fraction:
            loser = max(pair, key=lambda i: (shares[pair.index(i)], -len(resolved[i]), i))
            winner = pair[0] if loser == pair[1] else pair[1]
            clashes.append((-max(shares), len(resolved[loser]), -loser, winner))
    removed: set[int] = set()
    # The worst first: a chain that goes no longer clashes with others.
    for _, _, loser, winner in sorted(clashes):
        if -loser not in removed and winner not in removed:
            removed.add(-loser)
    return removed


def _bonded_atoms(unit: Unit) -> NDArray[np.bool_]:
    bonded = np.zeros(len(unit.coords), bool)
    for link in unit.links:
        bonded[[link.first, link.second]] = True
    return bonded


def count_removed(copies: list[Copy], reasons: dict[int, str], report: Report) -> list[Copy]:
    """The copies of chains that stay; the others are counted."""
    for copy in copies:
        if copy.chain in reasons:
            report.remove(reasons[copy.chain], 1)
    return [copy for copy in copies if copy.chain not in reasons]
