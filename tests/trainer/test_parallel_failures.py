"""A rank that dies, hangs or fails ends the job, with a message that names it; torchrun starts it again."""

import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from tests.trainer.test_data_parallel import ROOT, free_port

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PYTHONPATH": str(ROOT)}

#: Pairs of ranks, of which the second comes to grief while the first waits, as in a collective. "asked":
#: the first one's collective fails, and it asks who is missing before its thread has looked.
PAIRS = textwrap.dedent(
    """
    import os, signal, sys, time

    import torch.distributed as dist

    import megafold.trainer.parallel.watch as watch

    port = int(sys.argv[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def first(peers, fate):
        time.sleep(1 if fate == "asked" else 60)
        print(f"missing: {peers.missing()}", file=sys.stderr, flush=True)

    def second(peers, fate):
        time.sleep(0.5)
        if fate == "raise":
            raise ValueError("something of its own")
        os.kill(os.getpid(), signal.Signals["SIGKILL" if fate == "asked" else fate])

    children = {}
    for number, fate in enumerate(sys.argv[3:]):
        for rank, part in enumerate((first, second)):
            children[fate, rank] = child = os.fork()
            if child:
                continue
            # As many attempts of one job: they share a store.
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
            os.dup2(os.open(f"{sys.argv[2]}/{fate}{rank}", os.O_CREAT | os.O_WRONLY), 2)
            watch.BEAT_S = 5.0 if fate == "asked" else 0.2
            try:
                with watch.PeerWatch(rank, 2, 3.0) as peers:
                    part(peers, fate)
            except ValueError:
                os._exit(1)
            os._exit(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for fate in sys.argv[3:]:
        _, status = os.waitpid(children[fate, 0], 0)
        print(fate, children[fate, 1], os.waitstatus_to_exitcode(status), flush=True)
        os.kill(children[fate, 1], signal.SIGKILL)
    os._exit(0)
    """
)

#: By what becomes of the second rank: how the first one ends, and what it says.
FATES: dict[str, tuple[int, str]] = {
    "asked": (0, "missing: ['rank 1 ({who})']"),
    "SIGKILL": (3, "Error: rank 1 ({who}) died. Rank 0 ends, too"),
    "SIGSTOP": (3, "Error: rank 1 ({who}) has not answered for 3 s. Rank 0 ends, too"),
    "raise": (3, "Error: rank 1 ({who}) failed: ValueError: something of its own. Rank 0 ends, too"),
}


def test_a_lost_rank_ends_the_others(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PAIRS, str(free_port()), str(tmp_path), *FATES],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    ended = [line.split() for line in result.stdout.splitlines()]
    assert [fate for fate, _, _ in ended] == list(FATES)
    for fate, process, status in ended:
        code, message = FATES[fate]
        who = f"{os.uname().nodename}, process {process}"
        assert message.format(who=who) in (tmp_path / f"{fate}0").read_text()
        assert int(status) == code


#: Rank 1 dies in step 3, in the middle of the trunk, unless the run has been started again.
SCRIPT = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path

    import megafold.trainer.parallel.pairformer as pairformer
    import megafold.trainer.logging.run_log as run_log
    from megafold.trainer.errors import TrainerError
    from megafold.trainer.train import Resume, run_training
    from tests.trainer.fakes import quick_config
    from tests.trainer.networks import mini_model
    from tests.trainer.test_parallel_loop import DATA, LITTLE

    run_log.draw_losses = lambda csv_path, png_path: None
    block, calls = pairformer.pairformer_block, []

    def fatal(*args, **kwargs):
        calls.append(1)
        restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
        # Two blocks a step, the trunk's and the confidence head's: this is in the third.
        if len(calls) == 5 and os.environ["RANK"] == "1" and not restarted:
            os.kill(os.getpid(), signal.SIGKILL)
        return block(*args, **kwargs)

    pairformer.pairformer_block = fatal
    config = quick_config(
        sp=2, steps=4, n_copies=2, n_cycles=1, checkpoint_every=2, log_every=1,
        sample_count=1, sample_steps=2, sample_cycles=1, device=sys.argv[2],
    )
    try:
        summary = run_training(
            config, DATA, Path(sys.argv[1]), resume=Resume(), model=mini_model(config=LITTLE)
        )
    except TrainerError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    print("finished", summary.steps, len(summary.structures), flush=True)
    # Without the interpreter's teardown: gloo's threads now and then abort a process that has finished.
    os._exit(0)
    """
)


two_gpus = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_torchrun_starts_again_from_the_last_checkpoint(tmp_path, device):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command: list[Any] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # torchrun ends the first rank when it sees that the second has gone: not before it has said so itself.
    command += ["--monitor-interval", "5", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += [script, tmp_path / "run", device]
    result = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "step-00000002.pt after step 2" in result.stdout
    # The first rank samples a structure, from the whole of the sample that training would see next.
    assert result.stdout.count("finished 4 1") == result.stdout.count("finished 4 0") == 1
    # gloo fails for want of a rank, NCCL waits for it: then it is the watch that tells.
    assert re.search(rf"rank 1 \(.*\) died{' in step 3' if device == 'cpu' else ''}", result.stderr)
