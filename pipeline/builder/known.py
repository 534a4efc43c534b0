"""What need not be computed again: results by recipe, from the last manifest, its ledger and the journals."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np

from megafold.cache_store import Digest, Manifest, Store
from megafold.pipeline.builder import recipes
from megafold.pipeline.builder.tasks import Outcome, Problem
from megafold.pipeline.chemistry.library import ComponentLibrary, LibraryComponent
from megafold.pipeline.chemistry.reference import ReferenceComponent
from megafold.pipeline.manifest import ChainRow, EntryRow, entry_rows

#: Failures that say nothing of the input: a network folder that was away for a moment, or that one worker
#: does not see; a damaged object; memory.
_TRANSIENT: Final = frozenset(
    "unreadable unreadable-file unreadable-dictionary unreadable-cache no-such-folder damaged-cache "
    "changed-meanwhile out-of-memory".split()
)
#: Failures that another dictionary may cure.
_OF_THE_DICTIONARY: Final = frozenset({"unknown-component"})
#: Columns of a manifest's row, and fields of its chains, that the structure alone decides and nothing else.
_OF_THE_STRUCTURE: Final = tuple(
    field.name
    for field in fields(EntryRow)
    if field.name not in ("recipes", "pairing", "source", "source_digest", "chains", "interfaces")
)
_OF_THE_CHAIN: Final = tuple(
    field.name
    for field in fields(ChainRow)
    if field.name not in ("msa", "msa_depth", "msa_status", "template", "n_template", "cluster")
)


class Known:
    """Outcomes by recipe.

    Failures are outcomes too: an input that could not be used is not tried again until it, the stage's
    version or, for an unknown component, the dictionary changes. An outcome whose object is no longer in the
    store is forgotten.
    """

    def __init__(self, store: Store, dictionary: str) -> None:
        """``dictionary``: identity of today's component dictionary."""
        self._store = store
        self._dictionary = dictionary
        self._outcomes: dict[str, Outcome] = {}
        self._library: ComponentLibrary | None = None
        self._definitions: dict[str, str] = {}
        self._capped: set[str] = set()
        self._forgotten: set[str] = set()
        self._failures: Mapping[str, str] = {}

    def add_manifest(self, manifest: Manifest, *, with_failures: bool) -> None:
        """Remember what a snapshot holds and, unless they are to be retried, what failed for it."""
        problems, dictionary = self._problems(manifest)
        forget = {
            recipe
            for recipe, found in problems.items()
            if not with_failures or not self._lasts(found, dictionary)
        }
        self._add_library(manifest)
        for row in entry_rows(manifest):
            self._add_row(row, problems)
        for recipe, found in problems.items():
            self._outcomes.setdefault(recipe, Outcome(result=None, problems=tuple(found)))
        for recipe in forget:
            del self._outcomes[recipe]
        self._forgotten |= forget

    def _add_library(self, manifest: Manifest) -> None:
        digest = Digest.parse(str(manifest.attributes["components"]))
        if not self._store.has(digest):
            return
        with self._store.open(digest) as reader:
            content = reader.read_all()
        attributes: Any = content.attributes
        self._definitions = dict(zip(attributes["keys"], attributes["digests"], strict=True))
        versions: Any = manifest.attributes["versions"]
        if all(versions.get(name) == recipes.VERSIONS[name] for name in ("component", "rdkit")):
            self._library = ComponentLibrary.from_content(content)
            self._capped, self._failures = set(attributes["capped"]), attributes["failures"]

    def _problems(self, manifest: Manifest) -> tuple[Mapping[str, list[Problem]], str]:
        """Problems by recipe, and the dictionary they were met with."""
        found: dict[str, list[Problem]] = defaultdict(list)
        ledger, dictionary = str(manifest.attributes["ledger"]), self._dictionary
        if ledger:
            for failure in self._store.ledger(Digest.parse(ledger)):
                recipe, dictionary = failure.inputs
                problem = Problem(failure.reason, failure.message)
                if problem not in found[recipe]:
                    found[recipe].append(problem)
        return found, dictionary

    def _lasts(self, problems: Iterable[Problem], dictionary: str) -> bool:
        """True: trying again would be in vain."""
        reasons = {problem.reason for problem in problems}
        return not reasons & _TRANSIENT and (
            dictionary == self._dictionary or not reasons & _OF_THE_DICTIONARY
        )

    def _add_row(self, row: EntryRow, problems: Mapping[str, list[Problem]]) -> None:
        definitions = self._definitions
        structure: dict[str, Any] = {name: getattr(row, name) for name in _OF_THE_STRUCTURE}
        structure["chains"] = [
            {
                **{name: getattr(chain, name) for name in _OF_THE_CHAIN},
                # Those of polymers are made anew for each snapshot.
                "cluster": chain.cluster if chain.mol_type == "ligand" else "",
            }
            for chain in row.chains
        ]
        structure["interfaces"] = [
            {"chain_i": interface.chain_i, "chain_j": interface.chain_j} for interface in row.interfaces
        ]
        structure["component_digests"] = [definitions.get(key, "") for key in row.components]
        structure["own_components"] = {}
        structure["namesakes"] = row.recipes.get("namesakes", "")
        self._outcomes[row.recipes["structure"]] = Outcome(result=structure)
        if "pairing" in row.recipes:
            self._outcomes[row.recipes["pairing"]] = Outcome(result={"object": row.pairing})
        for chain in row.chains:
            for stage, result in (
                ("msa", {"object": chain.msa, "rows": chain.msa_depth}),
                ("template", {"object": chain.template, "hits": chain.n_template}),
            ):
                recipe = row.recipes.get(f"{stage}:{chain.entity_id}")
                if recipe is not None:
                    self._outcomes[recipe] = Outcome(result=result, problems=tuple(problems.get(recipe, ())))

    def add_journal_record(self, record: Mapping[str, Any], *, with_failures: bool) -> None:
        """Remember what an interrupted build had finished."""
        outcome = Outcome.from_json(record["outcome"])
        lasts = self._lasts(outcome.problems, record["dictionary"])
        if not outcome.problems or (with_failures and lasts):
            self._outcomes[record["recipe"]] = outcome

    def find(self, recipe: str) -> Outcome | None:
        """The outcome of a recipe, if it is known and its object is still there."""
        outcome = self._outcomes.get(recipe)
        if outcome is None or outcome.result is None:
            return outcome
        named = outcome.result.get("structure", outcome.result.get("object", ""))
        return outcome if not named or self._store.has(Digest.parse(named)) else None

    def find_reference(self, key: str, definition: str) -> Mapping[str, Any] | None:
        """A reference component as JSON, if its definition is unchanged and so is the chemistry stage."""
        recipe = recipes.component_recipe(definition)
        outcome = self._outcomes.get(recipe)
        if outcome is not None and outcome.result is not None:
            reference: Mapping[str, Any] = outcome.result["reference"]
            return reference
        # What stands in the library for a failure that is to be tried again is no result.
        if recipe in self._forgotten or self._library is None or self._definitions.get(key) != definition:
            return None
        return self._from_library(self._library[key]).to_json()

    def _from_library(self, view: LibraryComponent) -> ReferenceComponent:
        return ReferenceComponent(
            key=view.key,
            digest=self._definitions[view.key],
            atom_names=view.atom_names,
            elements=view.elements.astype(np.int16),
            charges=view.charges.astype(np.int16),
            leaving=view.leaving,
            aromatic=view.aromatic,
            stereo=view.stereo.astype(np.int8),
            bonds=view.bonds,
            bond_orders=view.bond_orders.astype(np.int8),
            bond_aromatic=view.bond_aromatic,
            ref_pos=view.ref_pos,
            origin=view.origin,
            failure=self._failures.get(view.key, ""),
            message="",
            automorphisms=view.automorphisms,
            capped=view.key in self._capped,
        )
