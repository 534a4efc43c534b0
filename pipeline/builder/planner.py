"""From files to tasks: which recipes the corpus asks for, and which of them are not known yet.

The build runs what the planner returns; ``cache verify --corpus`` only looks at it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megafold.pipeline.alignments import AlignmentIndex, ChainAlignments
from megafold.pipeline.builder import recipes
from megafold.pipeline.builder.config import Sources
from megafold.pipeline.builder.known import Known
from megafold.pipeline.builder.tasks import (
    ComponentTask,
    MsaTask,
    Outcome,
    PairingTask,
    StructureTask,
    Task,
    TemplateTask,
)
from megafold.pipeline.chemistry import Component, ComponentDictionary, load_dictionary
from megafold.pipeline.chemistry.component import is_own_key
from megafold.pipeline.corpus import EntrySource
from megafold.pipeline.errors import InputError
from megafold.pipeline.schema import MolType
from megafold.pipeline.structure import StructureOptions
from megafold.pipeline.template import TemplateStructures, hit_entries

_HASHING_THREADS: Final = 8
#: Files that are waiting for a thread; each costs a kilobyte.
_HASHED_AT_A_TIME: Final = 4096


@dataclass
class EntryPlan:
    """What one entry needs, as recipes; and its structure's row once that is known."""

    source: EntrySource
    source_digest: str
    recipe: str
    row: dict[str, Any] | None = None
    #: ``msa:<entity_id>``, ``template:<entity_id>``, ``pairing`` → recipe.
    recipes: dict[str, str] = field(default_factory=dict)


