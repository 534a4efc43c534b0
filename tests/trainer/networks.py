"""Very small networks for tests, with no parameter left at zero."""

from dataclasses import replace

import torch

from megafold.trainer.model.config import (
    AtomTransformerConfig,
    ConfidenceConfig,
    DiffusionConfig,
    ModelConfig,
    MSAConfig,
    PairformerConfig,
    TemplateConfig,
)
from megafold.trainer.model.model import AlphaFold3

MINI = ModelConfig(
    c_s=16,
    c_z=8,
    c_m=8,
    c_token=24,
    c_atom=8,
    c_atompair=4,
    n_pairformer=2,
    n_msa=2,
    n_template=1,
    atom=AtomTransformerConfig(n_block=1, n_head=2, n_queries=8, n_keys=16),
    pairformer=PairformerConfig(
        c_triangle=8, c_attention=4, n_head_pair=2, n_head_single=4, n_transition=2, dropout=0.25
    ),
    msa=MSAConfig(c_outer_product=4, c_average=4, n_head=2),
    template=TemplateConfig(c=8),
    diffusion=DiffusionConfig(n_block=2, n_head=4, c_fourier=16),
    confidence=None,
)
#: The same with a confidence head.
MINI_JUDGING = replace(
    MINI,
    confidence=ConfidenceConfig(n_block=1, n_atom=5, n_plddt_bins=6, n_pae_bins=5, n_pde_bins=7),
)


def fill_parameters(module: torch.nn.Module, seed: int = 0) -> None:
    """Normal numbers everywhere, also where the network starts at zero: no branch is silent."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("norm.weight") or (parameter.ndim == 1 and "norm" in name and "weight" in name):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.7 / parameter.shape[-1] ** 0.5))


def mini_model(
    seed: int = 0, *, dtype: torch.dtype = torch.float64, config: ModelConfig = MINI
) -> AlphaFold3:
    """An evaluating model with random parameters."""
    model = AlphaFold3(config)
    fill_parameters(model, seed)
    return model.to(dtype).eval()


def as_dtype(batch: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The batch with its floating-point features in ``dtype``."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
