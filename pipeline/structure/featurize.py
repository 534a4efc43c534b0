"""The structure stage: one mmCIF file to one ``structure`` object."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.cache_store import Content
from megafold.pipeline.chemistry import Component, ComponentDictionary
from megafold.pipeline.content import make_content
from megafold.pipeline.errors import StructureError
from megafold.pipeline.schema import STRUCTURE
from megafold.pipeline.structure.assembly import Assembly, Copy, choose_assembly
from megafold.pipeline.structure.chains import Chain, build_chains
from megafold.pipeline.structure.components import ComponentResolver
from megafold.pipeline.structure.connections import LinkReader
from megafold.pipeline.structure.corrections import with_methionine, with_ordered_arginines
from megafold.pipeline.structure.entry import ParsedEntry, Report
from megafold.pipeline.structure.expand import Expansion, assembly_bonds, move_copies
from megafold.pipeline.structure.filters import (
    check_polymer_count,
    clashing_copies,
    count_removed,
    removed_chains,
)
from megafold.pipeline.structure.layout import Layout, lay_out
from megafold.pipeline.structure.leaving import kept_atoms
from megafold.pipeline.structure.neighbours import interfaces
from megafold.pipeline.structure.options import StructureOptions
from megafold.pipeline.structure.parse import parse_structure
from megafold.pipeline.structure.tokens import tokenise
from megafold.pipeline.structure.unit import Unit, make_unit

#: Raise it whenever the stage's output changes for any input.
STRUCTURE_VERSION: Final = 3


@dataclass(frozen=True)
class StructureResult:
    """The object, and the components that the file brought along, by key."""

    content: Content
    own_components: tuple[Component, ...]


def featurize_structure(
    path: Path, entry: str, dictionary: ComponentDictionary, options: StructureOptions | None = None
) -> StructureResult:
    """Make the ``structure`` object of a file.

    The same file content, dictionary and options give the same object, wherever and in whatever order it is
    made.

    Raises:
        StructureError: the file cannot be read or understood, a component is unknown, or the filters left
            nothing. Its ``reason`` says which.
    """
    options = options or StructureOptions()
    report = Report()
    parsed = parse_structure(path, entry, report)
    if options.convert_selenomethionine:
        parsed = with_methionine(parsed, report)
    resolver = ComponentResolver(parsed, dictionary, entry, report)
    chains = build_chains(parsed, resolver, report)
    layout = lay_out(chains, parsed.sites, resolver, report)
    if options.order_arginine:
        layout = with_ordered_arginines(layout, report)
    unit = _unit(layout, parsed, options, report)
    check_polymer_count(unit, options, entry)
    assembly = choose_assembly(parsed, chains, options.assembly, entry, report)
    reasons = removed_chains(unit, parsed.method, options)
    reasons |= {
        index: "no_atoms"
        for index in np.flatnonzero(unit.spans["atom"][:, 1] == 0).tolist()
        if index not in reasons
    }
    copies = count_removed(assembly.copies, reasons, report)
    coords = move_copies(unit, copies)
    clashing = clashing_copies(unit, copies, coords, options)
    report.remove("clashing_chains", len(clashing))
    kept = [index for index in range(len(copies)) if index not in clashing]
    if not kept:
        removed = ", ".join(f"{reason} {count}" for reason, count in sorted(report.filtered.items()))
        raise StructureError(
            f"entry {entry} ({path.name}): the filters left no chain ({removed or 'the file has none'}); "
            "change the filters' options to keep it",
            reason="empty-after-filters",
        )
    copies, coords = [copies[index] for index in kept], [coords[index] for index in kept]
    writer = _Writer(unit, copies, coords, report)
    arrays = writer.arrays(layout, options.interface_distance)
    attributes = writer.attributes(parsed, entry, assembly)
    own = tuple(component for component in writer.used if component.is_own)
    return StructureResult(make_content("structure", arrays, attributes), own)


def _unit(layout: Layout, parsed: ParsedEntry, options: StructureOptions, report: Report) -> Unit:
    if not layout.resolved.any():
        report.warn("no atom has coordinates")
    reader = LinkReader(layout, parsed.connections, parsed.sites.alt_names, report)
    links = reader.read(infer=options.infer_bonds, infer_metals=not parsed.tells_connections)
    keep = kept_atoms(layout, links, report)
    return make_unit(layout, keep, tokenise(layout, keep), links)


class _Writer:
    """Puts the arrays and attributes of one assembly together."""

    def __init__(
        self, unit: Unit, copies: list[Copy], coords: list[NDArray[np.float64]], report: Report
    ) -> None:
        self._unit = unit
        self._copies = copies
        self._coords = coords
        self._report = report
        self._expansion = Expansion(unit, copies)
        self._chains = [unit.chains[copy.chain] for copy in copies]
        self._entity_keys = [_entity_key(chain) for chain in self._chains]
        self._entities = {key: index + 1 for index, key in enumerate(dict.fromkeys(self._entity_keys))}
        self.used: list[Component] = []

    def arrays(self, layout: Layout, interface_distance: float) -> dict[str, NDArray[Any]]:
        """All arrays of the object; fills :attr:`used`."""
        expansion, unit = self._expansion, self._unit
        residues = expansion.columns("residue", unit.residues)
        # Only components that are still used are listed.
        used, residues["component"] = np.unique(residues["component"], return_inverse=True)
        self.used = [layout.components[index] for index in used.tolist()]
        residues["chain"] = expansion.copy_of("residue")
        tokens = expansion.columns("token", unit.tokens)
        coords = np.concatenate(self._coords).astype(np.float32)
        center = coords[np.maximum(tokens["center_atom"], 0)]
        bonds = assembly_bonds(unit, self._copies, expansion, self._coords, self._report)
        columns = np.array(bonds, np.int64).reshape(-1, 4).T
        resolved = [points[np.isfinite(points[:, 0])] for points in self._coords]
        pairs = interfaces(resolved, interface_distance)
        tables = {
            "chains": self._chain_columns(),
            "residues": residues,
            "tokens": tokens,
            "atoms": expansion.columns("atom", unit.atoms),
            "bonds": dict(zip(("atom_i", "atom_j", "order", "kind"), columns, strict=True)),
            "interfaces": {"chain_i": pairs[:, 0], "chain_j": pairs[:, 1]},
        }
        return {
            **{name: STRUCTURE.table(name).pack(values) for name, values in tables.items()},
            "token_center": center,
            "atom_coords": coords,
            "atom_occupancy_b": expansion.rows("atom", unit.occupancy_b).astype(np.float32),
        }

    def _chain_columns(self) -> dict[str, NDArray[np.int64]]:
        seen: dict[int, int] = defaultdict(int)
        entity_ids, sym_ids = [], []
        for key in self._entity_keys:
            entity = self._entities[key]
            seen[entity] += 1
            entity_ids.append(entity)
            sym_ids.append(seen[entity])
        columns = {
            "asym_id": np.arange(1, len(self._chains) + 1),
            "entity_id": np.array(entity_ids),
            "sym_id": np.array(sym_ids),
            "mol_type": np.array([int(chain.mol_type) for chain in self._chains]),
            "is_branched": np.array([int(chain.is_branched) for chain in self._chains]),
        }
        for table in ("residue", "token", "atom"):
            columns[f"first_{table}"] = self._expansion.first[table]
            columns[f"{table}_count"] = self._expansion.spans[table][:, 1]
        return columns

    def attributes(self, parsed: ParsedEntry, entry: str, assembly: Assembly) -> dict[str, Any]:
        """All attributes of the object; call it after :meth:`arrays`."""
        return {
            "kind": "structure",
            "version": STRUCTURE_VERSION,
            "entry": entry,
            "assembly": assembly.id,
            "title": parsed.title,
            "method": parsed.method,
            "resolution": parsed.resolution,
            "release_date": parsed.release_date,
            "deposition_date": parsed.deposition_date,
            "components": [component.key for component in self.used],
            "component_digests": [component.digest for component in self.used],
            "entities": self._entity_records(),
            "chains": {
                "label_asym_id": [chain.label_asym_id for chain in self._chains],
                "auth_asym_id": [chain.auth_asym_id for chain in self._chains],
                "operator": [copy.operator for copy in self._copies],
            },
            "filtered": dict(sorted(self._report.filtered.items())),
            "changed": dict(sorted(self._report.changed.items())),
            "warnings": self._report.warnings,
        }

    def _entity_records(self) -> list[dict[str, Any]]:
        index = {component.code: position for position, component in enumerate(self.used)}
        labels: dict[int, list[str]] = defaultdict(list)
        first: dict[int, Chain] = {}
        for chain, key in zip(self._chains, self._entity_keys, strict=True):
            entity = self._entities[key]
            first.setdefault(entity, chain)
            if chain.entity and chain.entity not in labels[entity]:
                labels[entity].append(chain.entity)
        return [
            {
                "label_entity_ids": labels[entity],
                "mol_type": int(chain.mol_type),
                "sequence": chain.sequence,
                "components": [index[residue.code] for residue in chain.residues],
            }
            for entity, chain in sorted(first.items())
        ]


def _entity_key(chain: Chain) -> tuple[Any, ...]:
    """What makes two chains copies of each other: the same residues, and the same bonds between a glycan's.

    Chains of one entity of the file may differ in residues (heterogeneity); then they are no copies, since an
    atom of the one need not be in the other.
    """
    codes = tuple(residue.code for residue in chain.residues)
    return (chain.mol_type, chain.is_branched, chain.sequence, codes, chain.links)
