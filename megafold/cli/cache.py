"""``megafold cache``: build, verify, info, ls, show, push, gc."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from megafold.cli.cores import usable_cores
from megafold.cli.gc import gc
from megafold.cli.locations import CacheFolder, CacheLocation
from megafold.cli.push import push

#: Rows that `ls` has as Python objects at a time.
_ROWS_AT_A_TIME = 4096
_FOLDER = click.Path(path_type=Path)
_EXISTING = click.Path(path_type=Path, exists=True)
_EXISTING_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_cache_argument = click.argument("cache", type=CacheLocation())
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def _source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what a cache is built from: ``build`` and ``verify`` share them."""
    for option in (
        click.option(
            "--ccd-extra",
            "ccd_extra",
            type=_EXISTING_FILE,
            multiple=True,
            help="Further component definitions (mmCIF); they win over the dictionary's. Repeatable.",
        ),
        click.option(
            "--ccd",
            type=_EXISTING_FILE,
            help="Component dictionary (components.cif[.gz] or .bcif). Default: biotite's.",
        ),
        click.option(
            "--template-structures",
            type=_EXISTING,
            multiple=True,
            help="Folders with the structures that template hits name, or caches. Default: the corpus. "
            "Repeatable.",
        ),
        click.option(
            "--alignments",
            type=_EXISTING,
            help="Folder of alignments: one folder a chain, <entry>_<chain> or the first 16 digits of the "
            "SHA-256 of its sequence.",
        ),
    ):
        command = option(command)
    return command


def _sources(corpus: Path, values: dict[str, Any]) -> Any:
    from megafold.pipeline.builder.config import Sources

    return Sources(
        corpus=corpus,
        alignments=values["alignments"],
        template_structures=tuple(values["template_structures"]),
        ccd=values["ccd"],
        ccd_extra=tuple(values["ccd_extra"]),
    ).with_templates_from_corpus()


@click.group(name="cache")
def command() -> None:
    """Build a cache of deterministic features, and look after it.

    What only reads takes a URL (s3://, gs://, https://, file://) as well as a folder.
    """


command.add_command(push)
command.add_command(gc)


