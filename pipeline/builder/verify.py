"""Checking a cache: is what it holds whole, does it fit its corpus, does it come out the same again?

Six questions, each with its findings and what to do about them:

- the store: every object decodes and hashes to its name, nothing named is missing (:func:`check_store`),
- the stages: did the versions at hand compute it (:func:`check_versions`),
- the schema: every object is of the kind and shape its manifest row says (:func:`check_schema`),
- the corpus: which entries are new, changed or gone since the build (:func:`check_corpus`),
- the clusters: were they made as is asked now (:func:`check_clusters`),
- the featurizer: computed again, does an entry come out with the same digest (:func:`check_recompute`)?
"""

import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from megafold.cache_store import (
    MAIN_REF,
    CacheError,
    CorruptObject,
    CorruptRef,
    Digest,
    LocalStore,
    Manifest,
    MissingObject,
    Store,
    audit,
)
from megafold.pipeline import schema
from megafold.pipeline.builder.config import Sources
from megafold.pipeline.builder.known import Known
from megafold.pipeline.builder.planner import Planner
from megafold.pipeline.builder.processes import process_map
from megafold.pipeline.builder.recipes import LIBRARIES, VERSIONS, dictionary_identity, options_from_json
from megafold.pipeline.builder.tasks import StructureTask, Task, WorkerConfig, run_task
from megafold.pipeline.clusters import choose_clustering
from megafold.pipeline.corpus import discover
from megafold.pipeline.manifest import EntryRow, entry_rows, referenced_digests
from megafold.pipeline.structure import StructureOptions

#: Objects to look at, from which on processes are worth their start.
_WORTH_PROCESSES: Final = 4096

