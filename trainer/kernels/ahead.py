"""Kernels compiled before a step needs them, many at a time.

Triton compiles a kernel when it is first launched, and the launch waits: a Pairformer block has some 40 of
them. Here a step is gone through with nothing launched, while threads compile what it would launch: nearly
all of the compiler's work is done outside of Python's lock. What the step gives is worthless and thrown away
(``trainer/rehearsal.py``).
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch
import triton

from megafold.trainer.kernels.launch import only_compile

#: Compilers at a time if no one says how many: the ranks of a machine compile each for themselves.
_MOST_WORKERS: Final = 16


@contextmanager
def compile_ahead(workers: int | None = None) -> Iterator[None]:
    """Within, a kernel that is not compiled yet is not launched but compiled, ``workers`` at a time.

    What it would write stays as it was. Leaving waits for all of them and raises what the compiler raised.
    """
    if triton.knobs.runtime.interpret:
        yield  # which compiles nothing
        return
    made: list[Any] = []
    with _threads(workers or min(_MOST_WORKERS, os.cpu_count() or 1)) as pool:
        with (
            # A backward pass in another thread would know nothing of this.
            torch.autograd.set_multithreading_enabled(False),
            triton.AsyncCompileMode(pool),
            only_compile(made),
        ):
            yield
        # What launches a kernel is compiled, too, when it is first asked for.
        list(pool.map(lambda kernel: _compiled(kernel).run, dict.fromkeys(made)))


def _threads(count: int) -> ThreadPoolExecutor:
    """Threads to which this thread's GPU is the current one, if there is one."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(count)
    return ThreadPoolExecutor(
        count, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
    )


def _compiled(kernel: Any) -> Any:
    """The kernel, of which Triton may have given a promise."""
    result = getattr(kernel, "result", None)
    return kernel if result is None else result()
