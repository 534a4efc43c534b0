"""Finds the alignment and template-hit files of a chain.

A root folder has one folder a chain, called ``<entry>_<chain>`` (the label or the author's chain id) or
by the first 16 hexadecimal digits of the SHA-256 of the chain's sequence; files lie in it or one folder
below. What a file is follows from its name (without ``.gz``, ``.zst``), for Stockholm also from its
first lines:

- ``*.hhr`` and ``*.m8`` are template hits;
- ``*.sto``, ``*.stockholm``, ``*.a3m`` and ``*.a2m`` are template hits with ``hmmsearch``, ``template``,
  ``pdb70``, ``pdb100``, ``pdb_hits`` or ``pdb_seqres`` in the name;
- other ``*.sto`` and ``*.stockholm`` are template hits where hmmsearch wrote them (``#=GF AU``), else MSAs;
- other ``*.a3m`` and ``*.a2m`` are MSAs;
- ``*.csv`` are MSAs where the first line names the columns ``key`` and ``sequence``;
- anything else is ignored.
"""

import gzip
import hashlib
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import zstandard

from megafold.pipeline.compression import GZIP_MAGIC, ZSTD_MAGIC
from megafold.pipeline.corpus import require_text
from megafold.pipeline.errors import AlignmentError, InputError
from megafold.pipeline.msa import keyed_csv
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.source import parse_alignment
from megafold.pipeline.msa.text import AlignmentText, plain_name, read_text
from megafold.pipeline.schema import MolType

FileKind = Literal["msa", "hits"]
_HIT_SUFFIXES: Final = (".hhr", ".m8")
_STOCKHOLM_SUFFIXES: Final = (".sto", ".stockholm")
_A3M_SUFFIXES: Final = (".a3m", ".a2m")
_HIT_NAME: Final = re.compile(r"hmmsearch|template|pdb70|pdb100|pdb_?hits|pdb_?seqres")
_HEAD_BYTES: Final = 1024
#: Of an A3M file, where its query is looked for before all of it is read.
_QUERY_BYTES: Final = 1 << 16
_DIGEST_DIGITS: Final = 16


@dataclass(frozen=True, kw_only=True)
class ChainAlignments:
    """The files of one chain, each group sorted by name.

    ``source`` says how they were found: ``label`` or ``author`` chain id, ``sequence`` digest, or
    ``explicit`` in the corpus table. ``ignored`` are files that are neither an MSA nor hits by name.
    """

    msas: tuple[Path, ...]
    hits: tuple[Path, ...]
    source: str
    ignored: tuple[Path, ...] = ()

    @classmethod
    def of_files(cls, files: Iterable[Path], source: str = "explicit") -> "ChainAlignments":
        """Tell MSAs and template hits apart."""
        kinds = [(path, file_kind(path)) for path in sorted(files, key=lambda path: (path.name, path))]
        return cls(
            msas=tuple(path for path, kind in kinds if kind == "msa"),
            hits=tuple(path for path, kind in kinds if kind == "hits"),
            source=source,
            ignored=tuple(path for path, kind in kinds if kind is None),
        )


def file_kind(path: Path) -> FileKind | None:
    """What a file is by its name (and, for Stockholm and CSV, its first lines); None for neither.

    Raises:
        InputError: its name is no text (``bad-name``).
    """
    name = plain_name(path).lower()
    if name.startswith("."):
        return None
    require_text(name, path)
    if name.endswith(_HIT_SUFFIXES):
        return "hits"
    if name.endswith(".csv"):
        return "msa" if keyed_csv.MAGIC.match(_head(path)) else None
    if not name.endswith(_STOCKHOLM_SUFFIXES + _A3M_SUFFIXES):
        return None
    if _HIT_NAME.search(name):
        return "hits"
    if name.endswith(_STOCKHOLM_SUFFIXES) and b"#=GF AU hmmsearch" in _head(path):
        return "hits"
    return "msa"


