"""The build: find what is new, compute it, publish a snapshot.

Order of things, so that nothing is ever half-written: objects first (each by rename), then one journal line
for each finished task, then the library, the ledger and the manifest, then the ref, by compare-and-swap.
Whoever is interrupted before the ref moved leaves objects and a journal; the next build replays them.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from megafold.cache_store import (
    MAIN_REF,
    CorruptManifest,
    Digest,
    Failure,
    Journal,
    LocalStore,
    Manifest,
    MissingManifest,
)
from megafold.pipeline.builder import recipes
from megafold.pipeline.builder.config import BuildConfig
from megafold.pipeline.builder.known import Known
from megafold.pipeline.builder.planner import EntryPlan, Planner
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.builder.runner import make_runner, require_scheduler
from megafold.pipeline.builder.tasks import Outcome, Task, WorkerConfig
from megafold.pipeline.chemistry.conformers import build_reference
from megafold.pipeline.chemistry.library import library_content
from megafold.pipeline.chemistry.reference import ReferenceComponent
from megafold.pipeline.clusters import assign_clusters, choose_clustering
from megafold.pipeline.corpus import discover
from megafold.pipeline.manifest import chain_column, manifest_from_rows

#: What a power failure may take of the journal: its tasks are then run again. Syncing each record would cap a
#: build at as many tasks a second as the disk has syncs, however many workers there are.
_SYNC_EVERY_S: Final = 1.0
#: What a structure's outcome tells the planner, and the manifest keeps elsewhere.
_ROW_OF_THE_BUILD_ALONE: Final = ("component_digests", "own_components", "namesakes")


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build came to."""

    manifest: str
    entries: int
    failed_entries: int
    #: Stage → tasks.
    computed: dict[str, int]
    reused: dict[str, int]
    failures: list[dict[str, str]]
    chains: int
    chains_with_msa: int
    chains_with_template: int
    #: How proteins were clustered: the manifest's attribute.
    clusters: dict[str, Any]
    elapsed_s: float
    within_limit: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Build:
    """One run of ``megafold cache build``."""

    def __init__(self, config: BuildConfig, progress: BuildProgress) -> None:
        self._config = config = replace(config, sources=config.sources.absolute())
        self._progress = progress
        self._found = discover(config.sources.corpus)
        self._dictionary = recipes.dictionary_identity(config.sources)
        self._clustering, remark = choose_clustering(config.clusters, max(1, config.resources.workers))
        if remark:
            progress.say(remark)
        self._computed: Counter[str] = Counter()
        self._total = 0
        self._failures = 0
        self._resolved_folders: dict[Path, Path] = {}

    def run(self) -> BuildReport:
        """Build, publish, report.

        Raises:
            InputError: the corpus, an option or the scheduler cannot be used.
            megafold.cache_store.CacheError: the cache cannot be written, or another build holds it.
            KeyboardInterrupt: interrupted; what was finished is in the journal.
        """
        started = time.monotonic()
        require_scheduler(self._config.resources)
        store = LocalStore.create(self._config.cache)
        with store.build_lock() as lock:
            store.sweep(lock=lock)
            published = store.ref(MAIN_REF)
            parent = None if published is None else self._readable(store, published)
            known = self._known(store, parent)
            planner = Planner(self._config.sources, self._found, self._config.structure, known)
            tasks = planner.start()
            self._progress.say(
                f"{len(planner.entries)} entries; {sum(planner.reused.values())} results reused, "
                f"{len(tasks)} tasks to begin with"
            )
            self._remark_on_entries_gone(planner, parent)
            self._execute(store, planner, tasks)
            self._remark_on_alignments(planner)
            manifest, failures = self._snapshot(store, planner, parent)
            digest = store.put_manifest(manifest)
            if parent is None or digest != published:
                store.move_ref(MAIN_REF, published, digest)
            for build in list(store.journals()):
                store.journal(build).remove()
        return self._report(planner, manifest, digest, failures, time.monotonic() - started)

    # -- reuse -----------------------------------------------------------------------------------------

    def _readable(self, store: LocalStore, published: Digest) -> Manifest | None:
        """The published snapshot; None, with a remark, where it is lost or damaged: this build mends that."""
        try:
            manifest = store.manifest(published)
            if ledger := str(manifest.attributes["ledger"]):
                store.ledger(Digest.parse(ledger))
        except (MissingManifest, CorruptManifest) as error:
            self._progress.say(f"{error} Nothing can be reused: all entries are computed again.")
            return None
        return manifest

    def _known(self, store: LocalStore, parent: Manifest | None) -> Known:
        known = Known(store, self._dictionary)
        with_failures = not self._config.retry_failed
        if parent is not None:
            known.add_manifest(parent, with_failures=with_failures)
        for build in store.journals():
            for record in store.journal(build).replay():
                known.add_journal_record(record, with_failures=with_failures)
        return known

    # -- work ------------------------------------------------------------------------------------------

    def _execute(self, store: LocalStore, planner: Planner, tasks: list[Task]) -> None:
        worker = WorkerConfig(
            cache=str(store.path.resolve()), sources=self._config.sources, dictionary=self._dictionary
        )
        if self._config.resources.order != "largest-first":
            tasks = sorted(
                tasks, key=lambda task: task.label, reverse=self._config.resources.order == "reversed"
            )
        self._total = len(tasks)
        with (
            store.journal(_build_id(), sync_every_s=_SYNC_EVERY_S) as journal,
            make_runner(worker, self._config.resources) as runner,
        ):

            def settle(task: Task, outcome: Outcome) -> Iterable[Task]:
                return self._settle(journal, planner, task, outcome)

            runner.run(tasks, settle)
            pairings = planner.pairings()
            self._total += len(pairings)
            runner.run(pairings, settle)

    def _settle(self, journal: Journal, planner: Planner, task: Task, outcome: Outcome) -> list[Task]:
        journal.append(
            {
                "stage": task.stage,
                "recipe": task.recipe,
                "dictionary": self._dictionary,
                "outcome": outcome.to_json(),
            }
        )
        self._computed[task.stage] += 1
        self._failures += bool(outcome.problems)
        further = planner.settle(task, outcome)
        self._total += len(further)
        self._progress.update(done=self._computed.total(), total=self._total, failures=self._failures)
        return further

    def _remark_on_entries_gone(self, planner: Planner, parent: Manifest | None) -> None:
        """Say what a smaller corpus leaves out, as a mistyped one does, while there is time to interrupt."""
        before = () if parent is None else parent.table["entry"].to_pylist()
        gone = sorted(set(before) - planner.entries.keys())
        if gone:
            self._progress.say(
                f"{len(gone)} of {len(before)} entries in the last snapshot are not in the corpus any more "
                f"({', '.join(gone[:3])}{', …' if len(gone) > 3 else ''}): the next one leaves them out"
            )

    def _remark_on_alignments(self, planner: Planner) -> None:
        """Say so where a folder of alignments has none for any chain: the wrong one, or with other names."""
        folder, rows = self._config.sources.alignments, [plan.row for plan in planner.entries.values()]
        polymers = any(chain["sequence_digest"] for row in rows if row is not None for chain in row["chains"])
        if folder is not None and polymers and not any(plan.recipes for plan in planner.entries.values()):
            self._progress.say(
                f"{folder}: it has alignments of no chain of the corpus. A chain's are in a folder called "
                "<entry>_<chain>, or by the first 16 hex digits of the SHA-256 of its sequence."
            )

    # -- publishing ------------------------------------------------------------------------------------

    def _snapshot(
        self, store: LocalStore, planner: Planner, parent: Manifest | None
    ) -> tuple[Manifest, list[Failure]]:
        rows = [self._row(planner, plan) for plan in planner.entries.values() if plan.row is not None]
        used = sorted({key for row in rows for key in row["components"]})
        references = [
            build_reference(planner.component(key), skip_embedding=planner.failed_components[key])
            if key in planner.failed_components
            else ReferenceComponent.from_json(planner.references[key])
            for key in used
        ]
        library = store.put(library_content(references))
        failures = self._ledger(planner)
        ledger = str(store.put_ledger(failures)) if failures else ""
        attributes = {
            "components": str(library),
            "ledger": ledger,
            "config": {"structure": recipes.options_to_json(self._config.structure)},
            "versions": dict(recipes.VERSIONS),
            "clusters": assign_clusters(rows, self._clustering, store, parent),
        }
        return manifest_from_rows(rows, attributes), failures

    def _row(self, planner: Planner, plan: EntryPlan) -> dict[str, Any]:
        assert plan.row is not None
        row = {k: v for k, v in plan.row.items() if k not in _ROW_OF_THE_BUILD_ALONE}
        pairing = planner.outcomes.get(plan.recipes.get("pairing", ""))
        return {
            **row,
            "pairing": (pairing.result or {}).get("object", "") if pairing else "",
            "recipes": {
                "structure": plan.recipe,
                **plan.recipes,
                **({"namesakes": namesakes} if (namesakes := plan.row.get("namesakes")) else {}),
            },
            "source": self._relative(plan.source.path),
            "source_digest": plan.source_digest,
            "chains": [self._chain(planner, plan, chain) for chain in row["chains"]],
        }

    def _relative(self, path: Path) -> str:
        """Where a file is in the corpus; its name alone for one elsewhere."""
        # Links within folders are followed once for each: of a corpus' many files, they are the same few.
        real = path.resolve() if path.is_symlink() else self._resolved(path.parent) / path.name
        try:
            return real.relative_to(self._resolved(self._config.sources.corpus)).as_posix()
        except ValueError:
            return path.name

    def _resolved(self, folder: Path) -> Path:
        if folder not in self._resolved_folders:
            self._resolved_folders[folder] = folder.resolve()
        return self._resolved_folders[folder]

    @staticmethod
    def _chain(planner: Planner, plan: EntryPlan, chain: dict[str, Any]) -> dict[str, Any]:
        msa = planner.outcomes.get(plan.recipes.get(f"msa:{chain['entity_id']}", ""))
        template = planner.outcomes.get(plan.recipes.get(f"template:{chain['entity_id']}", ""))
        msa_result = (msa.result if msa else None) or {"object": "", "rows": 0}
        template_result = (template.result if template else None) or {"object": "", "hits": 0}
        return {
            **chain,
            "msa": msa_result["object"],
            "msa_depth": msa_result["rows"],
            "msa_status": "none" if msa is None else "ok" if msa_result["object"] else "failed",
            "template": template_result["object"],
            "n_template": template_result["hits"],
        }

    def _ledger(self, planner: Planner) -> list[Failure]:
        """One failure for each entry and problem, without paths of this machine, in a fixed order."""
        stages = {plan.recipe: "structure" for plan in planner.entries.values()}
        for plan in planner.entries.values():
            stages.update({recipe: name.partition(":")[0] for name, recipe in plan.recipes.items()})
        failures = [
            Failure(
                entry=entry,
                stage=stages.get(recipe, "component"),
                reason=problem.reason,
                message=self._without_folders(problem.message),
                inputs=(recipe, self._dictionary),
            )
            for recipe, outcome in planner.outcomes.items()
            for problem in outcome.problems
            for entry in planner.users.get(recipe, ())
        ]
        return sorted(failures, key=lambda failure: (failure.entry, failure.stage, failure.message))

    def _without_folders(self, message: str) -> str:
        sources = self._config.sources
        for folder in (sources.alignments, *sources.template_structures, sources.corpus):
            if folder is not None:
                message = message.replace(f"{folder}{os.sep}", "")
        return message

    def _report(
        self, planner: Planner, manifest: Manifest, digest: Digest, failures: list[Failure], elapsed_s: float
    ) -> BuildReport:
        kinds, msas, templates = (
            chain_column(manifest.table, name) for name in ("mol_type", "msa", "n_template")
        )
        is_polymer = pc.not_equal(kinds, "ligand")
        failed = len({failure.entry for failure in failures})
        return BuildReport(
            manifest=str(digest),
            entries=manifest.table.num_rows,
            failed_entries=failed,
            computed=dict(self._computed),
            reused=dict(planner.reused),
            failures=[
                {"entry": f.entry, "stage": f.stage, "reason": f.reason, "message": f.message}
                for f in failures
            ],
            chains=_count(is_polymer),
            chains_with_msa=_count(pc.and_(is_polymer, pc.not_equal(msas, ""))),
            chains_with_template=_count(pc.and_(is_polymer, pc.greater(templates, 0))),
            clusters=dict(manifest.attributes["clusters"]),  # type: ignore[arg-type]
            elapsed_s=elapsed_s,
            within_limit=self._config.max_failures.allows(failed, len(planner.entries)),
        )


def _count(matches: pa.ChunkedArray) -> int:
    return int(pc.sum(matches).as_py() or 0)


def _build_id() -> str:
    return f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
