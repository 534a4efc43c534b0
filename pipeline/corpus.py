"""Which entries a corpus has, and where their structure files are.

A corpus is one of:

- a folder of structure files, or one divided into two-character folders as the PDB's mirrors are
  (``ab/1abc.cif.gz``);
- a list: a text file with one structure file a line;
- a table: tab-separated with a header that names the columns ``entry`` and ``structure``, and optionally
  ``chain`` with ``alignments``, ``msa`` or ``templates``, which hold files or folders of a chain separated by
  ``;``. An entry takes as many rows as it has chains with alignments.

Paths in lists and tables are relative to the file they stand in. Blank lines and lines that start with ``#``
do not count.
"""

import csv
import os
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megafold.pipeline.errors import InputError

#: What the names of structure files end with.
SUFFIXES: Final = tuple(f".{kind}{packed}" for kind in ("cif", "mmcif", "bcif") for packed in ("", ".gz"))
#: Unicode categories: control characters, and what stands for bytes that are no UTF-8.
_NO_TEXT: Final = ("Cc", "Cs")
_FILE_COLUMNS: Final = ("alignments", "msa", "templates")
_COLUMNS: Final = frozenset({"entry", "structure", "chain", *_FILE_COLUMNS})


@dataclass(frozen=True)
class EntrySource:
    """One entry: its id, its structure file, and the alignment files that a table gives, by chain id."""

    entry: str
    path: Path
    alignments: dict[str, tuple[Path, ...]] = field(default_factory=dict)


def entry_id(path: Path) -> str:
    """Entry id of a structure file: its name without the suffixes, in lower case.

    >>> entry_id(Path("ab/209D-assembly1.cif.gz"))
    '209d-assembly1'
    """
    name = path.name.lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def discover(corpus: Path) -> list[EntrySource]:
    """The entries of a corpus, sorted by id.

    Raises:
        InputError: there is no such corpus (``no-such-corpus``), it has no entry (``empty-corpus``), two
        files for one entry (``repeated-entry``), a name that is no text (``bad-name``), a file that is not
        there (``missing-file``) or a table that cannot be understood (``bad-table``).
    """
    corpus = Path(corpus)
    if corpus.is_dir():
        found = [EntrySource(entry_id(path), path) for path in _structure_files(corpus)]
        looked_for = f"files that end with {', '.join(SUFFIXES)}, there and in two-character folders"
    elif corpus.is_file():
        found = _listed(corpus)
        looked_for = "lines with a structure file, or a table with the columns entry and structure"
    else:
        raise InputError(
            f"{corpus}: no such corpus; give a folder of structure files, a list of them or a table",
            reason="no-such-corpus",
        )
    if not found:
        raise InputError(f"{corpus} has no entries; looked for {looked_for}", reason="empty-corpus")
    return _unique(found)


def _structure_files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as found:
        for item in found:
            if len(item.name) == 2 and Path(item.path).is_dir():
                with os.scandir(item.path) as inside:
                    yield from (Path(inner.path) for inner in inside if _is_structure_file(inner))
            elif _is_structure_file(item):
                yield Path(item.path)


def _is_structure_file(item: os.DirEntry[str]) -> bool:
    if not item.name.lower().endswith(SUFFIXES) or item.name.startswith("."):
        return False
    # What the folder says of a file costs nothing; to ask for each is slow where that is a network's.
    # A link to nothing is an entry, too: that its file cannot be read is then told.
    return item.is_file(follow_symlinks=False) or (item.is_symlink() and not Path(item.path).is_dir())


def require_text(name: str, path: Path) -> None:
    """Refuse a name that the cache cannot hold or print: bytes that are no UTF-8, line ends.

    Raises:
        InputError: with what to do (``bad-name``).
    """
    if any(unicodedata.category(character) in _NO_TEXT for character in name):
        raise InputError(
            f"{os.fsencode(path)!r}: the name holds bytes or characters that are no text; rename it",
            reason="bad-name",
        )


def _unique(found: Iterable[EntrySource]) -> list[EntrySource]:
    by_entry: dict[str, EntrySource] = {}
    for source in sorted(found, key=lambda source: (source.entry, source.path)):
        require_text(source.entry, source.path)
        other = by_entry.setdefault(source.entry, source)
        if other is not source:
            raise InputError(
                f"two files for entry {source.entry}: {other.path} and {source.path}; remove or rename one",
                reason="repeated-entry",
            )
    return list(by_entry.values())


def _listed(path: Path) -> list[EntrySource]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}", reason="bad-table") from error
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if lines and "structure" in lines[0][1].split("\t"):
        return _table(path, lines)
    if lines and "\t" in lines[0][1]:
        raise InputError(
            f"{path}: the first line of a table names its columns, entry and structure among them; it is "
            f"{lines[0][1]!r}",
            reason="bad-table",
        )
    files = [_existing(path, number, line.strip()) for number, line in lines]
    return [EntrySource(entry_id(file), file) for file in files]


def _table(path: Path, lines: list[tuple[int, str]]) -> list[EntrySource]:
    header = lines[0][1].split("\t")
    columns = [name.strip() for name in header]
    missing, unknown = {"entry", "structure"} - set(columns), set(columns) - _COLUMNS
    if missing or unknown or len(set(columns)) < len(columns):
        raise InputError(
            f"{path}: the columns have to be entry, structure and, as needed, chain, "
            f"{', '.join(_FILE_COLUMNS)}; they are {', '.join(columns)}",
            reason="bad-table",
        )
    structures: dict[str, Path] = {}
    alignments: dict[str, dict[str, tuple[Path, ...]]] = {}
    rows = csv.reader((line for _, line in lines[1:]), delimiter="\t", quoting=csv.QUOTE_NONE)
    for (number, _), values in zip(lines[1:], rows, strict=True):
        row = dict(zip(columns, (value.strip() for value in values), strict=False))
        entry, chain = row.get("entry", "").lower(), row.get("chain", "")
        if not entry or not row.get("structure"):
            raise InputError(
                f"{path}, line {number}: entry and structure must not be empty", reason="bad-table"
            )
        structure = _existing(path, number, row["structure"])
        if structures.setdefault(entry, structure) != structure:
            raise InputError(
                f"{path}, line {number}: two files for entry {entry}: {structures[entry]} and {structure}",
                reason="repeated-entry",
            )
        files = _files(path, number, [row.get(column, "") for column in _FILE_COLUMNS])
        if files and not chain:
            raise InputError(f"{path}, line {number}: alignments need a chain", reason="bad-table")
        if files:
            chains = alignments.setdefault(entry, {})
            chains[chain] = (*chains.get(chain, ()), *files)
    return [
        EntrySource(entry, structure, alignments.get(entry, {})) for entry, structure in structures.items()
    ]


def _files(table: Path, number: int, cells: Iterable[str]) -> tuple[Path, ...]:
    """The files that cells name; a folder stands for the files in it."""
    found: list[Path] = []
    for cell in cells:
        for name in filter(None, (part.strip() for part in cell.split(";"))):
            path = _existing(table, number, name)
            inside = sorted(inner for inner in path.iterdir() if inner.is_file()) if path.is_dir() else [path]
            found.extend(inside)
    return tuple(found)


def _existing(table: Path, number: int, name: str) -> Path:
    path = table.parent / name
    if not path.exists():
        raise InputError(f"{table}, line {number}: there is no file {path}", reason="missing-file")
    return path
