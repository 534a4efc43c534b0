"""A rank that dies, hangs or fails ends the job, with a message that names it; torchrun starts it again."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.test_data_parallel import ROOT, free_port

#: Rank 1 comes to grief in step 3, in the middle of the trunk, unless the run has been started again.
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

    folder, fate = Path(sys.argv[1]), sys.argv[2]
    run_log.draw_losses = lambda csv_path, png_path: None
    block, calls = pairformer.pairformer_block, []

    def fatal(*args, **kwargs):
        calls.append(1)
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if len(calls) == 3 and os.environ["RANK"] == "1" and not restarted:
            if fate == "raise":
                raise ValueError("something of its own")
            os.kill(os.getpid(), signal.Signals[fate])
        return block(*args, **kwargs)

    pairformer.pairformer_block = fatal
    config = quick_config(
        sp=2, steps=5, n_copies=2, n_cycles=1, checkpoint_every=2, peer_timeout_s=8, log_every=1,
        sample_count=1, sample_steps=2, sample_cycles=1,
    )
    try:
        summary = run_training(config, DATA, folder, resume=Resume(), model=mini_model(config=LITTLE))
    except TrainerError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    print("finished", summary.steps, len(summary.structures), flush=True)
    # Without the interpreter's teardown: gloo's threads now and then abort a process that has finished.
    os._exit(0)
    """
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}


def start_two(folder: Path, fate: str) -> list[subprocess.Popen[Any]]:
    """Two ranks that nobody looks after."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), fate],
            cwd=ROOT,
            env={**ENVIRONMENT, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "message", "status"),
    [
        ("SIGKILL", "died in step 3", 2),
        ("SIGSTOP", "has not answered for 8 s", 3),
        ("raise", "failed: ValueError: something of its own", None),
    ],
)
def test_a_lost_rank_ends_the_others(tmp_path, fate, message, status):
    first, second = start_two(tmp_path, fate)
    try:
        _, said = first.communicate(timeout=180)
        assert f"rank 1 ({os.uname().nodename}, process {second.pid})" in said
        assert message in said
        assert status is None or first.returncode == status
        assert first.returncode != 0
    finally:
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.slow
def test_torchrun_starts_again_from_the_last_checkpoint(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(script), str(tmp_path / "run"), "SIGKILL"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "step-00000002.pt after step 2" in result.stdout
    # The first rank samples a structure, from the whole of the sample that training would see next.
    assert result.stdout.count("finished 5 1") == result.stdout.count("finished 5 0") == 1
    assert "rank 1 (" in result.stderr
    assert "died in step 3" in result.stderr
