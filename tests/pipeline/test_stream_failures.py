"""Samples that fail while a model is trained, in this process and in a loader's workers."""

import os
import pickle
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from megafold.cache_store import CorruptObject, Digest, LocalStore
from megafold.pipeline.errors import InputError
from megafold.pipeline.manifest import entry_rows
from megafold.pipeline.stream import (
    CropConfig,
    FailureConfig,
    FailureLog,
    SamplerState,
    SamplingConfig,
    Stream,
    StreamConfig,
    TooManyFailures,
)
from megafold.pipeline.stream.failures import SampleTimeout, reason_of, within_budget
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

torch = pytest.importorskip("torch")

from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset, TorchCollate  # noqa: E402

LENIENT = FailureConfig(max_share=1.0)
SIZE = 40


def config(failures=LENIENT, weights="af3"):
    sampling = SamplingConfig(epoch_size=SIZE, weights=weights)
    return StreamConfig(crop=CropConfig(tokens=6, atoms=60), sampling=sampling, failures=failures, seed=3)


def make_cache(path, count=5):
    entries = []
    for number in range(count):
        chains = [Chain(["ALA", "GLY", "LYS"] * (4 + number), origin=(0, number, 0))]
        entries.append((fake.structure(f"{number}abc", chains), chains, ""))
    fake.publish(path, entries)
    return path


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


def damage(cache, entry):
    """Flip bits in all arrays of an entry's structure; returns the object's path."""
    store = LocalStore.at(cache)
    digest = next(row.structure for row in entry_rows(store.manifest()) if row.entry == entry)
    path = store.object_path(Digest.parse(digest))
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 10, len(data) // 2, 50):
        data[place] ^= 4
    path.chmod(0o644)
    path.write_bytes(data)
    return path


class Source:
    """Fails for the (index, attempt) pairs it is told to."""

    def __init__(self, failing, error=ValueError):
        self.failing, self.error, self.forgotten = failing, error, 0

    def sample(self, index, *, epoch=0, seed=None, attempt=0):
        if (index, attempt) in self.failing:
            raise self.error(f"no {index}")
        return epoch, index, attempt

    def entry_name(self, index, *, epoch=0, seed=None, attempt=0):
        return f"e{index}"

    def prepare(self):
        pass

    def forget(self):
        self.forgotten += 1


def test_the_first_attempt_that_succeeds_is_the_sample_and_the_others_are_counted():
    log = FailureLog(LENIENT)
    source = Source({(7, 0), (7, 1), (8, 0)})
    assert log.sample(source, 6, 2) == ((2, 6, 0), ())
    sample, failed = log.sample(source, 7, 2)
    assert sample == (2, 7, 2)
    assert [(item.entry, item.reason, item.message, item.attempt) for item in failed] == [
        ("e7", "ValueError", "no 7", 0),
        ("e7", "ValueError", "no 7", 1),
    ]
    log.sample(source, 8, 2)
    assert log.tried == 6
    assert log.counts == {("e7", "ValueError"): 2, ("e8", "ValueError"): 1}
    assert source.forgotten == 3
    assert log.report().splitlines() == [
        "3 of 6 samples failed and were replaced:",
        "  e7: ValueError, 2 times: no 7",
        "  e8: ValueError, 1 times: no 8",
    ]


def test_an_index_without_an_attempt_that_succeeds_ends_the_run():
    log = FailureLog(FailureConfig(attempts=3, max_share=1.0))
    with pytest.raises(
        TooManyFailures, match=r"(?s)sample 4 of epoch 1: 3 attempts in a row.*e4: ValueError, 3"
    ):
        log.sample(Source({(4, attempt) for attempt in range(10)}), 4, 1)


def test_more_than_the_allowed_share_ends_the_run_with_the_list():
    log = FailureLog(FailureConfig(max_share=0.1, min_failures=3))
    source = Source({(index, 0) for index in range(0, 200, 20)} | {(101, 0), (102, 0), (103, 0)}, KeyError)
    for index in range(100):
        log.sample(source, index, 0)  # one in twenty
    assert len(log.failures) == 5
    strict = FailureLog(FailureConfig(max_share=0.03, min_failures=3))
    for index in range(40):
        strict.sample(source, index, 0)
    with pytest.raises(TooManyFailures, match=r"(?s)more than 3.00% .*3 of 43 samples.*e0: .*e20: .*e40: "):
        strict.sample(source, 40, 0)


def test_what_must_not_be_replaced_is_not():
    log = FailureLog(LENIENT)
    with pytest.raises(KeyboardInterrupt):
        log.sample(Source({(0, 0)}, KeyboardInterrupt), 0, 0)


def test_reasons():
    assert reason_of(CorruptObject("d", "p", "r")) == "corrupt-object"
    assert reason_of(InputError("m", reason="some-slug")) == "some-slug"
    assert reason_of(SampleTimeout("m")) == "time-budget"
    assert reason_of(OSError(5, "m")) == "OSError"


@pytest.mark.parametrize("weights", ["af3", "uniform"])
def test_a_replacement_is_a_function_of_seed_epoch_index_and_attempt(cache, weights):
    streams = [Stream(cache, config(weights=weights)) for _ in range(2)]
    draws = {}
    for attempt in (2, 0, 1):
        for index in (3, 1, 2):
            draws[index, attempt] = streams[0].sample(index, epoch=5, attempt=attempt)
    for (index, attempt), sample in reversed(draws.items()):
        other = streams[1].sample(index, epoch=5, attempt=attempt)
        assert other.meta == sample.meta
        assert sample.meta["attempt"] == attempt
        assert (other.features["coords"] == sample.features["coords"]).all()
        assert streams[1].entry_name(index, epoch=5, attempt=attempt) == sample.meta["entry"]
    coords = {draws[1, attempt].features["coords"].tobytes() for attempt in range(3)}
    assert len(coords) == 3
    assert len(streams[0].symmetry(1, epoch=5, attempt=2).chains) == 0
    # Draws in the place of others are spread over all entries.
    assert {streams[0].entry_name(1, attempt=attempt) for attempt in range(1, 40)} == {
        f"{i}abc" for i in range(5)
    }


