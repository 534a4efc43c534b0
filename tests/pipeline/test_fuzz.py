"""Two thousand damaged corpus files: each gives features that keep all rules, or a named failure.

Every seventh file is read by default; ``MEGAFOLD_FUZZ=2000`` reads them all, ``MEGAFOLD_FUZZ_SEED`` changes
what is done to them.
"""

import csv
import faulthandler
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from megafold.cache_store import LocalStore
from megafold.pipeline.alignments import file_kind
from megafold.pipeline.builder.config import BuildConfig, Resources, Sources
from megafold.pipeline.builder.engine import Build, BuildReport
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.chemistry import load_dictionary
from megafold.pipeline.chemistry.conformers import build_reference
from megafold.pipeline.errors import AlignmentError, InputError, TemplateError
from megafold.pipeline.manifest import entry_rows
from megafold.pipeline.msa import featurize_msa
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.source import parse_alignment
from megafold.pipeline.msa.text import AlignmentText
from megafold.pipeline.schema import MolType
from megafold.pipeline.structure import featurize_structure
from megafold.pipeline.template import TemplateStructures, featurize_templates, hit_entries
from tests.pipeline import invariants
from tests.pipeline.damage import MOST_BYTES, Case, damage, make_case, sources, text_of
from tests.pipeline.structure_files import dictionary

CASES = 2000
READ = int(os.environ.get("MEGAFOLD_FUZZ", "300"))
SEED = int(os.environ.get("MEGAFOLD_FUZZ_SEED", "1"))
#: CPU time: a file that takes longer hangs. By far the most take milliseconds.
LIMIT_S = 60
#: How many components of a dictionary are made conformers of, and how large they may be: lipids take seconds.
CCD_CODES = 3
MOST_ATOMS = 80


class Reader:
    """Reads damaged files as the build would, one by one."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self._corpus = corpus
        self._folder = folder
        self._read: dict[str, Callable[[Case, Path], str]] = {
            "structure": self._structure,
            "template structure": self._template_structure,
            "components": self._components,
            "msa": self._msa,
            "hits": self._hits,
        }

    @cached_property
    def _templates(self) -> TemplateStructures:
        return TemplateStructures((self._corpus / "structures",), capacity=100)

    @cached_property
    def _sequences(self) -> dict[str, tuple[str, str]]:
        """Sequence and kind of polymer by alignment folder."""
        found = {}
        for table in (self._corpus / "chains.tsv", self._corpus / "more/chains.tsv"):
            with table.open() as file:
                for row in csv.DictReader(file, delimiter="\t"):
                    found[row["sha256"][:16] if "sha256" in row else row["sequence_sha256"][:16]] = (
                        row["sequence"],
                        row["kind"],
                    )
        return found

    def outcome(self, case: Case) -> str:
        """``features``, or the failure's reason. Anything else that is raised is a defect."""
        path = case.write(self._folder)
        try:
            return self._read[case.kind](case, path)
        except InputError as error:
            return error.reason
        finally:
            path.unlink()

    def _structure(self, case: Case, path: Path) -> str:
        result = featurize_structure(path, "damaged", dictionary())
        invariants.check(result.content)
        for component in result.own_components:
            build_reference(component)
        return "features"

    def _template_structure(self, case: Case, path: Path) -> str:
        structures = TemplateStructures((path,))
        entry = path.name.split(".cif")[0].lower()
        loaded = structures.load(entry)
        assert loaded is not None
        for chain in loaded.chains:
            assert chain.atom_pos.shape == (len(chain.sequence), 4, 3)
        return "features"

    def _components(self, case: Case, path: Path) -> str:
        known = load_dictionary(path)
        for code in known.codes()[:CCD_CODES]:
            component = known.get(code)
            if component is not None and len(component) <= MOST_ATOMS:
                build_reference(component)
        return "features"

    def _query(self, case: Case) -> tuple[str, MolType]:
        """The chain that the undamaged file belongs to."""
        listed = self._sequences.get(case.source.parent.name)
        if listed is not None:
            return listed[0], MolType[listed[1].upper()]
        mol_type = MolType.RNA if _is_rna(case.source) else MolType.PROTEIN
        text = AlignmentText(name=case.source.name, digest="", data=text_of(case.source))
        return parse_alignment(text, Alphabet.of(mol_type))[0].query, mol_type

    def _msa(self, case: Case, path: Path) -> str:
        sequence, mol_type = self._query(case)
        result = featurize_msa(sequence, mol_type, [path])
        assert (result.content is None) == bool(result.failures)
        for failure in result.failures:
            assert isinstance(failure, AlignmentError)
            raise failure
        assert result.content is not None
        invariants.check(result.content)
        return "features"

    def _hits(self, case: Case, path: Path) -> str:
        listed = self._sequences.get(case.source.parent.name)
        # Letters nobody knows match any: the spare files' queries are in no table.
        sequence = listed[0] if listed else "X" * _query_length(text_of(case.source))
        with suppress(TemplateError):
            hit_entries(path)
        result = featurize_templates(sequence, [path], self._templates)
        for failure in result.failures:
            assert isinstance(failure, TemplateError)
        if result.content is None:
            raise result.failures[0]
        invariants.check(result.content)
        return "features"


