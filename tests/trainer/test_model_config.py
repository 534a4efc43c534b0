"""Configurations check themselves and survive being stored."""

import dataclasses
import json

import pytest

from megafold.trainer.errors import ConfigError
from megafold.trainer.model.config import AtomTransformerConfig, DiffusionConfig, ModelConfig
from megafold.trainer.presets.model import MODEL_PRESETS, model_preset


def test_defaults_are_the_supplements_sizes():
    config = model_preset("af3")
    assert (config.c_s, config.c_z, config.c_m, config.c_token, config.c_atom) == (384, 128, 64, 768, 128)
    assert (config.n_pairformer, config.n_msa, config.n_template) == (48, 4, 2)
    assert (config.diffusion.n_block, config.diffusion.n_head, config.c_s_inputs) == (24, 16, 449)


@pytest.mark.parametrize("name", sorted(MODEL_PRESETS))
def test_presets_survive_json(name):
    config = model_preset(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_groups_left_out_keep_their_defaults():
    assert ModelConfig.from_dict({"c_z": 64}) == ModelConfig(c_z=64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(c_z=0), "c_z must be positive"),
        (lambda: ModelConfig(c_s=100), r"c_s \(100\) must be a multiple of its 16 heads"),
        (lambda: ModelConfig.from_dict({"backend": "cuda"}), "backend must be one of"),
        (lambda: AtomTransformerConfig(n_keys=33), "even number"),
        (lambda: DiffusionConfig(s_min=200.0), "must be below s_max"),
        (lambda: ModelConfig.from_dict({"c_y": 1}), "unknown model settings"),
        (lambda: ModelConfig.from_dict({"atom": {"heads": 1}}), "atom.heads"),
        (lambda: model_preset("huge"), "no model preset 'huge'"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(model_preset("tiny"), "c_z", 1)  # noqa: B010