def test_a_corrupt_object_is_replaced_named_and_counted_the_same_by_any_workers(cache):
    path = damage(cache, "2abc")
    seen = []
    for workers, method in ((0, None), (2, "fork")):
        dataset = StreamDataset(cache, config())
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=4,
            num_workers=workers,
            multiprocessing_context=method,
            collate_fn=TorchCollate(meta=True),
        )
        metas = [meta for batch in loader for meta in batch["meta"]]
        assert [meta["index"] for meta in metas] == list(range(SIZE))
        assert all(meta["entry"] != "2abc" for meta in metas)
        replaced = [failure for meta in metas for failure in meta.get("replaced", ())]
        assert replaced
        assert {failure["entry"] for failure in replaced} == {"2abc"}
        assert {failure["reason"] for failure in replaced} == {"corrupt-object"}
        assert all(path.name in failure["message"] for failure in replaced)
        # What workers met is known here, after they have ended, too.
        assert dataset.failures.counts == {("2abc", "corrupt-object"): len(replaced)}
        assert dataset.failures.tried == SIZE + len(replaced)
        seen.append(metas)
    assert seen[0] == seen[1]


def test_too_many_failures_in_workers_end_the_loader_with_the_list(cache):
    damage(cache, "2abc")
    dataset = StreamDataset(cache, config(FailureConfig(min_failures=4)))
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=1, num_workers=2, multiprocessing_context="fork", collate_fn=TorchCollate()
    )
    with pytest.raises(
        TooManyFailures, match=r"(?s)more than 1.00% of the samples fail.*2abc: corrupt-object"
    ):
        list(loader)
    assert len(dataset.failures.failures) >= 4


def test_a_budget_interrupts_what_takes_too_long():
    started = time.monotonic()
    with pytest.raises(SampleTimeout, match=r"time budget of 0\.05 s"):
        within_budget(lambda: time.sleep(30), 0.05)
    assert time.monotonic() - started < 20
    assert within_budget(lambda: 5, 60.0) == 5
    assert within_budget(lambda: 5, None) == 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    with pytest.raises(KeyError):
        within_budget(lambda: {1: 2}[3], 60.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_where_nothing_can_interrupt_it_is_refused_once_it_ends():
    result = SimpleNamespace(error=None)

    def work():
        try:
            within_budget(lambda: time.sleep(0.1), 0.01)
        except SampleTimeout as error:
            result.error = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "its time budget is 0.01 s" in str(result.error)


class Slow(Stream):
    """Its entry 1abc does not come, as from a file system that hangs."""

    def sample(self, index, *, epoch=0, seed=None, attempt=0):
        if self.entry_name(index, epoch=epoch, attempt=attempt) == "1abc":
            time.sleep(60)
        return super().sample(index, epoch=epoch, attempt=attempt)


def test_a_sample_over_its_budget_is_replaced_in_a_worker(cache):
    dataset = StreamDataset(Slow(cache, config(FailureConfig(max_share=1.0, time_budget_s=0.5))))
    # One sample that hangs, and the one after it.
    first = next(index for index in range(SIZE) if dataset.stream.entry_name(index) == "1abc")
    loader = torch.utils.data.DataLoader(
        dataset,
        sampler=[first, (first + 1) % SIZE],
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=lambda sample: sample.meta,
    )
    metas = list(loader)
    assert [meta["index"] for meta in metas] == [first, (first + 1) % SIZE]
    assert metas[0]["replaced"][0]["reason"] == "time-budget"
    assert metas[0]["entry"] != "1abc"


def test_the_log_survives_pickling_and_goes_with_its_maker(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = FailureLog(LENIENT)
    copy = pickle.loads(pickle.dumps(log))
    copy.sample(Source({(0, 0)}), 0, 0)
    assert (log.tried, len(log.failures)) == (2, 1)
    del copy
    child = os.fork()
    if child == 0:
        del log  # its folder is not this process's to remove
        os._exit(0)
    os.waitpid(child, 0)
    assert log.tried == 2
    folder = next(path for path in tmp_path.iterdir() if any(path.iterdir()))
    del log
    assert not folder.exists()


def test_a_killed_worker_ends_the_loader_and_a_new_one_goes_on_exactly(cache):
    dataset = StreamDataset(cache, config())
    expected = [dataset[index].meta for index in range(SIZE)]

    def make(state):
        return torch.utils.data.DataLoader(
            dataset,
            sampler=RankSampler(SIZE, state),
            batch_size=None,
            num_workers=2,
            prefetch_factor=1,
            multiprocessing_context="fork",
            collate_fn=lambda sample: sample.meta,
        )

    got = []
    batches = iter(make(SamplerState(3)))

    def take(batches, count):
        for _ in range(count):
            got.append(next(batches))

    take(batches, 5)
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*(Killed|exited unexpectedly)"):
        take(batches, SIZE - 5)
    del batches
    got += list(make(SamplerState(3).advanced(len(got), SIZE)))
    assert got == expected


@pytest.mark.parametrize(
    "changes", [{"attempts": 0}, {"time_budget_s": 0}, {"max_share": 1.5}, {"min_failures": 0}]
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(InputError, match="failures"):
        FailureConfig(**changes)
