"""The training loops of ``examples/`` on a tiny cache: they learn, and go on where they stopped."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megafold.cache_store import LocalStore
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOOPS = ["train_plain", "train_fabric"]


def make_cache(path, lengths):
    """Entries that each have one peptide, of a length of its own."""
    store = LocalStore.create(path)
    entries = []
    for length in lengths:
        sequence = "AGKAGKAGKAG"[:length]
        msa = str(store.put(fake.msa(sequence, ["AGKA-KA-KAG"[:length]])))
        chains = [Chain([{"A": "ALA", "G": "GLY", "K": "LYS"}[letter] for letter in sequence], msa=msa)]
        entries.append((fake.structure(f"{length:04}", chains), chains, ""))
    fake.publish(path, entries)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("examples") / "cache", (5, 8, 11))


@pytest.fixture
def losses(monkeypatch, capsys, cache):
    """Run a training loop; its losses."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name, *arguments, data=cache):
        if name == "train_fabric":
            pytest.importorskip("lightning_fabric")
        monkeypatch.setattr(sys, "argv", [name, str(data), *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        printed = capsys.readouterr().out
        return [float(value) for value in re.findall(r"^step \d+ loss (\S+)$", printed, re.MULTILINE)]

    return run


@pytest.mark.parametrize("name", LOOPS)
def test_the_loss_falls(name, losses, tmp_path):
    found = losses(name, "--steps", 100, data=make_cache(tmp_path / "one", (5,)))
    assert len(found) == 100
    assert np.isfinite(found).all()
    assert found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("name", LOOPS)
def test_a_run_goes_on_where_another_stopped(name, losses, tmp_path):
    unbroken = losses(name, "--steps", 7)
    assert len(set(unbroken)) > 3
    checkpoint = tmp_path / "checkpoint.pt"
    broken = losses(name, "--steps", 4, "--checkpoint", checkpoint)
    broken += losses(name, "--steps", 3, "--checkpoint", checkpoint)
    assert broken == unbroken


def test_both_loops_train_alike(losses):
    assert losses("train_plain", "--steps", 4) == losses("train_fabric", "--steps", 4, "--accelerator", "cpu")


def test_a_run_goes_on_from_a_worker_process(losses):
    assert losses("train_plain", "--steps", 4, "--workers", 1) == losses("train_plain", "--steps", 4)


@pytest.mark.slow
def test_two_devices_share_the_samples(cache, losses, tmp_path):
    pytest.importorskip("lightning_fabric")
    checkpoint, start = tmp_path / "two.pt", tmp_path / "start.pt"
    command = [sys.executable, EXAMPLES / "train_fabric.py", cache, "--devices", 2, "--accelerator", "cpu"]
    command += ["--steps", 2, "--checkpoint", checkpoint]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, _ = (float(value) for value in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE))
    # Each of the first two samples by itself, with the weights that training starts from.
    assert losses("train_plain", "--steps", 0, "--checkpoint", start) == []
    saved = torch.load(start)
    alone = []
    for position in (0, 1):
        torch.save(saved | {"sampler": {"seed": 0, "epoch": 0, "position": position}}, start)
        alone += losses("train_plain", "--steps", 1, "--checkpoint", start)
    assert first == pytest.approx(np.mean(alone), abs=2e-4)
    assert len(set(alone)) == 2
    assert torch.load(checkpoint)["sampler"] == {"seed": 0, "epoch": 1, "position": 1}  # 4 of 3 an epoch


def test_operators_in_another_model_give_what_it_gave(monkeypatch, capsys):
    """The example's modules are written without the operators, too: einsum, and PyTorch's own attention."""
    arguments = ["kernels_alone", "--device", "cpu", "--backend", "eager", "--tokens", "12"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLES / "kernels_alone.py"), run_name="__main__")
    off = [float(value) for value in re.findall(r"by (\S+) at most", capsys.readouterr().out)]
    assert len(off) == 2
    assert max(off) < 1e-5
