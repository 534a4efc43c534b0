"""Sizes of the network by name."""

from typing import Final

from megafold.trainer.errors import ConfigError
from megafold.trainer.model.config import (
    AtomTransformerConfig,
    DiffusionConfig,
    ModelConfig,
    MSAConfig,
    PairformerConfig,
    TemplateConfig,
)

#: For tests, demonstrations and a first run on a laptop's CPU.
TINY: Final = ModelConfig(
    c_s=64,
    c_z=32,
    c_m=32,
    c_token=96,
    c_atom=32,
    c_atompair=16,
    n_pairformer=2,
    n_msa=1,
    n_template=1,
    n_cycles=2,
    atom=AtomTransformerConfig(n_block=1, n_head=2),
    pairformer=PairformerConfig(
        c_triangle=32, c_attention=16, n_head_pair=2, n_head_single=4, n_transition=2
    ),
    msa=MSAConfig(c_outer_product=8, c_average=8, n_head=4),
    template=TemplateConfig(c=16),
    diffusion=DiffusionConfig(n_block=4, n_head=4, c_fourier=64, n_steps=40),
    confidence=None,  # which judges roll-outs, and training has none
)

#: For one GPU: the supplement's modules, fewer blocks and narrower.
SMALL: Final = ModelConfig(
    c_s=256,
    c_z=64,
    c_m=64,
    c_token=384,
    c_atom=64,
    n_pairformer=12,
    n_msa=2,
    pairformer=PairformerConfig(c_triangle=64, c_attention=16, n_head_single=8),
    template=TemplateConfig(c=32),
    diffusion=DiffusionConfig(n_block=8, n_head=8, c_fourier=128, n_steps=100),
    activation_checkpointing=True,
)

#: The AF3 supplement's sizes.
AF3: Final = ModelConfig(activation_checkpointing=True)

MODEL_PRESETS: Final = {"tiny": TINY, "small": SMALL, "af3": AF3}


def model_preset(name: str) -> ModelConfig:
    """The preset called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in MODEL_PRESETS:
        raise ConfigError(f"no model preset {name!r}; there are {sorted(MODEL_PRESETS)}")
    return MODEL_PRESETS[name]