Level = Literal["error", "stale", "info"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, and what to do about it.

    ``error``: the cache cannot be trusted. ``stale``: it is sound, and the corpus has moved on. ``info``:
    nothing is wrong. ``entries`` are those that are affected.
    """

    level: Level
    kind: str
    subject: str
    message: str
    action: str
    entries: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def users(manifest: Manifest, objects: Set[str]) -> dict[str, list[str]]:
    """Entries by the object of ``objects`` that they use; the component library is everybody's and not
    among them.
    """
    found: dict[str, set[str]] = {}
    for row in entry_rows(manifest) if objects else ():
        named = {row.structure, row.pairing} | {d for c in row.chains for d in (c.msa, c.template)}
        for digest in named & objects:
            found.setdefault(digest, set()).add(row.entry)
    return {digest: sorted(entries) for digest, entries in found.items()}


def check_store(
    store: Store, manifest: Manifest | None, *, quick: bool, workers: int, progress: Progress
) -> list[Finding]:
    """Every object, manifest and ref. ``quick`` compares file digests and decodes nothing."""
    # Older snapshots count: a training run may have been recorded with one.
    expected: set[Digest] = set()
    ledgers: set[str] = set()
    for digest in store.manifests():
        with suppress(CacheError):  # the audit reports a damaged one
            snapshot = store.manifest(digest)
            expected |= referenced_digests(snapshot)
            ledgers.add(str(snapshot.attributes["ledger"]))
    audited = partial(audit, store, expected, quick=quick, progress=progress)
    if workers > 1:
        with process_map(workers) as mapped:
            found = audited(mapper=mapped)
    else:
        found = audited()
    named = {} if manifest is None else users(manifest, {finding.subject for finding in found})
    return [
        *_nothing_published(store),
        *_lost_ledgers(store, ledgers - {""}),
        *(
            Finding(
                level=finding.level,
                kind=finding.kind,
                subject=finding.subject,
                message=finding.message,
                action=finding.action,
                entries=tuple(named.get(finding.subject, ())),
            )
            for finding in found
        ),
    ]


def _nothing_published(store: Store) -> Iterator[Finding]:
    """A finding where no snapshot is named: no build has ended, or the ref was lost on the way here."""
    with suppress(CorruptRef):  # the audit reports it
        if store.ref(MAIN_REF) is None:
            yield Finding(
                level="error",
                kind="no-snapshot",
                subject=MAIN_REF,
                message=f"ref {MAIN_REF} is not there: nothing was published, or the file was lost",
                action="run `megafold cache build`: what is finished is kept; of a copy, copy refs/, too",
            )


def _lost_ledgers(store: Store, named: set[str]) -> Iterator[Finding]:
    for digest in sorted(named - {str(digest) for digest in store.ledgers()}):
        yield Finding(
            level="error",
            kind="missing-ledger",
            subject=digest,
            message="a manifest names this list of failures, and it is not there",
            action="build again: what failed is tried again, and told",
        )


def check_versions(manifest: Manifest) -> list[Finding]:
    """Stages and libraries of which another version computed what the snapshot holds."""
    built: Any = manifest.attributes["versions"]
    return [
        Finding(
            # A library's version is the choice of whoever built the cache.
            level="info" if name in LIBRARIES else "stale",
            kind="other-version",
            subject=name,
            message=f"computed by version {built.get(name, 'none')}, this is {ours}",
            action="build again from the corpus to have it computed by this version (see CHANGELOG.md)",
        )
        for name, ours in VERSIONS.items()
        if built.get(name) != ours
    ]


def check_schema(store: Store, manifest: Manifest, *, workers: int = 1) -> list[Finding]:
    """Every object against the schema and its manifest row. Corrupt ones are :func:`check_store`'s."""
    expected = list(_expected_kinds(manifest))
    check = partial(_schema_finding, store)
    if workers > 1 and len(expected) >= _WORTH_PROCESSES:
        with process_map(workers) as mapped:
            found = list(mapped(check, expected))
    else:
        found = list(map(check, expected))
    return [finding for finding in found if finding is not None]


def _schema_finding(store: Store, expected: tuple[str, str, str]) -> Finding | None:
    """What is wrong with an object of this digest, kind and entry; None for a lost or damaged one, too."""
    digest, kind, entry = expected
    try:
        with store.open(Digest.parse(digest)) as reader:
            found = reader.attributes.get("kind")
            if found != kind:
                raise schema.SchemaError(f"it is a {found}, the manifest says {kind}")
            layout = {name: (reader.dtypes[name], reader.shapes[name]) for name in reader.shapes}
            schema.validate_layout(kind, layout, reader.attributes)
    except (CorruptObject, MissingObject):
        return None
    except schema.SchemaError as error:
        return Finding(
            level="error",
            kind="schema",
            subject=digest,
            message=f"object {digest} of {entry} does not fit the schema: {error}",
            action="written by another version; remove the cache folder and build again",
            entries=(entry,),
        )
    return None


def _expected_kinds(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    seen = set()
    yield str(manifest.attributes["components"]), "component", "the component library"
    for row in entry_rows(manifest):
        named = [(row.structure, "structure"), (row.pairing, "pairing")]
        for chain in row.chains:
            named += [(chain.msa, "msa"), (chain.template, "template")]
        for digest, kind in named:
            if digest and digest not in seen:
                seen.add(digest)
                yield digest, kind, row.entry


def check_corpus(store: Store, manifest: Manifest, sources: Sources) -> list[Finding]:
    """What a build would do now: entries and alignments that are new, changed or gone."""
    known = Known(store, dictionary_identity(sources))
    try:
        known.add_manifest(manifest, with_failures=True)
    except CacheError as error:
        return [
            Finding(
                level="error",
                kind="unchecked",
                subject="corpus",
                message=f"the cache could not be compared with the corpus: {error}",
                action="mend that, then verify again",
            )
        ]
    planner = Planner(sources, discover(sources.corpus), options_of(manifest), known)
    built = {row.entry: row for row in entry_rows(manifest)}
    pending = planner.start()
    for task in list(pending):
        # A changed structure says nothing of its alignments: look at those of the structure as it was.
        if isinstance(task, StructureTask) and task.entry in built:
            before = known.find(built[task.entry].recipes["structure"])
            if before is not None:
                pending += planner.settle(task, before)
    pending += planner.pairings()
    action = "run the same `megafold cache build` again; only what changed is computed"
    return [_pending_finding(task, planner, built, action) for task in pending] + list(_gone(planner, built))


def _gone(planner: Planner, built: Mapping[str, EntryRow]) -> Iterator[Finding]:
    """Entries and alignments that the snapshot has and the corpus has no longer."""
    for entry in sorted(set(built) - set(planner.entries)):
        yield Finding(
            level="stale",
            kind="gone",
            subject=entry,
            message=f"{entry} is in the cache and no longer in the corpus",
            action="build again to drop it from the snapshot, or put its file back",
            entries=(entry,),
        )
    for plan in planner.entries.values():
        row = built.get(plan.source.entry)
        if row is None or plan.row is None:
            continue
        for name in sorted(set(row.recipes) - set(plan.recipes) - {"structure", "pairing", "namesakes"}):
            stage, _, entity = name.partition(":")
            yield Finding(
                level="stale",
                kind="gone",
                subject=f"{row.entry} {name}",
                message=f"{row.entry}: the {stage} files of entity {entity} are gone",
                action="put them back (was --alignments given?), or build again without them",
                entries=(row.entry,),
            )


def _pending_finding(task: Task, planner: Planner, built: dict[str, EntryRow], action: str) -> Finding:
    entries = tuple(sorted(planner.users[task.recipe]))
    if isinstance(task, StructureTask):
        changed = task.entry in built
        kind = "stale" if changed else "new"
        message = (
            f"{task.entry}: the structure file, a component it uses, or the featurizer changed"
            if changed
            else f"{task.entry} is in the corpus and not in the cache"
        )
        return Finding(
            level="stale", kind=kind, subject=task.entry, message=message, action=action, entries=entries
        )
    files = ", ".join(path.name for path in getattr(task, "files", ()))
    message = f"{task.stage} of {task.label} changed or is new{': ' + files if files else ''}"
    return Finding(
        level="stale", kind="stale", subject=task.label, message=message, action=action, entries=entries
    )


def check_clusters(manifest: Manifest, setting: str) -> list[Finding]:
    """Whether a snapshot's clusters were made as ``setting`` says (`--clusters` of a build).

    Raises:
        InputError: as :func:`~megafold.pipeline.clusters.choose_clustering`.
    """
    identity = choose_clustering(setting)[0].identity
    found: Any = manifest.attributes.get("clusters", {})
    differing = [name for name, value in identity.items() if found.get(name) != value]
    if not differing:
        return []
    name = differing[0]
    return [
        Finding(
            level="stale",
            kind="clusters",
            subject="clusters",
            message=f"proteins are clustered otherwise: {name} is {found.get(name)}, now {identity[name]}",
            action="build again with this `--clusters`: the manifest alone is made anew",
        )
    ]


def options_of(manifest: Manifest) -> StructureOptions:
    """The structure options that a snapshot was built with."""
    config: Any = manifest.attributes["config"]
    return options_from_json(config["structure"])


def check_recompute(
    manifest: Manifest, sources: Sources, number: int | None, progress: Progress
) -> list[Finding]:
    """Featurize ``number`` entries again (None: all) into a scratch cache and compare digests.

    Their structures, MSAs, pairings and templates; entries whose inputs changed since are left out.
    """
    rows = {row.entry: row for row in entry_rows(manifest)}
    chosen = sorted(rows)
    if number is not None:
        chosen = sorted(random.Random(0).sample(chosen, min(number, len(chosen))))
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="megafold-recompute-") as scratch:
        again = LocalStore.create(Path(scratch) / "cache")
        dictionary = dictionary_identity(sources)
        worker = WorkerConfig(cache=str(again.path), sources=sources, dictionary=dictionary)
        nothing = Known(again, dictionary)
        planner = Planner(sources, discover(sources.corpus), options_of(manifest), nothing)
        for done, entry in enumerate(chosen):
            progress(done, len(chosen))
            if entry in planner.entries and planner.entries[entry].recipe == rows[entry].recipes["structure"]:
                findings += _recompute_entry(planner, worker, rows[entry])
        progress(len(chosen), len(chosen))
    return findings


def _recompute_entry(planner: Planner, worker: WorkerConfig, row: EntryRow) -> Iterable[Finding]:
    plan = planner.entries[row.entry]
    queue: list[Task] = [planner.structure_task(plan)]
    while queue:
        task = queue.pop()
        if task.stage != "component":
            queue += planner.settle(task, run_task(worker, task))
    for task in planner.pairings([row.entry]):
        planner.settle(task, run_task(worker, task))
    for name, recipe in {"structure": plan.recipe, **plan.recipes}.items():
        outcome = planner.outcomes.get(recipe)
        if row.recipes.get(name) != recipe or outcome is None:
            continue
        result = outcome.result or {}
        again = result.get("structure", result.get("object", ""))
        stored = _stored(row, name)
        if again != stored:
            yield Finding(
                level="error",
                kind="not-reproduced",
                subject=stored or f"{row.entry} {name}",
                message=f"{row.entry}: {name} computed again gives {again or 'nothing'}, "
                f"the cache holds {stored or 'nothing'}",
                action="the installed libraries or this code compute something else than at build time: "
                "compare `megafold cache info` with your environment, or build a new cache",
                entries=(row.entry,),
            )


def _stored(row: EntryRow, name: str) -> str:
    if name == "structure":
        return row.structure
    if name == "pairing":
        return row.pairing
    stage, _, entity = name.partition(":")
    chain = next(chain for chain in row.chains if chain.entity_id == int(entity))
    return chain.msa if stage == "msa" else chain.template
