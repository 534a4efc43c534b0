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
    assert config.to_dict() == {
        "c_s": 384,
        "c_z": 128,
        "c_m": 64,  # algorithm 8
        "c_token": 768,
        "c_atom": 128,
        "c_atompair": 16,
        "n_pairformer": 48,
        "n_msa": 4,
        "n_template": 2,  # algorithm 16
        "n_cycles": 4,
        "sigma_data": 16.0,  # SI 3.7
        "r_max": 32,  # algorithm 3
        "s_max": 2,
        "n_distogram_bins": 64,
        "atom": {"n_block": 3, "n_head": 4, "n_queries": 32, "n_keys": 128},  # algorithms 5 to 7
        # Algorithms 11 to 17 and 24.
        "pairformer": {
            "c_triangle": 128,
            "c_attention": 32,
            "n_head_pair": 4,
            "n_head_single": 16,
            "n_transition": 4,
            "dropout": 0.25,
        },
        "msa": {"c_outer_product": 32, "c_average": 32, "n_head": 8, "dropout": 0.15},  # algorithms 8 to 10
        "template": {"c": 64},
        # Algorithms 18 and 20 to 23, equation 7, SI 3.7.1.
        "diffusion": {
            "n_block": 24,
            "n_head": 16,
            "n_transition": 2,
            "c_fourier": 256,
            "p_mean": -1.2,
            "p_std": 1.5,
            "s_trans": 1.0,
            "s_max": 160.0,
            "s_min": 4e-4,
            "p": 7.0,
            "n_steps": 200,
            "gamma_0": 0.8,
            "gamma_min": 1.0,
            "noise_scale": 1.003,
            "step_scale": 1.5,
        },
        # Algorithm 31, SI 4.3; 24 atoms has guanosine with OP3.
        "confidence": {
            "n_block": 4,
            "n_atom": 24,
            "n_plddt_bins": 50,
            "n_pae_bins": 64,
            "n_pde_bins": 64,
        },
        "activation_checkpointing": True,
        "backend": "eager",
    }


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
