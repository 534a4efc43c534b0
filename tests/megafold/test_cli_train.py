"""What the options of ``megafold train`` ask of the stream."""

from typing import Any

import pytest
from click.testing import CliRunner

from megafold.cli import sample, stream, train
from megafold.cli.main import group
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

pytest.importorskip("torch")

from megafold.trainer.config import TrainConfig


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "cache"
    chains = [Chain(["ALA", "GLY"], sym=sym, origin=(0, 9 * sym, 0)) for sym in (1, 2)]
    content = fake.structure("1abc", chains)
    fake.publish(path, [(content, chains, "")])
    return str(path)


def config_of(cache, *options, **settings) -> Any:
    """The stream's settings under ``megafold train CACHE OPTIONS``."""
    values = train.command.make_context("train", [cache, *options]).params
    return train._data(
        cache, values, TrainConfig.for_preset(values["preset"], **settings)
    ).dataset.stream.config


def test_rows_are_drawn_for_each_pass_of_the_trunk_if_the_training_wants_it(cache):
    assert config_of(cache, "--preset", "af3").msa.recycles == 4
    assert config_of(cache, "--preset", "af3", n_cycles=3).msa.recycles == 3
    assert config_of(cache, "--preset", "af3", redraw_msa=False).msa.recycles == 1
    assert config_of(cache).msa.recycles == 1  # tiny has one pass


def test_samples_carry_their_symmetry_where_something_follows_it(cache):
    assert config_of(cache, "--preset", "af3").symmetry
    assert config_of(cache, sample_count=1).symmetry
    assert not config_of(cache, sample_count=0).symmetry  # tiny has no roll-out


def test_equal_options_mean_equal_samples_in_all_commands(cache):
    options = ["--tokens", "77", "--msa-rows", "55", "--templates", "33", "--seed", "5"]
    shown = sample.show.make_context("show", [cache, "1abc", *options]).params
    benched = stream.bench.make_context("bench", [cache, *options]).params
    configs = [
        config_of(cache, *options),
        sample._stream(cache, "1abc", shown).config,
        stream._stream(cache, benched).config,
    ]
    for config in configs:
        assert (config.seed, config.crop.tokens, config.crop.atoms, config.msa.rows) == (5, 77, 948, 55)
        assert (config.template.count, config.template.candidates) == (33, 33)
        assert (config.crop, config.template) == (configs[0].crop, configs[0].template)


def test_settings_of_no_meaning_are_refused(cache, tmp_path):
    for setting in ("deterministic=maybe", "steps=x", "learning_rate=fast", "no_such=1"):
        result = CliRunner().invoke(
            group, ["train", str(cache), "--set", setting, "--out", str(tmp_path / "out")]
        )
        assert result.exit_code == 2, result.output
        assert f"--set {setting}" in result.output
    assert not (tmp_path / "out").exists()