def _head(path: Path, size: int = _HEAD_BYTES) -> bytes:
    """The first bytes of a file, decompressed; nothing where it cannot be read (whoever reads it says so)."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(GZIP_MAGIC):
                return gzip.GzipFile(fileobj=file).read(size)
            if magic == ZSTD_MAGIC:
                return zstandard.ZstdDecompressor().stream_reader(file).read(size)
            return file.read(size)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError):
        return b""


class AlignmentIndex:
    """The chain folders of a root folder.

    The root is listed once, on construction; a chain's folder when it is asked for.
    """

    def __init__(self, root: Path) -> None:
        """List ``root``.

        Raises:
            InputError: ``root`` is no folder that can be read (``no-such-folder``).
        """
        self._chains: dict[tuple[str, str], Path] = {}
        self._sequences: dict[str, Path] = {}
        for folder in _folders(Path(root)):
            entry, underscore, chain = folder.name.rpartition("_")
            if underscore:
                self._chains.setdefault((entry.lower(), chain), folder)
            elif re.fullmatch(rf"[0-9a-f]{{{_DIGEST_DIGITS}}}", folder.name):
                self._sequences[folder.name] = folder

    def __len__(self) -> int:
        return len(self._chains) + len(self._sequences)

    def find(
        self, entry: str, label_asym_id: str, auth_asym_id: str, sequence_digest: str
    ) -> ChainAlignments | None:
        """The files of a chain, None where there are none.

        The folder of the label id goes before that of the author's id, and both before that of the sequence.
        Where both ids have a folder (another chain's label may be this chain's author id), the queries
        in them decide.

        Args:
            entry: entry id.
            label_asym_id: the file's own chain id.
            auth_asym_id: the author's chain id.
            sequence_digest: SHA-256 of the canonical one-letter sequence over the full SEQRES, hexadecimal.
        """
        by_label = self._listed(self._chains.get((entry.lower(), label_asym_id)), "label")
        by_author = None
        if auth_asym_id != label_asym_id:
            by_author = self._listed(self._chains.get((entry.lower(), auth_asym_id)), "author")
        if by_label and by_author:
            mistaken = not _asks(by_label, sequence_digest) and _asks(by_author, sequence_digest)
            return by_author if mistaken else by_label
        by_sequence = self._sequences.get(sequence_digest[:_DIGEST_DIGITS])
        return by_label or by_author or self._listed(by_sequence, "sequence")

    def _listed(self, folder: Path | None, source: str) -> ChainAlignments | None:
        if folder is None:
            return None
        found = ChainAlignments.of_files(_files(folder), source)
        return found if found.msas or found.hits else None


def _folders(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root) as found:
            yield from (Path(item.path) for item in sorted(found, key=_name) if item.is_dir())
    except OSError as error:
        raise InputError(
            f"{root}: not a folder of alignments ({error.strerror}); give the one that holds them",
            reason="no-such-folder",
        ) from error


def _files(folder: Path, depth: int = 1) -> Iterator[Path]:
    with os.scandir(folder) as found:
        for item in sorted(found, key=_name):
            if not item.is_dir():
                yield Path(item.path)
            elif depth:
                yield from _files(Path(item.path), depth - 1)


def _name(item: os.DirEntry[str]) -> str:
    return item.name


def _asks(files: ChainAlignments, sequence_digest: str) -> bool:
    """Whether an alignment among the files has the sequence as its query."""
    for path in files.msas:
        head = _head(path, _QUERY_BYTES)
        # Records that are whole, as another begins behind them; nothing, unless it is an A3M file.
        begun = AlignmentText(name=path.name, digest="", data=head[: head.rfind(b"\n>") + 1])
        if _has_query(begun, sequence_digest):
            return True
        try:
            text = read_text(path)
        except AlignmentError:
            continue
        if _has_query(text, sequence_digest):
            return True
    return False


def _has_query(text: AlignmentText, sequence_digest: str) -> bool:
    try:
        alignments = parse_alignment(text, Alphabet.of(MolType.PROTEIN))
    except AlignmentError:
        return False
    return sequence_digest in {hashlib.sha256(item.query.encode()).hexdigest() for item in alignments}
