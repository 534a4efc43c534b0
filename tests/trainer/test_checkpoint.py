"""Checkpoints: exact resumption, atomic writes, the right ones kept, the wrong ones refused."""

import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafold.trainer.checkpoint import (
    FORMAT,
    CheckpointFolder,
    load_checkpoint,
    random_state,
    require_same_data,
    restore_random_state,
    with_new_parts,
)
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.errors import CheckpointError
from megafold.trainer.loop import Feed, Trainer
from tests.trainer.fakes import FakeFeed, FakeModel, quick_config
from tests.trainer.networks import MINI_JUDGING, mini_model

IDENTITY = {"manifest": "ab" * 32, "stream": {"crop": 384, "weights": [1.0, 2.0]}}


def make_trainer(folder, identity=None, model=None, **changes):
    data = FakeFeed()
    feed = Feed(batches=data, sampler=data, identity=IDENTITY if identity is None else identity)
    return Trainer(model or FakeModel(), quick_config(**changes), feed, folder)


def assert_equal(a, b, where="state"):
    """Bit for bit, through nested containers."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def test_a_resumed_run_is_bit_equal(tmp_path):
    """Stop after step 7, resume, compare step 14."""
    torch.manual_seed(3)
    random.seed(3)
    whole = make_trainer(tmp_path / "whole", checkpoint_every=7)
    whole.run()
    torch.manual_seed(3)
    random.seed(3)
    first = make_trainer(tmp_path / "parts", steps=7).run()
    torch.manual_seed(99)
    random.seed(99)
    second = make_trainer(tmp_path / "parts", model=FakeModel(seed=5))
    second.resume(first.checkpoint)
    assert second.step == 7
    second.run()
    states = [
        load_checkpoint(tmp_path / part / "checkpoints/step-00000014.pt") for part in ("whole", "parts")
    ]
    for part in ("model", "optimizer", "average", "sampler", "rng", "smoothed_loss", "best_score", "skipped"):
        assert_equal(states[0][part], states[1][part], part)
    assert states[0]["sampler"] == {"seed": 0, "epoch": 0, "position": 14}
    middle = [
        load_checkpoint(tmp_path / part / "checkpoints/step-00000007.pt") for part in ("whole", "parts")
    ]
    assert_equal(middle[0]["model"], middle[1]["model"])
    assert not torch.equal(middle[0]["model"]["table"], states[0]["model"]["table"])


def test_random_states_come_back():
    generator = torch.Generator().manual_seed(1)
    np.random.normal()  # noqa: NPY002 - numbers are drawn by twos, and the second is part of the state
    rng_state = random_state(generator)

    def draw():
        legacy = np.random.normal(size=3)  # noqa: NPY002
        return [random.random(), *legacy, *torch.randn(3), *torch.randn(3, generator=generator)]

    first = draw()
    restore_random_state(rng_state, generator)
    assert first == draw()


def test_the_state_of_a_gpus_generator_leaves_a_cpus_alone():
    """CUDA's has 16 bytes: a run that goes on on another device seeds its own."""
    generator = torch.Generator().manual_seed(1)
    own = generator.get_state()
    stored = {**random_state(generator), "generator": torch.zeros(16, dtype=torch.uint8)}
    restore_random_state(stored, generator)
    assert torch.equal(generator.get_state(), own)


@pytest.mark.parametrize("count", [1, 2])
def test_states_of_gpus_come_back_to_as_many(monkeypatch, count):
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    generator = torch.Generator()
    states = [torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]
    restore_random_state({**random_state(generator), "cuda": states}, generator)
    assert given == ([states] if count == 2 else [])


