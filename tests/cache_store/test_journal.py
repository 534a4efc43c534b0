import json
import random
import zlib
from pathlib import Path

import pytest

from megafold.cache_store import ContentError, Journal

RECORDS = [{"entry": f"{number}abc", "digest": "ü\n", "list": [number, None, 0.5]} for number in range(5)]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal" / "b.jsonl")


def test_records_come_back_in_order(journal: Journal):
    assert journal.replay() == []
    for record in RECORDS[:3]:
        journal.append(record)
    assert journal.replay() == RECORDS[:3]
    journal.close()
    with Journal(journal.path, sync_every=10) as again:
        for record in RECORDS[3:]:
            again.append(record)
        again.sync()
    assert Journal(journal.path).replay() == RECORDS
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
        assert again.replay() == [*RECORDS[: 2 if complete else 1], RECORDS[2]]
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
    assert journal.replay() == RECORDS[:2]
    assert journal.scan().damaged == 1


def test_what_json_cannot_hold(journal: Journal):
    with pytest.raises(ContentError):
        journal.append({"x": float("nan")})
    assert journal.replay() == []
    with pytest.raises(ValueError, match="sync_every"):
        Journal(journal.path, sync_every=0)
