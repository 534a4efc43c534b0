import os
import signal
import subprocess
import sys
import time

import pytest

from megafold.pipeline.builder.processes import process_map

#: Prints its processes' ids, and then is busy for a minute.
PROGRAM = """
import os, signal
from megafold.pipeline.builder.processes import process_map
from tests.pipeline.test_processes import slow

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have commands behind "&" ignore it
    with process_map(2) as mapped:
        for pid in mapped(slow, range(1000)):
            print(pid, flush=True)
"""


def slow(number):
    time.sleep(0.05)
    return os.getpid()


def test_results_come_in_order():
    with process_map(2) as mapped:
        assert list(mapped(abs, range(-50, 0))) == list(range(50, 0, -1))
        assert list(mapped(abs, [])) == []


def test_an_error_is_raised_here():
    with pytest.raises(TypeError), process_map(2) as mapped:
        list(mapped(abs, [1, "x", 2]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(tmp_path, number):
    """Ctrl-C reaches all of them; whoever kills a process kills that one alone."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    program = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert program.stdout is not None
    busy = {int(program.stdout.readline()) for _ in range(20)}
    assert len(busy) == 2
    (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
    _, said = program.communicate(timeout=30)
    if number == signal.SIGINT:
        assert said.count("Traceback") == 1  # of the program, which does not catch it
        assert said.rstrip().endswith("KeyboardInterrupt")
    deadline = time.monotonic() + 30
    while any(map(is_alive, busy)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, busy))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # what nobody waits for is no longer alive
        return file.read().rpartition(")")[2].split()[0] != "Z"
