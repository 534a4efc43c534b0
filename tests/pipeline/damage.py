"""Damaged copies of corpus files: truncated, shuffled, mutated; the same for the same seed and number."""

import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import gemmi
import numpy as np

from megafold.pipeline.alignments import file_kind

Kind = Literal["structure", "template structure", "components", "msa", "hits"]

#: What part of the cases each kind is.
SHARES: dict[Kind, float] = {
    "structure": 0.5,
    "template structure": 0.05,
    "components": 0.05,
    "msa": 0.2,
    "hits": 0.2,
}
#: Larger files only take longer; bytes as they lie on disk.
MOST_BYTES: dict[Kind, int] = {
    "structure": 130_000,
    "template structure": 100_000,
    "components": 1_000_000,
    "msa": 120_000,
    "hits": 120_000,
}
COMPONENTS_TAKEN = 12
#: Kinds made of tables, and how many of them stay valid CIF: bytes at random rarely do.
TABLES: frozenset[Kind] = frozenset({"structure", "template structure", "components"})
SHARE_VALID = 0.7
#: Words that files hold by mistake, or that readers stumble over.
STRANGE = (
    b"?", b".", b"", b"nan", b"inf", b"-inf", b"-1", b"0", b"1", b"1e400", b"1e-400", b"1.5", b"0x10", b"1_0",
    b"2147483648", b"-2147483649", b"99999999999999999999", b"'", b'"', b"\n;\n", b"loop_", b"data_x",
    b"save_", b"#", b">", b"//", b"_atom_site.id", b"ALA", b"UNL", b"X", b"A" * 5000, b"(1-60)",
    b"(1-9)(X0)", b"1,2,(", b"(1-99999999999)", b"\xff\xfe", b"\x00", b"\xc3\x85", b"\xd9\xa1", b"\r",
    b"\t\t", b"$", b"%s", b"{}", b"-", b"*", b"--------", b"lowercase",
)  # fmt: skip

Rng = np.random.Generator
Way = Callable[[bytes, Rng], bytes]


@dataclass(frozen=True)
class Case:
    """One damaged file: where it comes from, what it is, what was done to it, its new name and bytes."""

    source: Path
    kind: Kind
    ways: tuple[str, ...]
    name: str
    data: bytes

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        path.write_bytes(self.data)
        return path


def _stretch(data: bytes, rng: Rng) -> tuple[int, int]:
    """Part of the text: a category of an mmCIF file (few of which are atoms), else any stretch."""
    breaks = [match.end() for match in re.finditer(rb"^#.*\n", data, re.MULTILINE)]
    if len(breaks) > 2 and rng.random() < 0.7:
        start = int(rng.integers(len(breaks) - 1))
        return breaks[start], breaks[start + 1]
    start, stop = sorted(rng.integers(0, len(data) + 1, 2).tolist())
    return start, min(stop, start + int(rng.choice([100, 2000, len(data) + 1])))


def _within(change: Way) -> Way:
    """The same change, in one stretch alone."""

    def changed(data: bytes, rng: Rng) -> bytes:
        start, stop = _stretch(data, rng)
        return data[:start] + change(data[start:stop], rng) + data[stop:]

    return changed


def _truncate(data: bytes, rng: Rng) -> bytes:
    return data[: int(rng.integers(len(data) + 1))]


def _drop(data: bytes, rng: Rng) -> bytes:
    return b""


def _repeat(data: bytes, rng: Rng) -> bytes:
    return data + data


def _shuffle_lines(data: bytes, rng: Rng) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[index] for index in rng.permutation(len(lines)))


def _drop_lines(data: bytes, rng: Rng) -> bytes:
    lines = data.splitlines(keepends=True)
    kept = rng.random(len(lines)) > rng.choice([0.02, 0.2, 0.7])
    return b"".join(line for line, keep in zip(lines, kept, strict=True) if keep)


def _swap_words(data: bytes, rng: Rng) -> bytes:
    parts = re.split(rb"(\s+)", data)
    words = np.arange(0, len(parts), 2)
    for _ in range(int(rng.integers(1, 20))):
        first, second = rng.choice(words, 2).tolist()
        parts[first], parts[second] = parts[second], parts[first]
    return b"".join(parts)