def _is_rna(path: Path) -> bool:
    return any(word in path.name.lower() for word in ("rna", "rf0", "rnase"))


def _query_length(text: bytes) -> int:
    """Residues of the query that an undamaged hit file was made with, as its format tells."""
    lines = text.splitlines()
    if text.startswith(b"Query "):
        return next(int(line.split()[1]) for line in lines if line.startswith(b"Match_columns"))
    if text.startswith(b"# STOCKHOLM"):
        reference = b"".join(line.split()[2] for line in lines if line.startswith(b"#=GC RF"))
        return sum(column not in b".-" for column in reference)
    if text.startswith(b">"):
        first = text.split(b"\n>")[0].split(b"\n", 1)[1]
        return sum(column in b"-ABCDEFGHIJKLMNOPQRSTUVWXYZ" for column in first)
    return max(int(line.split(b"\t")[7]) for line in lines)


def _late(*_: object) -> None:
    raise TimeoutError(f"took more than {LIMIT_S} s of CPU time")


@pytest.mark.corpus
@pytest.mark.slow
def test_damaged_files_give_features_or_a_named_failure(corpus_dir, tmp_path):
    reader = Reader(corpus_dir, tmp_path)
    signal.signal(signal.SIGPROF, _late)
    outcomes: Counter[str] = Counter()
    for number in range(0, CASES, max(1, CASES // READ)):
        case = make_case(corpus_dir, SEED, number)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        faulthandler.dump_traceback_later(20 * LIMIT_S, exit=True)
        try:
            outcome = reader.outcome(case)
        except Exception as error:
            where = f"seed {SEED}, number {number}: {case.source.name}, {', '.join(case.ways)}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
        outcomes[outcome] += 1
    print(
        f"{outcomes.total()} files: " + ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    )
    assert outcomes["features"] > 0.3 * outcomes.total()
    assert len(outcomes) > 5


KEPT = ("102m", "1ay7", "2hhb", "7zzx")
DAMAGED_STRUCTURES = 30


def damaged_corpus(corpus: Path, folder: Path) -> None:
    """A few entries as they are, with damaged alignments and hits, among many damaged ones."""
    structures = folder / "structures"
    structures.mkdir()
    files = sources(corpus)["structure"]
    for number, path in enumerate(files[:: len(files) // DAMAGED_STRUCTURES]):
        case = damage(path, "structure", np.random.default_rng([SEED, number]))
        case.write(structures).rename(structures / f"d{number:03d}.cif{'.gz' * case.name.endswith('.gz')}")
    for entry in KEPT:
        shutil.copy(corpus / "structures" / f"{entry}.cif.gz", structures)
    with (corpus / "chains.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    for number, row in enumerate(row for row in rows if row["entry"] in KEPT and row["alignments"]):
        target = folder / row["alignments"]
        target.mkdir(parents=True, exist_ok=True)
        for place, path in enumerate(sorted((corpus / row["alignments"]).iterdir())):
            rng = np.random.default_rng([SEED, 1000 + number, place])
            if path.stat().st_size <= MOST_BYTES["msa"]:
                damage(path, "msa" if file_kind(path) == "msa" else "hits", rng).write(target)


def build(folder: Path, cache: Path) -> BuildReport:
    structures = folder / "structures"
    config = BuildConfig(
        sources=Sources(
            corpus=structures, alignments=folder / "alignments", template_structures=(structures,)
        ),
        cache=cache,
        resources=Resources(workers=0),
    )
    return Build(config, BuildProgress(quiet=True)).run()


@pytest.mark.corpus
@pytest.mark.slow
def test_damaged_corpus_builds_to_the_end(corpus_dir, tmp_path):
    damaged_corpus(corpus_dir, tmp_path)
    entries = {path.name.split(".")[0] for path in (tmp_path / "structures").iterdir()}
    assert len(entries) >= DAMAGED_STRUCTURES + len(KEPT)
    report = build(tmp_path, tmp_path / "cache")
    reasons = {failure["reason"] for failure in report.failures}
    assert not {reason for reason in reasons if reason.startswith(("defect", "worker-died"))}
    built = {row.entry for row in entry_rows(LocalStore.at(tmp_path / "cache").manifest())}
    refused = {failure["entry"] for failure in report.failures if failure["stage"] == "structure"}
    assert built | refused == entries  # each is in the snapshot, or the ledger says why not
    assert not built & refused
    assert set(KEPT) <= built
    assert len(built) > DAMAGED_STRUCTURES / 3
    assert {failure["stage"] for failure in report.failures} >= {"structure", "msa", "template"}
    again = build(tmp_path, tmp_path / "cache")
    assert (again.manifest, again.computed) == (report.manifest, {})
    assert again.failures == report.failures
