"""What a build is asked to do."""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megafold.pipeline.corpus import discover
from megafold.pipeline.errors import InputError
from megafold.pipeline.structure import StructureOptions


@dataclass(frozen=True)
class FailureLimit:
    """How many entries may fail before a build counts as failed: a number, or a share of the entries.

    The default is 5 %. Zero would fail nearly every build of the whole PDB, where a handful of entries in
    a thousand are malformed in ways nobody has met yet, and would teach people to ignore the exit status;
    a share that a broken mount, a wrong folder or a wrong dictionary exceeds at once still catches those.
    """

    value: float
    is_share: bool

    @classmethod
    def parse(cls, text: str) -> "FailureLimit":
        """Read ``12`` or ``5%``.

        Raises:
            InputError: it is neither.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
        if not match or (not match[2] and "." in match[1]) or (match[2] and float(match[1]) > 100):
            raise InputError(
                f"--max-failures {text!r}: give a number of entries (12) or a share of them (5%)",
                reason="bad-option",
            )
        return cls(float(match[1]), bool(match[2]))

    def allows(self, failed: int, total: int) -> bool:
        """True: ``failed`` of ``total`` entries are few enough."""
        return failed <= (self.value / 100 * total if self.is_share else self.value)

    def __str__(self) -> str:
        return f"{self.value:g}%" if self.is_share else f"{self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where a build reads from. What the files hold decides the result; their paths do not."""

    corpus: Path
    alignments: Path | None = None
    template_structures: tuple[Path, ...] = ()
    ccd: Path | None = None
    ccd_extra: tuple[Path, ...] = ()

    def absolute(self) -> "Sources":
        """The same for a process in any folder: workers of a cluster that runs are in their own."""
        return Sources(
            corpus=self.corpus.absolute(),
            alignments=None if self.alignments is None else self.alignments.absolute(),
            template_structures=tuple(path.absolute() for path in self.template_structures),
            ccd=None if self.ccd is None else self.ccd.absolute(),
            ccd_extra=tuple(path.absolute() for path in self.ccd_extra),
        )

    def with_templates_from_corpus(self) -> "Sources":
        """The same, with the corpus' own structures as templates where no folders are given.

        Raises:
            InputError: the corpus cannot be read.
        """
        if self.template_structures:
            return self
        if self.corpus.is_dir():
            return replace(self, template_structures=(self.corpus,))
        folders = {source.path.parent for source in discover(self.corpus)}
        return replace(self, template_structures=tuple(sorted(folders)))


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a build may use. None of it changes a digest."""

    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    scheduler: str | None = None
    task_timeout_s: float = 600.0
    memory_limit: str = "auto"
    order: Literal["largest-first", "sorted", "reversed"] = "largest-first"


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Everything ``megafold cache build`` was told."""

    sources: Sources
    cache: Path
    structure: StructureOptions = field(default_factory=StructureOptions)
    resources: Resources = field(default_factory=Resources)
    #: ``none``, ``auto``, ``mmseqs2`` or the path of a file: see :mod:`megafold.pipeline.clusters`.
    clusters: str = "none"
    max_failures: FailureLimit = FailureLimit(5.0, True)
    retry_failed: bool = False