def _strange_words(data: bytes, rng: Rng) -> bytes:
    parts = re.split(rb"(\s+)", data)
    for _ in range(int(rng.integers(1, 10))):
        parts[2 * int(rng.integers((len(parts) + 1) // 2))] = STRANGE[int(rng.integers(len(STRANGE)))]
    return b"".join(parts)


def _strange_column(data: bytes, rng: Rng) -> bytes:
    """One word of every line."""
    column, word = int(rng.integers(20)), STRANGE[int(rng.integers(len(STRANGE)))]
    lines = []
    for line in data.split(b"\n"):
        words = line.split(b" ")
        lines.append(
            b" ".join([*words[:column], word, *words[column + 1 :]]) if column < len(words) else line
        )
    return b"\n".join(lines)


def _flip_bytes(data: bytes, rng: Rng) -> bytes:
    changed = bytearray(data)
    for place in rng.integers(0, max(1, len(data)), int(rng.integers(1, 30))).tolist():
        changed[place : place + 1] = bytes([int(rng.integers(256))])
    return bytes(changed)


def _insert_bytes(data: bytes, rng: Rng) -> bytes:
    place = int(rng.integers(len(data) + 1))
    return data[:place] + rng.bytes(int(rng.integers(1, 200))) + data[place:]


def _other_line_ends(data: bytes, rng: Rng) -> bytes:
    return data.replace(b"\n", [b"\r\n", b"\r", b"\n\n", b" "][int(rng.integers(4))])


def _other_case(data: bytes, rng: Rng) -> bytes:
    return data.lower() if rng.random() < 0.5 else data.upper()


WAYS: dict[str, Way] = {
    "truncate": _truncate,
    "drop": _within(_drop),
    "repeat": _within(_repeat),
    "shuffle lines": _within(_shuffle_lines),
    "shuffle all lines": _shuffle_lines,
    "drop lines": _within(_drop_lines),
    "swap words": _within(_swap_words),
    "strange words": _within(_strange_words),
    "strange column": _within(_strange_column),
    "flip bytes": _within(_flip_bytes),
    "insert bytes": _within(_insert_bytes),
    "line ends": _within(_other_line_ends),
    "case": _within(_other_case),
}


def _cell(rng: Rng) -> str:
    return gemmi.cif.quote(STRANGE[int(rng.integers(len(STRANGE)))].decode("latin-1").replace("\0", ""))


def _remove_category(table: Any, rng: Rng) -> None:
    table.erase()


def _remove_column(table: Any, rng: Rng) -> None:
    if table.width() > 1 and table.loop is not None:
        table.loop.remove_column(table.loop.tags[int(rng.integers(table.width()))])


def _strange_cells(table: Any, rng: Rng) -> None:
    for _ in range(int(rng.integers(1, 30))):
        table[int(rng.integers(len(table)))][int(rng.integers(table.width()))] = _cell(rng)


def _constant_column(table: Any, rng: Rng) -> None:
    column, cell = int(rng.integers(table.width())), _cell(rng)
    for row in table:
        row[column] = cell


def _shuffle_column(table: Any, rng: Rng) -> None:
    column = int(rng.integers(table.width()))
    values = [row[column] for row in table]
    for row, index in zip(table, rng.permutation(len(values)).tolist(), strict=True):
        row[column] = values[index]


def _mix_columns(table: Any, rng: Rng) -> None:
    """Some of a column's values from another column."""
    first, second = rng.integers(0, table.width(), 2).tolist()
    for row in table:
        if rng.random() < 0.3:
            row[first] = row[second]


def _reorder_rows(table: Any, rng: Rng) -> None:
    """Some rows go, some come twice, all move."""
    rows = [list(row) for row in table]
    for row, index in zip(table, rng.integers(0, len(rows), len(rows)).tolist(), strict=True):
        for column, value in enumerate(rows[index]):
            row[column] = value


def _drop_rows(table: Any, rng: Rng) -> None:
    share = float(rng.choice([0.02, 0.3, 0.9]))
    for index in reversed(np.flatnonzero(rng.random(len(table)) < share).tolist()):
        if len(table) > 1:
            table.remove_row(index)


TABLE_WAYS: dict[str, Callable[[Any, Rng], None]] = {
    "remove category": _remove_category,
    "remove column": _remove_column,
    "strange cells": _strange_cells,
    "constant column": _constant_column,
    "shuffle column": _shuffle_column,
    "mix columns": _mix_columns,
    "reorder rows": _reorder_rows,
    "drop rows": _drop_rows,
}
#: Categories that matter more than the many that nobody reads.
READ_CATEGORIES = (
    "_atom_site.", "_entity.", "_entity_poly.", "_entity_poly_seq.", "_struct_asym.",
    "_pdbx_poly_seq_scheme.", "_struct_conn.", "_pdbx_struct_assembly_gen.", "_pdbx_struct_oper_list.",
    "_pdbx_entity_branch_link.", "_pdbx_branch_scheme.", "_pdbx_nonpoly_scheme.", "_chem_comp.",
    "_chem_comp_atom.", "_chem_comp_bond.", "_exptl.", "_refine.", "_pdbx_audit_revision_history.",
)  # fmt: skip


def _damage_tables(data: bytes, rng: Rng) -> tuple[bytes, list[str]]:
    """Change categories of an mmCIF file in ways that leave it valid CIF."""
    document = gemmi.cif.read_string(data.decode("utf-8", "replace"))
    ways = []
    for _ in range(int(rng.choice([1, 1, 2, 4]))):
        block = document[int(rng.integers(len(document)))]
        present = block.get_mmcif_category_names()
        if not present:  # all gone
            break
        read = [name for name in READ_CATEGORIES if name in present]
        names = read if read and rng.random() < 0.9 else present
        name = names[int(rng.integers(len(names)))]
        way = list(TABLE_WAYS)[int(rng.integers(len(TABLE_WAYS)))]
        table = block.find_mmcif_category(name)
        if len(table):
            TABLE_WAYS[way](table, rng)
            ways.append(f"{way} {name}")
    return document.as_string().encode("utf-8", "replace"), ways


PACKED_WAYS = ("truncate", "flip bytes", "insert bytes")
ONCE_IN = 60  #: how rarely a file is emptied, or joined to another one


@lru_cache(maxsize=1)
def sources(corpus: Path) -> dict[Kind, tuple[Path, ...]]:
    """The files of each kind that damaged ones are made from."""
    structures = [
        path
        for folder in ("structures", "more/structures", "more/variants", "more/broken")
        for path in sorted((corpus / folder).iterdir())
    ]
    aligned = [
        path
        for folder in ("alignments", "more/alignments", "spare_alignments", "more/spare_alignments")
        for path in sorted((corpus / folder).rglob("*.gz"))
    ]
    templates = [
        path
        for folder in ("spare_templates", "more/spare_templates")
        for path in sorted((corpus / folder).iterdir())
    ]
    found: dict[Kind, list[Path]] = {
        "structure": structures,
        "template structure": structures,
        "components": [corpus / "ccd/components.cif.gz"],
        "msa": [path for path in aligned if file_kind(path) == "msa"],
        "hits": [path for path in aligned if file_kind(path) == "hits"] + 4 * templates,
    }
    return {
        kind: tuple(path for path in paths if path.stat().st_size <= MOST_BYTES[kind])
        for kind, paths in found.items()
    }


@lru_cache(maxsize=64)
def text_of(path: Path) -> bytes:
    """A corpus file, decompressed."""
    return gzip.decompress(path.read_bytes())


def _taken(path: Path, kind: Kind, rng: Rng) -> bytes:
    """What of a file is damaged: all of it, or some components of a dictionary."""
    text = text_of(path)
    if kind != "components":
        return text
    starts = [match.start() for match in re.finditer(rb"^data_", text, re.MULTILINE)]
    blocks = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    chosen = rng.choice(len(blocks), COMPONENTS_TAKEN, replace=False)
    return b"".join(blocks[index] for index in sorted(chosen.tolist()))


def make_case(corpus: Path, seed: int, number: int) -> Case:
    """The damaged file with this number."""
    rng = np.random.default_rng([seed, number])
    kinds: list[Kind] = list(SHARES)
    kind = kinds[int(rng.choice(len(kinds), p=list(SHARES.values())))]
    files = sources(corpus)[kind]
    case = damage(files[int(rng.integers(len(files)))], kind, rng)
    if rng.integers(ONCE_IN):
        return case
    if rng.random() < 0.3:
        return replace(case, ways=(*case.ways, "emptied"), data=b"")
    other = files[int(rng.integers(len(files)))]
    return replace(case, ways=(*case.ways, f"joined to {other.name}"), data=case.data + text_of(other))


def damage(path: Path, kind: Kind, rng: Rng) -> Case:
    """A damaged copy of a file."""
    data = _taken(path, kind, rng)
    if kind in TABLES and rng.random() < SHARE_VALID and "broken" not in path.parts:
        data, ways = _damage_tables(data, rng)
    else:
        names = list(WAYS)
        chosen = rng.integers(len(names), size=int(rng.choice([1, 1, 1, 2, 3]))).tolist()
        ways = [names[index] for index in chosen]
        for way in ways:
            data = WAYS[way](data, rng)
    name = path.name.removesuffix(".gz")
    if rng.random() < 0.15:
        name += ".gz"
        data = gzip.compress(data, 1, mtime=0)
        if rng.random() < 0.5:
            way = PACKED_WAYS[int(rng.integers(len(PACKED_WAYS)))]
            data = WAYS[way](data, rng)
            ways.append(f"packed: {way}")
    return Case(source=path, kind=kind, ways=tuple(ways), name=name, data=data)
