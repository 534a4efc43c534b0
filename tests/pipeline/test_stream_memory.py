from megafold.pipeline.stream import Stream
from megafold.pipeline.stream.memory import MemoryStats, Recent
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain


def test_recent_keeps_the_last_used():
    gone: list[str] = []
    recent: Recent[str] = Recent(2, discard=gone.append)
    assert [recent.get(key, (2 * key).__str__) for key in "abac"] == ["aa", "bb", "aa", "cc"]
    assert gone == ["bb"]
    assert recent.stats == MemoryStats(kept=2, bytes=0, hits=1, misses=3, dropped=1)
    recent.clear()
    assert sorted(gone) == ["aa", "bb", "cc"]
    assert len(recent) == 0


def test_recent_stays_below_its_bytes():
    gone: list[str] = []
    recent: Recent[str] = Recent(100, discard=gone.append, limit_bytes=10, size=len)
    for key, size in (("a", 4), ("b", 5), ("a", 4), ("c", 3), ("d", 11)):
        recent.get(key, ("x" * size).__str__)
    # What alone is too large is not kept, and drives nothing out.
    assert gone == ["x" * 5]
    assert recent.stats == MemoryStats(kept=2, bytes=7, hits=1, misses=4, dropped=1)


def test_a_stream_keeps_entries_within_its_bytes_and_counts(tmp_path):
    entries = []
    for number in range(4):
        chains = [Chain(["ALA"] * 30)]
        entries.append((fake.structure(f"{number}abc", chains), chains, ""))
    fake.publish(tmp_path / "cache", entries)
    free = Stream(tmp_path / "cache")
    rows = [free.entry(row) for row in range(4)]
    nbytes = free.read_entry(rows[0]).nbytes
    assert nbytes > 1000
    for row in rows * 3:
        free.read_entry(row)
    assert free.memory["entries"] == MemoryStats(kept=4, bytes=4 * nbytes, hits=9, misses=4, dropped=0)
    tight = Stream(tmp_path / "cache", memory_bytes=2 * nbytes)
    for row in rows * 3:
        tight.read_entry(row)
    assert tight.memory["entries"] == MemoryStats(kept=2, bytes=2 * nbytes, hits=0, misses=12, dropped=10)
    assert tight.memory["objects"].hits == 8
