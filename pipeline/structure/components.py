"""Which definition a component code of a file stands for."""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry import Component, ComponentDictionary
from megafold.pipeline.errors import StructureError
from megafold.pipeline.schema import RESTYPES
from megafold.pipeline.structure.elements import NON_METALS
from megafold.pipeline.structure.entry import AtomSites, ParsedEntry, Report
from megafold.pipeline.structure.renaming import match_names, older_names

#: Codes that stand for atoms nobody could identify.
UNKNOWN_LIGANDS: Final = frozenset({"UNX", "UNL"})

#: A dictionary's definition that knows fewer than this share of the heavy atoms in the file is a namesake.
_LEAST_KNOWN: Final = 0.5


class ComponentResolver:
    """Components by code: the dictionary's, or the file's own where it has another or the dictionary none.

    The input's own atoms win over a namesake in the dictionary. Standard residues are always the
    dictionary's.
    """

    def __init__(
        self, parsed: ParsedEntry, dictionary: ComponentDictionary, entry: str, report: Report
    ) -> None:
        self._parsed = parsed
        self._dictionary = dictionary
        self._entry = entry
        self._report = report
        self._observed = _observed_atoms(parsed)
        self._known: dict[str, Component] = {}
        self._aliases: dict[str, dict[str, str]] = {}

    def get(self, code: str) -> Component:
        """The component that ``code`` stands for in this file.

        Raises:
            StructureError: nobody defines it (``unknown-component``).
        """
        if code not in self._known:
            self._known[code] = self._resolve(code)
        return self._known[code]

    def _resolve(self, code: str) -> Component:
        known = self._dictionary.get(code)
        observed = self._observed.get(code, {})
        if known is not None and known.heavy.any() and (code in RESTYPES or not observed):
            self._translate(code, known, observed)
            return known
        own = self._parsed.definitions.get(code)
        if known is not None and known.heavy.any():
            if own is not None and _differ(own, known, observed):
                self._report.warn(
                    f"component {code}: the file's own definition is used, "
                    "the dictionary's namesake is another"
                )
                return own.as_own()
            share = sum(name in known.atom_index for name in observed) / len(observed)
            is_renamed = share < 1 and code not in UNKNOWN_LIGANDS
            if is_renamed and (self._translate(code, known, observed) or self._rename(code, known)):
                return known
            if share >= _LEAST_KNOWN:
                return known
            if code not in UNKNOWN_LIGANDS:
                raise self._unknown(code, "the dictionary's component of that name has other atoms")
        if own is not None and own.heavy.any():
            return own.as_own()
        if code in UNKNOWN_LIGANDS or len(observed) == 1:
            self._report.warn(f"component {code}: no dictionary has its atoms; they are taken from the file")
            return Component.from_atoms(code, list(observed), list(observed.values()))
        raise self._unknown(code, "it is in no dictionary")

    def _translate(self, code: str, known: Component, observed: Mapping[str, int]) -> bool:
        """Whether older names explain all of the file's atoms; remembers them, all or not.

        Only a standard residue is known well enough to take some names and leave the others.
        """
        found = older_names(known, observed)
        explained = set(observed) <= {*known.atom_index, *found}
        if found and (explained or code in RESTYPES):
            self._aliases[code] = {name: found.get(name, name) for name in (*known.atom_index, *found)}
            example = next(iter(found))
            self._report.warn(
                f"component {code}: {len(found)} older atom names are read as the dictionary's "
                f"({example} as {found[example]})"
            )
        return bool(found) and explained

    def _rename(self, code: str, known: Component) -> bool:
        """Whether the file's atoms are the definition's under other names; remembers which."""
        sites = self._parsed.sites
        rows = _fullest_residue(sites, code)
        names = [sites.atom_names[atom] for atom in sites.atom[rows].tolist()]
        found = match_names(known, names, sites.element[rows].tolist(), sites.coords[rows])
        if found is None or not set(self._observed[code]) <= set(found):
            return False
        self._aliases[code] = found
        self._report.warn(
            f"component {code}: the file's atom names are older; they are matched by their bonds"
        )
        return True

    def aliases(self, code: str) -> dict[str, str]:
        """The definition's atom names by the file's, where these are of another version; else empty."""
        return self._aliases.get(code, {})

    def _unknown(self, code: str, why: str) -> StructureError:
        sites = self._parsed.sites
        where = ""
        if code in self._observed:
            row = int(np.argmax(sites.comp == sites.comp_names.index(code)))
            where = f", chain {sites.asym_names[int(sites.asym[row])]}"
        return StructureError(
            f"entry {self._entry}{where}: component {code} is unknown ({why}) and the file has no bonds for "
            "it; add its definition with --ccd-extra, or _chem_comp_atom and _chem_comp_bond rows to the "
            "file",
            reason="unknown-component",
        )


def _fullest_residue(sites: AtomSites, code: str) -> NDArray[np.int64]:
    """Rows of the residue of this component that has the most atoms, each name once."""
    rows = np.flatnonzero(sites.comp == sites.comp_names.index(code))
    keys = np.stack([sites.asym[rows], sites.auth_seq[rows], sites.ins_code[rows]], axis=1)
    _, residue = np.unique(keys, axis=0, return_inverse=True)
    best: NDArray[np.int64] = rows[:0]
    for index in range(int(residue.max()) + 1):
        members = rows[residue.reshape(-1) == index]
        _, first = np.unique(sites.atom[members], return_index=True)
        if len(first) > len(best):
            best = members[np.sort(first)]
    return best


def _observed_atoms(parsed: ParsedEntry) -> dict[str, dict[str, int]]:
    """Heavy atoms that the file has of each component: atomic number by name, in the file's order."""
    sites = parsed.sites
    pairs = sites.comp.astype(np.int64) * max(1, len(sites.atom_names)) + sites.atom
    _, first = np.unique(pairs, return_index=True)
    observed: dict[str, dict[str, int]] = {}
    for row in np.sort(first).tolist():
        code = sites.comp_names[int(sites.comp[row])]
        observed.setdefault(code, {})[sites.atom_names[int(sites.atom[row])]] = int(sites.element[row])
    return observed


def _differ(own: Component, known: Component, observed: Mapping[str, int]) -> bool:
    """Whether the file's definition is another one than the dictionary's, as far as the file's atoms tell."""
    for name, element in observed.items():
        index = known.atom_index.get(name)
        is_known = index is not None and element in (0, known.elements[index])
        if not is_known and name in own.atom_index:
            return True
    names = {name for name, element in observed.items() if element in NON_METALS and name in own.atom_index}
    return _named_bonds(own, names) != _named_bonds(known, names)


def _named_bonds(component: Component, names: set[str]) -> set[frozenset[str]]:
    bonds = (frozenset(component.atom_names[index] for index in pair) for pair in component.bonds.tolist())
    return {bond for bond in bonds if bond <= names}
