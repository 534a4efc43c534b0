"""Items fetched in a thread: same items, same errors, one ahead and no more, and no thread left behind."""

import gc
import threading
import time

import pytest

from megafold.trainer.fetch_ahead import FetchAhead


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.001)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "fetch-ahead"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert threads() == []


def test_items_and_end():
    ahead = FetchAhead(iter(range(5)))
    assert list(ahead) == [0, 1, 2, 3, 4]
    assert next(ahead, None) is None
    ahead.close()


def test_one_item_is_fetched_while_another_is_used():
    fetched = []

    def items():
        for item in range(9):
            fetched.append(item)
            yield item

    ahead = FetchAhead(items())
    wait_for(lambda: fetched == [0])
    for taken in range(3):
        assert next(ahead) == taken
        wait_for(lambda last=taken + 1: fetched[-1] == last)
        time.sleep(0.01)
        assert fetched == list(range(taken + 2))  # and not one more
    ahead.close()
    assert fetched == [0, 1, 2, 3]
    assert next(ahead, None) is None


def test_an_error_is_raised_where_the_item_would_be_taken():
    def items():
        yield 1
        raise ZeroDivisionError("of item 2")

    ahead = FetchAhead(items())
    assert next(ahead) == 1
    with pytest.raises(ZeroDivisionError, match="of item 2"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_stops_a_source_that_an_error_still_refers_to():
    stopped = []

    def items():
        yield 1
        raise ZeroDivisionError

    ahead = FetchAhead(items(), lambda: stopped.append(True))
    assert next(ahead) == 1
    with pytest.raises(ZeroDivisionError) as caught:
        next(ahead)
    assert not stopped
    ahead.close()
    assert stopped == [True]
    ahead.close()
    assert stopped == [True]
    del caught


def test_closing_waits_for_the_item_in_hand_and_drops_the_source():
    started, may_end, dropped = threading.Event(), threading.Event(), []

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            started.set()
            assert may_end.wait(10)
            return 1

        def __del__(self):
            dropped.append(threading.current_thread())

    ahead = FetchAhead(iter(Source()))
    assert started.wait(10)
    threading.Timer(0.05, may_end.set).start()
    ahead.close()
    assert may_end.is_set()
    assert threads() == []
    assert dropped == [threading.main_thread()]


def test_the_thread_goes_with_the_last_reference():
    ahead = FetchAhead(iter(range(5)))
    assert next(ahead) == 0
    del ahead
    gc.collect()
    assert threads() == []
