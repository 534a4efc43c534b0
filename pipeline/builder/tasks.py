"""What runs on a worker: one task, one result, small enough to travel.

A task reads its input files itself, writes its object to the cache and returns a few JSON values. An input
that cannot be used is a result too (:class:`Outcome` with failures), not an exception.
"""

import hashlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megafold.cache_store import CacheError, Content, Digest, LocalStore, NotACache, WriteFailed
from megafold.pipeline import schema
from megafold.pipeline.builder import recipes
from megafold.pipeline.builder.config import Sources
from megafold.pipeline.chemistry import ComponentDictionary, load_dictionary
from megafold.pipeline.chemistry.conformers import build_reference
from megafold.pipeline.errors import ComponentError, InputError
from megafold.pipeline.msa import MsaRows, featurize_msa, pair_msas
from megafold.pipeline.schema import MolType
from megafold.pipeline.structure import StructureOptions, featurize_structure
from megafold.pipeline.template import TemplateStructures, featurize_templates


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What every task of a build needs to know.

    ``dictionary`` is the identity of the component dictionary: a process that outlives a build opens it
    again when a file of ``sources`` has changed.
    """

    cache: str
    sources: Sources
    dictionary: str


@dataclass(frozen=True)
class Problem:
    """Why an input could not be used: a stable class and a message for people."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a task came to: the JSON values of its result, and the inputs that could not be used.

    ``result`` is None where the task as a whole failed.
    """

    result: dict[str, Any] | None
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As the journal keeps it."""
        return {"result": self.result, "problems": [[p.reason, p.message] for p in self.problems]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Outcome":
        """Read what :meth:`to_json` wrote."""
        return cls(result=value["result"], problems=tuple(Problem(*p) for p in value["problems"]))


class WorkerContext:
    """What a process opens once: the store, the dictionary and the template structures."""

    def __init__(self, config: WorkerConfig) -> None:
        self.store = LocalStore.at(Path(config.cache))
        self._sources = config.sources
        self._dictionary: ComponentDictionary | None = None
        self._templates: TemplateStructures | None = None

    @property
    def dictionary(self) -> ComponentDictionary:
        """The component dictionary, loaded when first asked for."""
        if self._dictionary is None:
            self._dictionary = load_dictionary(self._sources.ccd, self._sources.ccd_extra)
        return self._dictionary

    def templates(self, digests: Mapping[str, str]) -> TemplateStructures:
        """The folders that template structures are looked for in.

        ``digests`` are those of the structures by entry, as the build found them: a process that outlives a
        build lists its folders again where it knows others.
        """
        if self._templates is None or not self._templates.agrees_with(digests):
            self._templates = TemplateStructures(self._sources.template_structures)
        return self._templates

    def sequence(self, structure: str, entity_id: int) -> str:
        """Canonical sequence of an entity of a stored structure: tasks name it, they do not carry it."""
        with self.store.open(Digest.parse(structure)) as reader:
            entities: Any = reader.attributes["entities"]
            return str(entities[entity_id - 1]["sequence"])

    def publish(self, content: Content) -> str:
        """Store an object; its digest."""
        return str(self.store.put(content))


@lru_cache(maxsize=1)
def context(config: WorkerConfig) -> WorkerContext:
    """This process's context."""
    return WorkerContext(config)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A piece of work.

    ``recipe`` names its result, ``entries`` are those that need it, ``size`` grows with how long it may take.
    ``digests`` are those that the recipe has of the files that the task reads.
    """

    recipe: str
    label: str
    entries: tuple[str, ...] = field(default=(), compare=False)
    size: int = field(default=0, compare=False)
    digests: Mapping[Path, str] = field(default_factory=dict, compare=False)

    @property
    def stage(self) -> str:
        """Stage of the pipeline, as in the ledger."""
        raise NotImplementedError

    def run(self, worker: WorkerContext) -> Outcome:
        """Do the work in this process."""
        raise NotImplementedError


def run_task(config: WorkerConfig, task: Task) -> Outcome:
    """Run a task and turn whatever goes wrong into an outcome.

    An exception that is no :class:`InputError` is a defect of the featurizer. It costs this task alone, and
    the message says where it came from, so that it can be reported. A damaged object costs the tasks that
    read it, until it is gone. Where the cache takes no more writes, no input is to blame.

    Raises:
        WriteFailed: the cache's disk is full, or may not be written.
        NotACache: this machine does not see the cache.
    """
    try:
        outcome = task.run(context(config))
        return outcome if outcome.result is None else _unless_changed(task, outcome)
    except InputError as error:
        return Outcome(result=None, problems=(Problem(error.reason, str(error)),))
    except (WriteFailed, NotACache):
        raise
    except CacheError as error:
        return Outcome(result=None, problems=(Problem("damaged-cache", f"{task.label}: {error}"),))
    except MemoryError:
        return Outcome(result=None, problems=(Problem("out-of-memory", f"{task.label}: out of memory"),))
    except OSError as error:
        return Outcome(result=None, problems=(Problem("unreadable", f"{task.label}: {error}"),))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        return Outcome(
            result=None,
            problems=(
                Problem(
                    f"defect:{type(error).__name__}",
                    f"{task.label}: {type(error).__name__}: {error} ({where}); please report this entry",
                ),
            ),
        )


def _unless_changed(task: Task, outcome: Outcome) -> Outcome:
    """The outcome, unless its files are others by now than its recipe says, which would be wrong for ever."""
    for path, digest in task.digests.items():
        if recipes.file_digest(path) != digest:
            message = f"{task.label}: {path} changed while it was built from; build again"
            return Outcome(result=None, problems=(Problem("changed-meanwhile", message),))
    return outcome


@dataclass(frozen=True, kw_only=True)
class StructureTask(Task):
    """Featurize one structure file."""

    entry: str
    path: Path
    options: StructureOptions

    @property
    def stage(self) -> str:
        """See :class:`Task`."""
        return "structure"

    def run(self, worker: WorkerContext) -> Outcome:
        """See :class:`Task`."""
        featurized = featurize_structure(self.path, self.entry, worker.dictionary, self.options)
        result = structure_row(featurized.content)
        result["structure"] = worker.publish(featurized.content)
        result["namesakes"] = recipes.namesakes_recipe(worker.dictionary, result["components"])
        result["own_components"] = {
            component.key: build_reference(component).to_json() for component in featurized.own_components
        }
        return Outcome(result=result)


@dataclass(frozen=True, kw_only=True)
class ComponentTask(Task):
    """Make the reference conformer of one component."""

    key: str

    @property
    def stage(self) -> str:
        """See :class:`Task`."""
        return "component"

    def run(self, worker: WorkerContext) -> Outcome:
        """See :class:`Task`."""
        component = worker.dictionary.get(self.key)
        if component is None:
            raise ComponentError(
                f"component {self.key}: no longer in the dictionary; run the build again",
                reason="unknown-component",
            )
        return Outcome(result={"reference": build_reference(component).to_json()})


@dataclass(frozen=True, kw_only=True)
class SequenceTask(Task):
    """Read files of one sequence: that of an entity of a stored structure."""

    structure: str
    entity_id: int
    files: tuple[Path, ...]

    def outcome(
        self, worker: WorkerContext, content: Content | None, failures: Iterable[InputError], counted: str
    ) -> Outcome:
        """Publish what was read; ``counted`` is the table whose rows the manifest counts."""
        problems = tuple(Problem(failure.reason, str(failure)) for failure in failures)
        if content is None:
            return Outcome(result={"object": "", counted: 0}, problems=problems)
        number = content.arrays[counted].shape[1]
        return Outcome(result={"object": worker.publish(content), counted: number}, problems=problems)


@dataclass(frozen=True, kw_only=True)
class MsaTask(SequenceTask):
    """Read one sequence's alignments."""

    mol_type: MolType

    @property
    def stage(self) -> str:
        """See :class:`Task`."""
        return "msa"

    def run(self, worker: WorkerContext) -> Outcome:
        """See :class:`Task`."""
        read = featurize_msa(worker.sequence(self.structure, self.entity_id), self.mol_type, self.files)
        return self.outcome(worker, read.content, read.failures, "rows")


@dataclass(frozen=True, kw_only=True)
class TemplateTask(SequenceTask):
    """Read one sequence's template hits.

    ``structures`` maps the entries that they name to their structures' digests, ``""`` where there is none.
    """

    structures: Mapping[str, str] = field(compare=False)

    @property
    def stage(self) -> str:
        """See :class:`Task`."""
        return "template"

    def run(self, worker: WorkerContext) -> Outcome:
        """See :class:`Task`."""
        sequence = worker.sequence(self.structure, self.entity_id)
        templates = worker.templates(self.structures)
        read = featurize_templates(sequence, self.files, templates)
        if changed := templates.changed(self.structures):
            raise InputError(
                f"{self.label}: template structure {changed[0]} changed while it was built from; build again",
                reason="changed-meanwhile",
            )
        return self.outcome(worker, read.content, read.failures, "hits")


@dataclass(frozen=True, kw_only=True)
class PairingTask(Task):
    """Pair the rows of an entry's MSAs by species."""

    msas: tuple[str, ...]

    @property
    def stage(self) -> str:
        """See :class:`Task`."""
        return "pairing"

    def run(self, worker: WorkerContext) -> Outcome:
        """See :class:`Task`."""
        content = pair_msas([MsaRows.from_store(worker.store, digest) for digest in self.msas])
        return Outcome(result={"object": "" if content is None else worker.publish(content)})


def _ligand_cluster(
    keys: Sequence[str], chains: Mapping[str, Any], residues: Mapping[str, Any], index: int
) -> str:
    """Ligands of the same components are one cluster (AF3 SI 2.5.3); polymers' are made with the snapshot."""
    if chains["mol_type"][index] != MolType.LIGAND:
        return ""
    first = chains["first_residue"][index]
    used = residues["component"][first : first + chains["residue_count"][index]]
    return "ligand:" + "-".join(keys[component] for component in used)


def structure_row(content: Content) -> dict[str, Any]:
    """The manifest's columns that a structure object decides, MSAs and templates apart."""
    attributes: Mapping[str, Any] = content.attributes
    tables = {
        name: schema.STRUCTURE.table(name).unpack(content.arrays[name])
        for name in ("chains", "residues", "interfaces")
    }
    chains, residues, interfaces = tables["chains"], tables["residues"], tables["interfaces"]
    resolved = np.zeros(len(chains["asym_id"]), np.int64)
    np.add.at(resolved, residues["chain"], residues["resolved"])
    rows = []
    for index in range(len(chains["asym_id"])):
        mol_type = MolType(int(chains["mol_type"][index]))
        sequence = attributes["entities"][int(chains["entity_id"][index]) - 1]["sequence"]
        rows.append(
            {
                "label_asym_id": attributes["chains"]["label_asym_id"][index],
                "auth_asym_id": attributes["chains"]["auth_asym_id"][index],
                **{name: int(chains[name][index]) for name in ("asym_id", "entity_id", "sym_id")},
                "mol_type": mol_type.name.lower(),
                "n_residue": int(chains["residue_count"][index]),
                "n_token": int(chains["token_count"][index]),
                "n_resolved": int(resolved[index]),
                "sequence_digest": hashlib.sha256(sequence.encode()).hexdigest() if sequence else "",
                "cluster": _ligand_cluster(attributes["components"], chains, residues, index),
            }
        )
    counts = np.bincount(chains["mol_type"], minlength=len(MolType))
    return {
        "entry": attributes["entry"],
        "assembly": attributes["assembly"],
        "release_date": attributes["release_date"],
        "resolution": attributes["resolution"],
        "method": attributes["method"],
        "title": attributes["title"],
        "n_token": content.arrays["tokens"].shape[1],
        "n_atom": content.arrays["atoms"].shape[1],
        "n_residue": content.arrays["residues"].shape[1],
        **{f"n_chain_{kind.name.lower()}": int(counts[kind]) for kind in MolType},
        "chains": rows,
        "interfaces": [
            {"chain_i": int(i), "chain_j": int(j)}
            for i, j in zip(interfaces["chain_i"], interfaces["chain_j"], strict=True)
        ],
        "components": list(attributes["components"]),
        "component_digests": list(attributes["component_digests"]),
        "warnings": list(attributes["warnings"]),
    }