def _memory(_: click.Context, __: click.Parameter, text: str) -> str:
    from dask.utils import parse_bytes

    try:
        if text != "auto" and parse_bytes(text) <= 0:
            raise ValueError(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: give an amount such as 4GiB, or auto") from error
    return text


@command.command()
@click.argument("corpus", type=_FOLDER)
@click.argument("cache", type=CacheFolder())
@_source_options
@click.option("--workers", type=click.IntRange(0), default=None, help="Worker processes; 0: this process.")
@click.option("--scheduler", help="Address of a running Dask scheduler (tcp://…) to use instead.")
@click.option(
    "--memory-limit",
    default="auto",
    callback=_memory,
    help="Memory of one worker (4GiB); more ends its task. Default: its share of the machine's.",
)
@click.option(
    "--task-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds one task may take.",
)
@click.option(
    "--max-failures",
    default="5%",
    show_default=True,
    help="Entries that may fail, as a number or a share, before the exit status is 1.",
)
@click.option(
    "--clusters",
    metavar="auto|mmseqs2|none|FILE",
    default="auto",
    show_default=True,
    help="Which proteins are alike, for the sampling weights. auto: MMseqs2's clusters of 40 % identity if "
    "it is on the PATH, else those of identical sequence; mmseqs2: MMseqs2's or an error; none: identical "
    "sequences; FILE: lines of cluster, tab, member (mmseqs easy-cluster) or lines of a cluster's "
    "<ENTRY>_<entity> ids (RCSB's clusters-by-entity).",
)
@click.option("--retry-failed", is_flag=True, help="Try again what failed before.")
@click.option("--assembly", default="1", show_default=True, help="Assembly id, or `asym`: as deposited.")
@click.option("--quiet", is_flag=True, help="No progress, no table.")
@_json_option
def build(corpus: Path, cache: Path, as_json: bool, quiet: bool, **values: Any) -> None:
    """Featurize the structures of CORPUS into CACHE.

    CORPUS is a folder of mmCIF files, a list of them, or a TSV that maps entries to files. Run it again to
    go on after an interruption, or to take in what changed: finished work is never repeated. Failures stand
    in the cache's ledger with their reasons (`megafold cache info`).
    """
    from megafold.pipeline.builder.config import BuildConfig, FailureLimit, Resources
    from megafold.pipeline.builder.engine import Build
    from megafold.pipeline.builder.progress import BuildProgress
    from megafold.pipeline.structure import StructureOptions

    workers = values["workers"] if values["workers"] is not None else usable_cores()
    config = BuildConfig(
        sources=_sources(corpus, values),
        cache=cache,
        structure=replace(StructureOptions(), assembly=values["assembly"]),
        resources=Resources(
            workers=workers,
            scheduler=values["scheduler"],
            task_timeout_s=values["task_timeout"],
            memory_limit=values["memory_limit"],
        ),
        clusters=values["clusters"],
        max_failures=FailureLimit.parse(values["max_failures"]),
        retry_failed=values["retry_failed"],
    )
    with BuildProgress(quiet=quiet or as_json) as progress:
        try:
            report = Build(config, progress).run()
        except KeyboardInterrupt:
            click.echo("Interrupted. Nothing is lost: the same command goes on from here.", err=True)
            sys.exit(130)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    elif not quiet:
        _print_report(report, config.max_failures)
    sys.exit(0 if report.within_limit else 1)


def _print_report(report: Any, limit: Any) -> None:
    table = Table("stage", "computed", "reused", "failed", title="Build")
    failed = Counter(failure["stage"] for failure in report.failures)
    for stage in ("structure", "component", "msa", "pairing", "template"):
        table.add_row(
            stage,
            str(report.computed.get(stage, 0)),
            str(report.reused.get(stage, 0)),
            str(failed.get(stage, 0)),
        )
    Console().print(table)
    click.echo(
        f"{report.entries} entries in the snapshot, {report.failed_entries} with failures "
        f"(limit {limit}); {report.chains} polymer chains, {report.chains_with_msa} with an MSA, "
        f"{report.chains_with_template} with templates; {report.elapsed_s:.1f} s"
    )
    click.echo(_clusters_text(report.clusters))
    for reason, number in Counter(f["reason"] for f in report.failures).most_common():
        first = next(f for f in report.failures if f["reason"] == reason)
        click.echo(f"  {number} × {reason}, for instance {first['entry']}: {first['message']}")
    click.echo(f"manifest {report.manifest}")
    if not report.within_limit:
        click.echo("More failures than --max-failures allows: exit status 1.")


def _clusters_text(clusters: Mapping[str, Any]) -> str:
    """One line: how proteins were clustered, and what could not be."""
    method = " ".join(str(clusters[name]) for name in ("method", "version", "format") if name in clusters)
    text = f"{clusters['proteins']} distinct proteins in {clusters['clusters']} clusters ({method})"
    for name, meaning in (
        ("unplaced", "in none, clustered by sequence"),
        ("contradicted", "of which the file puts chains in several"),
        ("by_identity", "names of peptides and nucleic acids, which go by sequence"),
    ):
        if clusters.get(name):
            text += f"; {clusters[name]} {meaning}"
    return text


def _open(cache: Path | str) -> tuple[Any, Any, Any]:
    """The store, its current manifest's digest and the manifest (None before the first build ended)."""
    from megafold.cache_store import MAIN_REF, open_store

    store = open_store(cache)
    digest = store.ref(MAIN_REF)
    return store, digest, None if digest is None else store.manifest(digest)


@command.command()
@_cache_argument
@click.option("--quick", is_flag=True, help="Compare file digests alone; decode nothing.")
@click.option("--corpus", type=_FOLDER, help="Also say what is stale or new against this corpus.")
@click.option("--clusters", metavar="auto|mmseqs2|none|FILE", help="Also say whether the clusters are these.")
@click.option(
    "--recompute", metavar="N|all", help="Featurize N entries (or all) again and compare; needs --corpus."
)
@_source_options
@click.option("--workers", type=click.IntRange(1), default=None, help="Processes that check objects.")
@_json_option
def verify(cache: Path | str, quick: bool, corpus: Path | None, as_json: bool, **values: Any) -> None:
    """Check that CACHE is whole: every object, manifest and ref.

    Exit status 1 when something is wrong or stale. Every finding says what to do about it.
    """
    from megafold.cache_store import open_store
    from megafold.pipeline.builder import verify as checks

    workers = values["workers"] or usable_cores()
    number = _recompute_number(values["recompute"], corpus)
    store, progress = open_store(cache), _counter("objects", silent=as_json)
    manifest = _manifest_or_none(store)
    findings = checks.check_store(store, manifest, quick=quick, workers=workers, progress=progress)
    if manifest is not None:
        findings += checks.check_versions(manifest)
        if values["clusters"] is not None:
            findings += checks.check_clusters(manifest, values["clusters"])
        if not quick:
            findings += checks.check_schema(store, manifest, workers=workers)
        if corpus is not None:
            sources = _sources(corpus, values)
            findings += checks.check_corpus(store, manifest, sources)
            if number != 0:
                again = _counter("entries computed again", silent=as_json)
                findings += checks.check_recompute(manifest, sources, number, again)
    serious = [finding for finding in findings if finding.level != "info"]
    if as_json:
        click.echo(json.dumps({"ok": not serious, "findings": [f.to_json() for f in findings]}, indent=1))
    else:
        _print_findings(findings)
    sys.exit(1 if serious else 0)


def _manifest_or_none(store: Any) -> Any:
    """The current manifest; None where there is none, or a damaged one, which `check_store` reports."""
    from megafold.cache_store import CacheError

    try:
        return store.manifest()
    except CacheError:
        return None


def _recompute_number(text: str | None, corpus: Path | None) -> int | None:
    """Entries to compute again; None for all, 0 for none."""
    if text is None:
        return 0
    if corpus is None:
        raise click.UsageError("--recompute needs --corpus: the files to compute from")
    if text == "all":
        return None
    if not text.isdigit() or text == "0":
        raise click.UsageError(f"--recompute {text}: give a number of entries, or `all`")
    return int(text)


def _counter(noun: str, *, silent: bool) -> Callable[[int, int], None]:
    """A progress line on a terminal."""

    def show(done: int, total: int) -> None:
        if not silent and sys.stderr.isatty():
            click.echo(f"\r{done}/{total} {noun}", err=True, nl=done == total)

    return show


def _print_findings(findings: list[Any]) -> None:
    for finding in findings:
        if finding.level == "info":
            continue
        users = ", ".join(finding.entries[:5]) + (" …" if len(finding.entries) > 5 else "")
        click.echo(f"{finding.level.upper()} {finding.kind} {finding.subject}: {finding.message}")
        if users:
            click.echo(f"    entries: {users}")
        click.echo(f"    → {finding.action}")
    for kind, number in Counter(f.kind for f in findings if f.level == "info").items():
        example = next(finding for finding in findings if finding.kind == kind)
        click.echo(f"{number} × {kind}, which does no harm. {example.action}")
    counts = Counter(finding.level for finding in findings)
    if not counts["error"] and not counts["stale"]:
        click.echo("The cache is whole.")
    else:
        click.echo(f"{counts['error']} errors, {counts['stale']} stale or new.")


@command.command()
@_cache_argument
@click.option("--failures", "show_failures", is_flag=True, help="List every failure.")
@_json_option
def info(cache: Path | str, show_failures: bool, as_json: bool) -> None:
    """What CACHE holds: entries, failures, objects, bytes."""
    from megafold.cache_store import Digest

    store, digest, manifest = _open(cache)
    sizes = [size for _, size in store.sizes()]
    ledger = "" if manifest is None else str(manifest.attributes["ledger"])
    failures = store.ledger(Digest.parse(ledger)) if ledger else []
    facts: dict[str, Any] = {
        "entries": 0 if manifest is None else manifest.table.num_rows,
        "failures": len({failure.entry for failure in failures}),
        "objects": len(sizes),
        "bytes": sum(sizes),
        "manifest": None if digest is None else str(digest),
    }
    if manifest is not None:
        table = manifest.table
        facts |= {name: sum(table.column(name).to_pylist()) for name in ("n_token", "n_atom")}
        facts["components"] = manifest.attributes["components"]
        facts["versions"] = dict(manifest.attributes["versions"])
        facts["clusters"] = dict(manifest.attributes.get("clusters", {}))
        facts["failures_by_reason"] = dict(Counter(failure.reason for failure in failures))
    rows = [{"entry": f.entry, "stage": f.stage, "reason": f.reason, "message": f.message} for f in failures]
    if as_json:
        click.echo(json.dumps(facts | ({"failed": rows} if show_failures else {}), indent=1))
        return
    for name, value in facts.items():
        click.echo(f"{name.replace('_', ' '):<20} {value}")
    for row in rows if show_failures else ():
        click.echo(f"{row['entry']}  {row['stage']}  {row['reason']}: {row['message']}")


@command.command()
@_cache_argument
@_json_option
def ls(cache: Path | str, as_json: bool) -> None:
    """The entries of CACHE, one a line."""
    _, manifest = _snapshot(cache)
    facts = _entry_facts(manifest.table)
    if as_json:
        click.echo(json.dumps(list(facts), indent=1))
        return
    # However narrow the terminal, an entry is a line: for grep, and never with a date cut in half.
    titles = ("entry", "assembly", "chains", "tokens", "atoms", "MSA", "templates", "Å", "released")
    click.echo("\n".join(_columns([titles, *map(_entry_cells, facts)])))


def _entry_facts(table: Any) -> Iterator[dict[str, Any]]:
    """What `ls` says of each row of a manifest."""
    names = ["entry", "assembly", "n_token", "n_atom", "release_date", "resolution", "method"]
    for batch in table.select([*names, "chains"]).to_batches(max_chunksize=_ROWS_AT_A_TIME):
        for row in batch.to_pylist():
            chains = row["chains"]
            yield {
                **{name: row[name] for name in names},
                "chains": dict(Counter(chain["mol_type"] for chain in chains)),
                "msa_depth": max((chain["msa_depth"] for chain in chains), default=0),
                "templates": max((chain["n_template"] for chain in chains), default=0),
            }


def _entry_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["entry"],
        row["assembly"],
        " ".join(f"{number} {kind}" for kind, number in sorted(row["chains"].items())),
        *(str(row[name]) for name in ("n_token", "n_atom", "msa_depth", "templates")),
        "" if row["resolution"] is None else f"{row['resolution']:.2f}",
        row["release_date"] or "",
    )


