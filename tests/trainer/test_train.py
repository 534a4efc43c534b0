"""A whole run: data, training, sampling, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import gemmi
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from megafold.trainer.batches import BatchStream, TrainingData
from megafold.trainer.checkpoint import load_checkpoint
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.errors import CheckpointError, ConfigError, DataError
from megafold.trainer.evaluation import sample_structures
from megafold.trainer.run_lock import only_run
from megafold.trainer.train import Resume, _whole_batch, build_model, run_training
from tests.trainer.batches import random_batch
from tests.trainer.fakes import FakeModel, quick_config


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    monkeypatch.setattr("megafold.trainer.logging.run_log.draw_losses", lambda csv_path, png_path: None)


class Entries(Dataset):
    """Samples by ``(epoch, index)``."""

    def __init__(self, length=4):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        _, place = index
        sample = {name: value[0] for name, value in random_batch(place, 8).items()}
        return sample, {"entry": f"entry{place}"}


class Deadly(Entries):
    """One of its samples has the worker that loads it killed."""

    def __getitem__(self, index):
        if index == (1, 1) and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def collate(samples):
    batch = {name: torch.stack([s[name] for s, _ in samples]) for name in samples[0][0]}
    return {**batch, "meta": [meta for _, meta in samples]}


def newest(summary):
    assert summary.checkpoint is not None
    return load_checkpoint(summary.checkpoint)


def make_data(**changes):
    return TrainingData(dataset=Entries(), collate=collate, identity={"manifest": "ab"}, **changes)


def test_a_run_leaves_a_summary_and_structures(tmp_path):
    config = quick_config(steps=3, sample_count=2, batch_size=1)
    summary = run_training(config, make_data(), tmp_path, model=FakeModel())
    assert (summary.steps, summary.skipped, summary.stopped) == (3, 0, False)
    assert summary.parameters == 64 * 3 + 1 + 64 + 3
    assert summary.checkpoint == tmp_path / "checkpoints/step-00000003.pt"
    (structure,) = summary.structures
    assert structure.entry == "entry3"
    # The fake samples the ground truth, off by 0.01 Å.
    assert structure.lddt == structure.lddt_center == (1.0, 1.0)
    assert all(0.01 < value < 0.025 for value in structure.rmsd)
    assert len(gemmi.read_structure(str(structure.path))) == 2
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == summary.to_dict()
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict()
    assert newest(summary)["data"] == {"manifest": "ab"}


def test_samples_to_evaluate_can_be_named(tmp_path):
    data = make_data(evaluate=[(0, 2), (0, 0)])
    summary = run_training(quick_config(steps=1, sample_count=1), data, tmp_path, model=FakeModel())
    assert [structure.entry for structure in summary.structures] == ["entry2", "entry0"]
    # Sampling has no part in where training stands.
    assert newest(summary)["sampler"]["position"] == 1


def test_ranks_that_share_samples_are_given_a_whole_one_by_a_stream_that_is_closed(monkeypatch):
    """It is the one that training would see next."""
    data, config, ranks = make_data(), quick_config(), Ranks(rank=1, world=2, sp=2)
    stream = BatchStream(data, config, ranks)
    stream.load_state_dict({"seed": 0, "epoch": 0, "position": 2})
    open_streams = {id(stream)}
    init, close = BatchStream.__init__, BatchStream.close

    def opened(own: BatchStream, *arguments: Any) -> None:
        open_streams.add(id(own))
        init(own, *arguments)

    def closed(own: BatchStream) -> None:
        if own._loader is not None:
            open_streams.remove(id(own))
        close(own)

    monkeypatch.setattr(BatchStream, "__init__", opened)
    monkeypatch.setattr(BatchStream, "close", closed)
    trainer: Any = SimpleNamespace(config=config, ranks=ranks)
    assert _whole_batch(trainer, data, stream)["meta"] == [{"entry": "entry2"}]
    assert open_streams == {id(stream)}
    assert next(stream)["meta"] == [{"entry": "entry2"}]


def test_samples_of_one_entry_are_files_of_their_own(tmp_path):
    data = make_data(evaluate=[(0, 2), (0, 0), (1, 2)])
    summary = run_training(quick_config(steps=1, sample_count=1), data, tmp_path, model=FakeModel())
    names = [structure.path.name for structure in summary.structures]
    assert names == ["entry2.cif", "entry0.cif", "entry2-2.cif"]
    assert sorted(path.name for path in (tmp_path / "structures").iterdir()) == sorted(names)


def test_a_folder_with_a_run_is_resumed_or_refused(tmp_path):
    run_training(quick_config(steps=2), make_data(), tmp_path / "a", model=FakeModel())
    with pytest.raises(CheckpointError, match="holds a run"):
        run_training(quick_config(steps=4), make_data(), tmp_path / "a", model=FakeModel())
    summaries = [
        run_training(quick_config(steps=4), make_data(), tmp_path / name, resume=Resume(), model=FakeModel())
        for name in ("a", "b")
    ]
    states = [newest(summary) for summary in summaries]
    assert states[0]["sampler"] == states[1]["sampler"] == {"seed": 0, "epoch": 0, "position": 4}
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name])


def test_a_folder_takes_one_run_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("megafold.trainer.train.only_run", partial(only_run, wait_s=0.1))
    folder = tmp_path / "run"
    with only_run(folder), pytest.raises(CheckpointError, match=r"another run is at work in .*run"):
        run_training(quick_config(steps=1), make_data(), folder, model=FakeModel())
    assert not (folder / "config.json").exists()
    assert run_training(quick_config(steps=1), make_data(), folder, model=FakeModel()).steps == 1


def test_a_killed_run_leaves_its_folder_free(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from megafold.trainer.run_lock import only_run\n"
        "with only_run(Path(sys.argv[1])): print('in', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    with pytest.raises(CheckpointError, match="another run"), only_run(tmp_path, wait_s=0):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with only_run(tmp_path, wait_s=0):
        pass


def test_a_killed_worker_ends_the_run_and_a_resumed_one_goes_on_exactly(tmp_path):
    settings = {"steps": 8, "checkpoint_every": 2, "sample_count": 0, "worker_start": "fork", "prefetch": 1}
    whole = run_training(quick_config(**settings), make_data(), tmp_path / "whole", model=FakeModel())
    data = TrainingData(dataset=Deadly(), collate=collate, identity={"manifest": "ab"})
    config = quick_config(num_workers=1, **settings)
    with pytest.raises(DataError, match=r"(?s)DataLoader worker .*ends in step .*Start again with --resume"):
        run_training(config, data, tmp_path / "cut", model=FakeModel())
    again = run_training(quick_config(**settings), data, tmp_path / "cut", resume=Resume(), model=FakeModel())
    assert again.steps == 8
    expected, found = newest(whole), newest(again)
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value)


def test_other_data_are_refused(tmp_path):
    run_training(quick_config(steps=1), make_data(), tmp_path, model=FakeModel())
    other = TrainingData(dataset=Entries(), collate=collate, identity={"manifest": "cd"})
    with pytest.raises(CheckpointError, match="manifest"):
        run_training(quick_config(steps=2), other, tmp_path, resume=Resume(), model=FakeModel())
    allowed = Resume(allow_other_data=True)
    summary = run_training(quick_config(steps=2), other, tmp_path, resume=allowed, model=FakeModel())
    assert summary.steps == 2


def test_initial_weights_depend_on_the_seed_alone():
    config = quick_config(preset="tiny")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = build_model(config)
    assert torch.equal(torch.rand(1), expected)
    again, other = build_model(config), build_model(quick_config(preset="tiny", seed=1))
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    with pytest.raises(ConfigError, match="preset"):
        build_model(quick_config(preset="huge"))
    assert build_model(quick_config(preset="tiny", backend="compile")).backend == "compile"


def test_sampling_leaves_training_as_it_is(tmp_path):
    model = FakeModel()
    model.train()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    batch = collate([Entries()[0, 1]])
    config = quick_config(sample_count=2)
    first, again = (
        sample_structures(model, batch, config, tmp_path / name, torch.device("cpu")) for name in "ab"
    )
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert first[0].rmsd == again[0].rmsd
    positions = [
        [atom.pos.tolist() for chain in gemmi.read_structure(str(s[0].path))[0] for r in chain for atom in r]
        for s in (first, again)
    ]
    assert positions[0] == positions[1]


def test_the_network_trains_stops_and_resumes_exactly(tmp_path):
    """Exact resumption with the network itself: dropout, noise and cycles all come back."""
    config = quick_config(preset="tiny", n_copies=2, learning_rate=1e-3, checkpoint_every=2)
    settings = config.to_dict()
    run_training(type(config).from_dict({**settings, "steps": 4}), make_data(), tmp_path / "whole")
    run_training(type(config).from_dict({**settings, "steps": 2}), make_data(), tmp_path / "parts")
    torch.manual_seed(77)
    run_training(
        type(config).from_dict({**settings, "steps": 4}), make_data(), tmp_path / "parts", resume=Resume()
    )
    states = [
        load_checkpoint(tmp_path / name / "checkpoints/step-00000004.pt") for name in ("whole", "parts")
    ]
    for part in ("model", "average"):
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name]), name
    moments = [state["optimizer"]["state"] for state in states]
    for index, entry in moments[0].items():
        for name, value in entry.items():
            assert torch.equal(value, moments[1][index][name])