def _file_size(path: Path) -> int:
    """Bytes of a file, 0 where it cannot be read: as for its digest."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Planner:
    """Knows the corpus, the alignments and the dictionary, and turns outcomes into further tasks."""

    def __init__(
        self, sources: Sources, found: Sequence[EntrySource], options: StructureOptions, known: Known
    ) -> None:
        """``found``: the entries of the corpus."""
        self._options = options
        self._known = known
        self._dictionary: ComponentDictionary = load_dictionary(sources.ccd, sources.ccd_extra)
        self._index = AlignmentIndex(sources.alignments) if sources.alignments else None
        self._templates = TemplateStructures(sources.template_structures)
        self._digests: dict[Path, str] = {}
        self._hashing = ThreadPoolExecutor(_HASHING_THREADS)  # hashlib releases the interpreter's lock
        self._hash(source.path for source in found)
        self.entries: dict[str, EntryPlan] = {}
        for source in found:
            digest = self._digest(source.path)
            recipe = recipes.structure_recipe(source.entry, digest, options)
            self.entries[source.entry] = EntryPlan(source, digest, recipe)
        #: Every outcome this build has or reuses, by recipe.
        self.outcomes: dict[str, Outcome] = {}
        #: Reference components as JSON, by key.
        self.references: dict[str, Mapping[str, Any]] = {}
        #: Why there is none, by key: a task that took its worker down, or its time.
        self.failed_components: dict[str, str] = {}
        #: Entries that need a recipe, for the ledger: an alignment may serve many.
        self.users: dict[str, set[str]] = {}
        self.reused: dict[str, int] = {}
        self._planned: set[str] = set()
        #: By sequence, and name and digest of each hit file.
        self._template_recipes: dict[tuple[str | tuple[str, str], ...], str] = {}
        #: By the digest of a component's definition.
        self._component_recipes: dict[str, str] = {}

    # -- files -----------------------------------------------------------------------------------------

    def _hash(self, paths: Iterable[Path]) -> None:
        missing = sorted({path for path in paths if path not in self._digests})
        for first in range(0, len(missing), _HASHED_AT_A_TIME):
            some = missing[first : first + _HASHED_AT_A_TIME]
            self._digests.update(zip(some, self._hashing.map(recipes.file_digest, some), strict=True))

    def _digest(self, path: Path) -> str:
        self._hash([path])
        return self._digests[path]

    def _named_digests(self, files: Iterable[Path]) -> list[tuple[str, str]]:
        files = list(files)
        self._hash(files)
        return [(path.name, self._digests[path]) for path in files]

    # -- tasks -----------------------------------------------------------------------------------------

    def start(self) -> list[Task]:
        """The tasks that are not known, to begin with; largest structures first."""
        tasks: list[Task] = []
        for plan in self.entries.values():
            task = self.structure_task(plan)
            known = self._known.find(plan.recipe)
            if known is not None and self._definitions_hold(known):
                tasks += self._reuse(task, known)
            else:
                tasks += self._plan(task)
        return sorted(tasks, key=lambda task: -task.size)

    def component(self, key: str) -> Component:
        """The definition of a component that some structure uses."""
        component = self._dictionary.get(key)
        assert component is not None, key  # its structure was featurized with it
        return component

    def structure_task(self, plan: EntryPlan) -> StructureTask:
        """The task that featurizes an entry's structure file."""
        entry, path = plan.source.entry, plan.source.path
        return StructureTask(
            recipe=plan.recipe,
            label=entry,
            entries=(entry,),
            size=_file_size(path),
            digests={path: plan.source_digest},
            entry=entry,
            path=path,
            options=self._options,
        )

    def settle(self, task: Task, outcome: Outcome) -> list[Task]:
        """Take an outcome in; the tasks it makes possible."""
        self.outcomes[task.recipe] = outcome
        if isinstance(task, StructureTask):
            return self._after_structure(task, outcome)
        if isinstance(task, ComponentTask):
            if outcome.result is None:
                self.failed_components[task.key] = outcome.problems[0].reason
            else:
                self.references[task.key] = outcome.result["reference"]
        return []

    def pairings(self, entries: Iterable[str] | None = None) -> list[Task]:
        """Pairing tasks of ``entries`` (None: all) once their MSAs are there; known ones are taken in."""
        tasks: list[Task] = []
        for entry in self.entries if entries is None else entries:
            plan = self.entries[entry]
            msas = tuple(self._paired_msas(plan))
            if len(msas) < 2:
                continue
            recipe = plan.recipes["pairing"] = recipes.pairing_recipe(msas)
            tasks += self._reuse_or_plan(PairingTask(recipe=recipe, label=entry, entries=(entry,), msas=msas))
        return tasks

    def _plan(self, task: Task) -> list[Task]:
        self.users.setdefault(task.recipe, set()).update(task.entries)
        if task.recipe in self._planned:
            return []
        self._planned.add(task.recipe)
        return [task]

    def _reuse(self, task: Task, outcome: Outcome) -> list[Task]:
        self.users.setdefault(task.recipe, set()).update(task.entries)
        if task.recipe in self.outcomes:
            return []
        self.reused[task.stage] = self.reused.get(task.stage, 0) + 1
        return self.settle(task, outcome)

    def _reuse_or_plan(self, task: Task) -> list[Task]:
        known = self.outcomes.get(task.recipe) or self._known.find(task.recipe)
        return self._plan(task) if known is None else self._reuse(task, known)

    def _definitions_hold(self, outcome: Outcome) -> bool:
        """True: the components that a structure was made with are still defined as they were."""
        row = outcome.result
        if row is None:
            return True
        if row.get("namesakes", "") != recipes.namesakes_recipe(self._dictionary, row["components"]):
            return False
        return all(
            self._own_reference(outcome, key, digest) is not None
            if is_own_key(key)
            else self._defines(key, digest)
            for key, digest in zip(row["components"], row["component_digests"], strict=True)
        )

    def _defines(self, code: str, digest: str) -> bool:
        component = self._dictionary.get(code)
        return component is not None and component.digest == digest

    def _own_reference(self, outcome: Outcome, key: str, digest: str) -> Mapping[str, Any] | None:
        own: Mapping[str, Mapping[str, Any]] = (outcome.result or {})["own_components"]
        return own.get(key) or self._known.find_reference(key, digest)

    def _after_structure(self, task: StructureTask, outcome: Outcome) -> list[Task]:
        row = outcome.result
        if row is None:
            return []
        plan = self.entries[task.entry]
        plan.row = row
        tasks: list[Task] = []
        for key, definition in zip(row["components"], row["component_digests"], strict=True):
            tasks += self._component(task.entry, outcome, key, definition)
        seen: set[int] = set()
        for chain in row["chains"]:
            if chain["sequence_digest"] and chain["entity_id"] not in seen:
                seen.add(chain["entity_id"])
                files = self._alignments(plan.source, row, chain["entity_id"])
                if files is not None:
                    tasks += self._chain_tasks(plan, chain, files)
        return tasks

    def _component(self, entry: str, outcome: Outcome, key: str, definition: str) -> list[Task]:
        recipe = self._component_recipes.get(definition)
        if recipe is None:  # of thousands of entries that use it
            recipe = self._component_recipes[definition] = recipes.component_recipe(definition)
        self.users.setdefault(recipe, set()).add(entry)
        if key in self.references or key in self.failed_components:
            return []
        task = ComponentTask(recipe=recipe, label=f"component {key}", entries=(entry,), key=key)
        failed = self._known.find(recipe)
        if failed is not None and failed.result is None:
            return self._reuse(task, failed)
        if is_own_key(key):
            reference = self._own_reference(outcome, key, definition)
        else:
            reference = self._known.find_reference(key, definition)
        if reference is not None:
            self.references[key] = reference
            return []
        return self._plan(task)

    def _alignments(
        self, source: EntrySource, row: Mapping[str, Any], entity_id: int
    ) -> ChainAlignments | None:
        """Files of an entity: those of its first chain that has any."""
        for chain in row["chains"]:
            if chain["entity_id"] != entity_id:
                continue
            explicit = source.alignments.get(chain["label_asym_id"]) or source.alignments.get(
                chain["auth_asym_id"]
            )
            if explicit:
                return ChainAlignments.of_files(explicit)
            if self._index is None:
                continue
            found = self._index.find(
                source.entry, chain["label_asym_id"], chain["auth_asym_id"], chain["sequence_digest"]
            )
            if found is not None:
                return found
        return None

    def _chain_tasks(
        self, plan: EntryPlan, chain: Mapping[str, Any], files: ChainAlignments
    ) -> Iterator[Task]:
        entity, sequence = chain["entity_id"], chain["sequence_digest"]
        # Many entries may share the task. Which asks first is chance: no message may depend on it.
        label = f"{chain['mol_type']} sequence {sequence[:16]}"
        assert plan.row is not None
        shared: dict[str, Any] = {
            "label": label,
            "entries": (plan.source.entry,),
            "structure": plan.row["structure"],
            "entity_id": entity,
        }
        if files.msas:
            named = self._named_digests(files.msas)
            recipe = recipes.msa_recipe(sequence, chain["mol_type"], named)
            plan.recipes[f"msa:{entity}"] = recipe
            yield from self._reuse_or_plan(
                MsaTask(
                    recipe=recipe,
                    mol_type=MolType[chain["mol_type"].upper()],
                    files=files.msas,
                    size=sum(map(_file_size, files.msas)),
                    digests={path: self._digest(path) for path in files.msas},
                    **shared,
                )
            )
        if files.hits and chain["mol_type"] == "protein":
            hits = (sequence, *self._named_digests(files.hits))
            # Hit lists are long, and a sequence may be that of hundreds of entries.
            asked_before = self._template_recipes.get(hits)
            if asked_before is not None:
                plan.recipes[f"template:{entity}"] = asked_before
                self.users[asked_before].add(plan.source.entry)
                return
            structures = self._template_digests(files.hits)
            recipe = self._template_recipes[hits] = recipes.template_recipe(sequence, hits[1:], structures)
            plan.recipes[f"template:{entity}"] = recipe
            yield from self._reuse_or_plan(
                TemplateTask(
                    recipe=recipe,
                    files=files.hits,
                    digests={path: self._digest(path) for path in files.hits},
                    structures=structures,
                    **shared,
                )
            )

    def _template_digests(self, files: Iterable[Path]) -> dict[str, str]:
        """Digest of each structure file that the hits name; a hit list nobody can read names none."""
        names: set[str] = set()
        for path in files:
            try:
                names |= hit_entries(path)
            except InputError:
                continue  # the template task says so
        paths = {name: self._templates.path(name) for name in sorted(names)}
        self._hash(path for path in paths.values() if path is not None)
        return {
            name: self._digests[path] if path is not None else self._templates.digest(name) or ""
            for name, path in paths.items()
        }

    def _paired_msas(self, plan: EntryPlan) -> Iterator[str]:
        """Digests of the MSAs of an entry's distinct protein sequences, by entity."""
        if plan.row is None:
            return
        entities = {c["entity_id"] for c in plan.row["chains"] if c["mol_type"] == "protein"}
        for entity in sorted(entities):
            outcome = self.outcomes.get(plan.recipes.get(f"msa:{entity}", ""))
            if outcome is not None and outcome.result is not None and outcome.result["object"]:
                yield outcome.result["object"]