def _columns(rows: list[tuple[str, ...]]) -> Iterable[str]:
    """Lines of columns. Rich's tables take a minute for 50 000 of them, and a gigabyte."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _snapshot(cache: Path | str) -> tuple[Any, Any]:
    """The store and its current manifest, which has to be there."""
    store, _, manifest = _open(cache)
    if manifest is None:
        raise click.UsageError(f"{cache} has no snapshot yet: run `megafold cache build`")
    return store, manifest


@command.command(short_help="One entry of CACHE, or one object.")
@_cache_argument
@click.argument("name")
@_json_option
def show(cache: Path | str, name: str, as_json: bool) -> None:
    """One entry of CACHE, or one object by the first digits of its digest."""
    import pyarrow.compute as pc

    store, manifest = _snapshot(cache)
    rows = manifest.table.filter(pc.equal(manifest.table["entry"], name.lower())).to_pylist()
    if rows:
        digests = [rows[0]["structure"], rows[0]["pairing"]]
        digests += [chain[key] for chain in rows[0]["chains"] for key in ("msa", "template")]
        facts: dict[str, Any] = {"entry": rows[0]}
    else:
        digests = [str(digest) for digest in store.digests() if str(digest).startswith(name.lower())]
        facts = {}
        if len(digests) != 1:
            raise click.UsageError(
                f"{name}: no such entry, and {len(digests) or 'no'} objects begin so; "
                "`megafold cache ls` lists the entries"
            )
    facts["objects"] = {digest: _object_facts(store, digest) for digest in dict.fromkeys(digests) if digest}
    click.echo(json.dumps(facts, indent=1) if as_json else _as_text(facts))


def _object_facts(store: Any, digest: str) -> dict[str, Any]:
    from megafold.cache_store import Digest
    from megafold.pipeline import schema

    with store.open(Digest.parse(digest)) as reader:
        kind = str(reader.attributes.get("kind"))
        return {
            "kind": kind,
            "bytes": store.size(Digest.parse(digest)),
            "arrays": {
                name: {
                    "shape": list(reader.shapes[name]),
                    "dtype": str(reader.dtypes[name]),
                    "doc": schema.OBJECTS[kind][name].doc,
                }
                for name in sorted(reader.shapes)
            },
            "attributes": dict(reader.attributes),
        }


def _as_text(facts: dict[str, Any]) -> str:
    lines = []
    for key, value in facts.get("entry", {}).items():
        if not isinstance(value, list):
            lines.append(f"{key:<16} {value}")
    for chain in facts.get("entry", {}).get("chains", ()):
        lines.append(
            f"chain {chain['label_asym_id']:<4} entity {chain['entity_id']} copy {chain['sym_id']} "
            f"{chain['mol_type']:<8} {chain['n_residue']:>5} residues ({chain['n_resolved']} resolved), "
            f"{chain['n_token']} tokens, MSA {chain['msa_depth']} ({chain['msa_status']}), "
            f"{chain['n_template']} templates"
        )
    for warning in facts.get("entry", {}).get("warnings", ()):
        lines.append(f"warning: {warning}")
    for digest, described in facts["objects"].items():
        lines.append(f"\n{described['kind']} {digest} ({described['bytes']} bytes)")
        for name, array in described["arrays"].items():
            shape = " × ".join(map(str, array["shape"])) or "scalar"
            lines.append(f"  {name:<18} {array['dtype']:<8} [{shape}]  {array['doc']}")
        left_out = described["attributes"].get("skipped")
        if left_out:
            lines.append(f"  left out: {', '.join(f'{number} {why}' for why, number in left_out.items())}")
        lines += [f"  warning: {warning}" for warning in described["attributes"].get("warnings", ())]
    return "\n".join(lines)
