import errno
import json
import os
import random
import tracemalloc
import zlib
from pathlib import Path

import pytest

from megafold.cache_store import ContentError, Journal, WriteFailed
from megafold.cache_store import journal as journal_module

RECORDS = [{"entry": f"{number}abc", "digest": "ü\n", "list": [number, None, 0.5]} for number in range(5)]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal" / "b.jsonl")


def test_records_come_back_in_order(journal: Journal):
    assert list(journal.replay()) == []
    for record in RECORDS[:3]:
        journal.append(record)
    assert list(journal.replay()) == RECORDS[:3]
    journal.close()
    with Journal(journal.path, sync_every_s=60) as again:
        for record in RECORDS[3:]:
            again.append(record)
        again.sync()
    assert list(Journal(journal.path).replay()) == RECORDS
    journal.remove()
    journal.remove()
    assert not journal.path.exists()


def test_a_line_is_plain_json_with_its_checksum(journal: Journal):
    journal.append({"b": 1, "a": "ü"})
    line = json.loads(journal.path.read_bytes())
    assert line["record"] == {"a": "ü", "b": 1}
    checksum = zlib.crc32('{"a":"ü","b":1}'.encode())
    assert line["crc32"] == f"{checksum:08x}"


def test_a_torn_last_line_is_dropped_and_does_not_swallow_the_next(journal: Journal):
    with journal:
        for record in RECORDS[:2]:
            journal.append(record)
    whole = journal.path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        journal.path.write_bytes(whole[:length])
        scan = journal.scan()
        complete = length == len(whole) - 1  # only the newline is lost: the record is whole
        assert scan.records == RECORDS[: 2 if complete else 1]
        assert scan.torn == (first < length and not complete)
        assert scan.damaged == 0
        with Journal(journal.path) as again:
            again.append(RECORDS[2])
        assert list(again.replay()) == [*RECORDS[: 2 if complete else 1], RECORDS[2]]
        assert again.scan().damaged == (1 if first < length and not complete else 0)


def test_a_damaged_line_costs_itself_alone(journal: Journal):
    with journal:
        for record in RECORDS:
            journal.append(record)
    whole = journal.path.read_bytes()
    starts = [0, *(index + 1 for index, byte in enumerate(whole) if byte == 10)]
    start, end = starts[2], starts[3] - 1
    for position in random.Random(0).sample(range(8 * start, 8 * end), 60):
        data = bytearray(whole)
        data[position // 8] ^= 1 << (position % 8)
        journal.path.write_bytes(data)
        scan = journal.scan()
        assert scan.records == RECORDS[:2] + RECORDS[3:]
        assert not scan.torn
        assert scan.damaged in (1, 2)  # two where the flipped bit made a newline


@pytest.mark.parametrize(
    "line", [b"[]", b"null", b"{}", b'{"crc32":"0"}', b"\xff\xfe", b'{"record":3}', b"1e999"]
)
def test_lines_of_others(journal: Journal, line: bytes):
    journal.append(RECORDS[0])
    with open(journal.path, "ab") as file:
        file.write(line + b"\n\n")
    journal.append(RECORDS[1])
    assert list(journal.replay()) == RECORDS[:2]
    assert journal.scan().damaged == 1


def test_what_json_cannot_hold(journal: Journal):
    with pytest.raises(ContentError):
        journal.append({"x": float("nan")})
    assert list(journal.replay()) == []
    with pytest.raises(ValueError, match="sync_every_s"):
        Journal(journal.path, sync_every_s=-1)


@pytest.mark.parametrize(("every_s", "syncs"), [(0.0, 100), (1.0, 10), (60.0, 1)])
def test_records_go_to_the_disk_as_often_as_is_asked(tmp_path: Path, monkeypatch, every_s, syncs):
    """A record each tenth of a second, for ten seconds."""
    now = [1000.0]
    synced: list[int] = []
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(journal_module.os, "fsync", synced.append)
    with Journal(tmp_path / "b.jsonl", sync_every_s=every_s) as journal:
        for number in range(100):
            journal.append({"number": number})
            now[0] += 0.1
        file = journal._fd
        # Sums of tenths are not exact: one more or less.
        assert abs(synced.count(file) - syncs) <= (every_s == 1)
        assert [record["number"] for record in journal.replay()] == list(range(100))
        before = len(synced)
    assert len(synced) == before + (every_s > 0)  # what is not there yet when it is closed


def test_full_disk_is_told_when_the_journal_is_closed_and_leaves_no_file_open(tmp_path: Path, monkeypatch):
    journal = Journal(tmp_path / "b.jsonl", sync_every_s=60)
    journal.append({"number": 0})
    journal.append({"number": 1})
    file = journal._fd

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_module.os, "fsync", full)
    with pytest.raises(WriteFailed, match="No space left on device"):
        journal.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_replay_reads_a_line_when_it_is_asked_for(journal: Journal):
    with journal:
        for number in range(3):
            journal.append({"number": number, "long": "x" * (1 << 20)})
    records = journal.replay()
    tracemalloc.start()
    try:
        assert [record["number"] for record in records] == [0, 1, 2]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (
        peak < journal.path.stat().st_size * 3
    )  # a line, its record, and the record's line to compare it with


def test_a_new_journal_is_in_its_folder_before_a_record_counts(journal: Journal, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(journal_module.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    journal.append(RECORDS[0])
    folder, file = journal.path.parent.stat().st_ino, journal.path.stat().st_ino
    assert synced[-2:] == [folder, file]


def test_a_line_is_written_to_its_end(journal: Journal, monkeypatch):
    """A signal or a nearly full disk may take a part of it alone."""
    write = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: write(fd, bytes(data[:7])))
    for record in RECORDS:
        journal.append(record)
    assert list(journal.replay()) == RECORDS