def test_each_rank_goes_on_with_its_own_random_state(tmp_path):
    trainer = make_trainer(tmp_path)
    states = [random_state(torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    trainer.ranks = Ranks(rank=1, world=2)
    trainer._restore_random_state(states)
    assert torch.equal(trainer.generator.get_state(), states[1]["generator"])


def test_the_newest_and_the_best_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path / "new", keep=2)
    assert folder.latest() is None
    for step, is_best in ((1, True), (2, True), (3, False), (10, False), (11, False)):
        folder.save(full_state(step), is_best=is_best)
    assert list(folder.steps()) == [10, 11]
    assert load_checkpoint(folder.best)["step"] == 2
    assert folder.latest() == tmp_path / "new/step-00000011.pt"
    assert sorted(p.name for p in folder.path.iterdir()) == [
        "best.pt",
        "step-00000010.pt",
        "step-00000011.pt",
    ]


def test_files_of_other_names_are_no_checkpoints(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    path = folder.save(full_state(3))
    for name in ("step-last.pt", "step-00000009.pt.part", ".step-00000007.pt.tmp"):
        (tmp_path / name).write_bytes(b"")
    assert folder.steps() == {3: path}
    folder.save(full_state(4))
    assert (tmp_path / "step-last.pt").exists()


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name before an older one goes."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(full_state(1))
    done = []
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def synced(descriptor: int) -> None:
        done.append(("synced", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def renamed(own: Path, target: Path) -> Path:
        done.append(("renamed", own.name))
        return replace(own, target)

    def removed(own: Path, missing_ok: bool = False) -> None:
        done.append(("removed", own.name))
        unlink(own, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(Path, "unlink", removed)
    folder.save(full_state(2))
    temporary = ".step-00000002.pt.tmp"
    assert done == [
        ("synced", temporary),
        ("renamed", temporary),
        ("synced", tmp_path.name),
        ("removed", "step-00000001.pt"),
    ]


@pytest.mark.parametrize("links", [True, False])
def test_the_best_outlives_its_step(tmp_path, monkeypatch, links):
    """Also where a file system has no links, and where a run died while it gave the name."""
    if not links:
        monkeypatch.setattr(os, "link", fail_to_link)
    (tmp_path / ".best.pt.tmp").write_bytes(b"half")
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(full_state(1))
    assert folder.save(full_state(2), is_best=True).samefile(folder.best) == links
    folder.save(full_state(3))
    assert list(folder.steps()) == [3]
    assert load_checkpoint(folder.best)["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "step-00000003.pt"]


def fail_to_link(*_):
    raise OSError("no links here")


def test_an_error_that_is_not_the_disks_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CheckpointFolder(tmp_path).save(full_state(1))

    def fail(*_):
        raise RuntimeError("a tensor without storage")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="without storage"):
        CheckpointFolder(tmp_path).save(full_state(1))
    assert CheckpointFolder(tmp_path).latest() is None


def test_checkpoints_of_other_formats_are_refused(tmp_path):
    path = tmp_path / "step-00000001.pt"
    torch.save({"format": FORMAT + 1, **full_state(1)}, path)
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        load_checkpoint(path)
    torch.save({"format": FORMAT, **full_state(1), "more": 1}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of a training run"):
        load_checkpoint(path)
    torch.save([1], path)
    with pytest.raises(CheckpointError, match="not a checkpoint of a training run"):
        load_checkpoint(path)


def full_state(step):
    parts = "model optimizer average sampler rng config data skipped smoothed_loss best_score"
    return {"step": step, **{name: {} for name in parts.split()}}


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_write_that_fails_leaves_the_old_ones_alone(tmp_path, monkeypatch, error):
    folder = CheckpointFolder(tmp_path)
    folder.save(full_state(1))

    def fail(state, file):
        file.write(b"half of a checkpoint")
        try:
            raise OSError("no space left on device")
        except OSError:  # as torch's writer does
            raise error("no space left, at inline_container.cc") from None

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(
            CheckpointError, match=r"step-00000002\.pt .*no space.*Make room.*step-00000001\.pt"
        ):
            folder.save(full_state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]
    assert load_checkpoint(folder.steps()[1])["step"] == 1
    folder.save(full_state(2))
    assert load_checkpoint(folder.steps()[2])["step"] == 2


def test_unreadable_files_are_named(tmp_path):
    path = CheckpointFolder(tmp_path).save(full_state(1))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"step-00000001\.pt.*older"):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match="no such"):
        load_checkpoint(tmp_path / "step-00000009.pt")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of a training run"):
        load_checkpoint(tmp_path / "other.pt")


class Bomb:
    def __reduce__(self):
        return (print, ("executed",))


def test_nothing_in_a_checkpoint_is_executed(tmp_path, capsys):
    path = CheckpointFolder(tmp_path).save({**full_state(1), "data": Bomb()})
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert "executed" not in capsys.readouterr().out


def test_other_data_are_refused_unless_allowed(tmp_path):
    path = make_trainer(tmp_path, steps=2).run().checkpoint
    other = {**IDENTITY, "manifest": "cd" * 32}
    with pytest.raises(CheckpointError, match=r"manifest.*abab.*cdcd"):
        make_trainer(tmp_path, identity=other).resume(path)
    with pytest.raises(CheckpointError, match="stream"):
        make_trainer(tmp_path, identity={"manifest": IDENTITY["manifest"]}).resume(path)
    allowed = make_trainer(tmp_path, identity=other)
    allowed.resume(path, allow_other_data=True)
    assert allowed.step == 2
    assert allowed._feed.sampler.state_dict()["position"] == 0
    require_same_data(path, IDENTITY, dict(IDENTITY))


def test_of_settings_those_that_differ_are_told_alone(tmp_path):
    stored = {"manifest": "ab", "stream": {"seed": 0, "crop": {"tokens": 384, "atoms": 4608}}}
    present = {"manifest": "ab", "stream": {"seed": 0, "crop": {"tokens": 640, "atoms": 4608}}}
    with pytest.raises(CheckpointError) as error:
        require_same_data(tmp_path / "step.pt", stored, present)
    assert "(stream.crop.tokens was 384, is 640)" in str(error.value)


def test_another_preset_is_refused_by_name(tmp_path):
    path = make_trainer(tmp_path, steps=2, preset="tiny").run().checkpoint
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt.*resume with --preset tiny"):
        make_trainer(tmp_path, preset="small").resume(path)


def test_another_network_is_refused(tmp_path):
    path = make_trainer(tmp_path, steps=2).run().checkpoint
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt.*another network"):
        make_trainer(tmp_path, model=FakeModel(n_atom=12)).resume(path)


def test_changed_settings_are_reported(tmp_path, capsys):
    path = make_trainer(tmp_path, steps=2).run().checkpoint
    make_trainer(tmp_path, steps=50, learning_rate=0.5).resume(path)
    out = capsys.readouterr().out
    assert "learning_rate was 0.02, is 0.5" in out
    assert "steps was" not in out


def test_only_the_head_may_be_new():
    model = mini_model(config=MINI_JUDGING)
    names = list(model.state_dict())
    old = {name: value for name, value in model.state_dict().items() if not name.startswith("confidence.")}
    optimizer = {"param_groups": [{"params": list(range(len(old)))}]}
    state = {"model": old, "average": dict(old), "optimizer": optimizer}
    grown = with_new_parts(state, model, "confidence.")
    assert grown["model"].keys() == grown["average"].keys() == set(names)
    assert grown["optimizer"]["param_groups"][0]["params"] == list(range(len(list(model.parameters()))))
    assert with_new_parts(grown, model, "confidence.") is grown
    less = {**state, "model": {name: value for name, value in old.items() if name != names[0]}}
    assert with_new_parts(less, model, "confidence.") is less


def test_smoothed_losses_tell_the_best_by_hand(tmp_path):
    trainer = make_trainer(tmp_path, keep_checkpoints=9)
    scores = []
    for trainer.step, loss in enumerate((10.0, 20.0, 0.0, 5.0, 30.0), start=1):
        trainer._smooth(loss)
        trainer.save()
        scores.append(load_checkpoint(trainer.checkpoints.best)["step"])
    assert scores == [1, 1, 3, 4, 4]
    smoothed = [load_checkpoint(path)["smoothed_loss"] for path in trainer.checkpoints.steps().values()]
    # Each 0.98 times the last, and a fiftieth of what is new.
    assert smoothed == pytest.approx([10.0, 10.2, 9.996, 9.89608, 10.2981584])
    best = [load_checkpoint(path)["best_score"] for path in trainer.checkpoints.steps().values()]
    assert best == pytest.approx([10.0, 10.0, 9.996, 9.89608, 9.89608])


def test_a_resumed_run_knows_what_was_skipped_and_saves_nothing_twice(tmp_path):
    bad = FakeFeed(bad=frozenset({2}))
    first = Trainer(FakeModel(), quick_config(steps=4), Feed(batches=bad, sampler=bad), tmp_path).run()
    assert first.checkpoint is not None
    written = first.checkpoint.stat().st_mtime_ns
    again = make_trainer(tmp_path, identity={}, steps=4)
    again.resume(first.checkpoint)
    assert (again.skipped, again.run().skipped) == (1, 1)
    assert first.checkpoint.stat().st_mtime_ns == written


def test_best_is_by_smoothed_loss(tmp_path):
    trainer = make_trainer(tmp_path, model=FakeModel(quiet=True), steps=6, checkpoint_every=2)
    trainer.run()
    best = load_checkpoint(trainer.checkpoints.best)
    assert math.isfinite(best["best_score"])
    assert best["smoothed_loss"] == best["best_score"]
    assert best["step"] == 6  # the loss falls
