"""The diffusion module (algorithms 20 to 22).

Shapes: S noised copies of each sample; N tokens, A atoms. Positions in Å.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from megafold.trainer.model.atom_attention import (
    AtomAttentionDecoder,
    AtomAttentionEncoder,
    AtomConditioning,
)
from megafold.trainer.model.config import ModelConfig
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.model.primitives import LayerNorm, NormLinear, Transition
from megafold.trainer.model.relative_position import RelativePositionEncoding
from megafold.trainer.model.transformer import DiffusionTransformer, DiffusionTransformerBlock
from megafold.trainer.ops.precision import full_precision, wide

#: Bytes that the biases of tokens may take: those of AF3's 24 blocks for 2 365 tokens in bfloat16. A step of
#: more takes so long that computing them anew does not tell.
_MOST_BIASES: Final = 4 * 2**30
#: Noise levels whose conditioning is computed at once: a mini roll-out's.
_MOST_LEVELS: Final = 20


class FourierEmbedding(nn.Module):
    """Algorithm 22: cos(2π(t·w + b)), w and b normal, drawn once and never trained."""

    w: Tensor
    b: Tensor

    def __init__(self, c: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        device = torch.empty(0).device  # the default one, on which the generator may not work
        for name in ("w", "b"):
            values = torch.randn(c, generator=generator, device="cpu")
            self.register_buffer(name, values.to(device))

    def forward(self, t: Tensor) -> Tensor:
        """[...] → [..., C]."""
        return torch.cos(2 * math.pi * (t.unsqueeze(-1) * self.w + self.b))


class DiffusionConditioning(nn.Module):
    """Algorithm 21, split into what all noise levels share and what one adds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c_s, c_z, n = config.c_s, config.c_z, config.diffusion.n_transition
        self.sigma_data = config.sigma_data
        self.relative_position = RelativePositionEncoding(c_z, config.r_max, config.s_max)
        self.pair = NormLinear(2 * c_z, c_z, offset=False)
        self.pair_transitions = nn.ModuleList(Transition(c_z, n) for _ in range(2))
        self.single = NormLinear(c_s + config.c_s_inputs, c_s, offset=False)
        self.fourier = FourierEmbedding(config.diffusion.c_fourier)
        self.noise = NormLinear(config.diffusion.c_fourier, c_s, offset=False)
        self.single_transitions = nn.ModuleList(Transition(c_s, n) for _ in range(2))

    def shared(self, batch: dict[str, Tensor], trunk: TrunkOutputs) -> tuple[Tensor, Tensor]:
        """s before the noise level is added [B, N, C_s], and z [B, N, N, C_z] (lines 1 to 6)."""
        s = self.single(torch.cat([trunk.s_trunk, trunk.s_inputs], dim=-1))
        return s, self.shared_pair(batch, trunk.z_trunk)

    def shared_pair(self, batch: dict[str, Tensor], z_trunk: Tensor, rows: slice = slice(None)) -> Tensor:
        """z [B, N, N, C_z]; of ``rows``, if given, and then so is ``z_trunk``."""
        relative_position = self.relative_position(batch, rows).to(z_trunk.dtype)
        z: Tensor = self.pair(torch.cat([z_trunk, relative_position], dim=-1))
        for transition in self.pair_transitions:
            z = transition(z, residual=True)
        return z

    def at_noise_level(self, s: Tensor, sigma: Tensor) -> Tensor:
        """s [B, S, N, C_s] at the noise levels ``sigma`` [B, S] (lines 8 to 12)."""
        with full_precision(sigma):
            embedding = self.fourier(torch.log(sigma / self.sigma_data) / 4)
        s = s[:, None] + self.noise(embedding)[:, :, None]
        for transition in self.single_transitions:
            s = transition(s, residual=True)
        return s


@dataclass(frozen=True)
class PairBiases:
    """Of each block, of tokens [B, N, N, H] or atoms [B, W, Q, K, H]; None: it computes its own."""

    encoder: Sequence[Tensor] | None = None
    transformer: Sequence[Tensor] | None = None
    decoder: Sequence[Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class DiffusionContext:
    """What every denoising step of a sample shares: computed once for all copies and steps.

    Attributes:
        s: [B, N, C_s].
        z: [B, N, N, C_z].
        atoms: conditioning of the atoms.
        token_mask: [B, N] boolean.
        biases: of z and of pairs of atoms, where they are known.
    """

    s: Tensor
    z: Tensor
    atoms: AtomConditioning
    token_mask: Tensor
    biases: PairBiases = PairBiases()


class DiffusionModule(nn.Module):
    """Algorithm 20, with EDM's preconditioning."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, diffusion = config.c_token, config.diffusion
        self.sigma_data = config.sigma_data
        self.n_bias = diffusion.n_block * diffusion.n_head
        self.conditioning = DiffusionConditioning(config)
        self.encoder = AtomAttentionEncoder(config, c, with_positions=True)
        self.single = NormLinear(config.c_s, c, init="final", offset=False)
        blocks = [
            DiffusionTransformerBlock(c, config.c_s, config.c_z, diffusion.n_head, diffusion.n_transition)
            for _ in range(diffusion.n_block)
        ]
        self.transformer = DiffusionTransformer(blocks, recompute=config.activation_checkpointing)
        self.norm = LayerNorm(c, offset=False)
        self.decoder = AtomAttentionDecoder(config)

    def prepare(self, batch: dict[str, Tensor], trunk: TrunkOutputs) -> DiffusionContext:
        """What does not depend on positions or noise levels."""
        s, z = self.conditioning.shared(batch, trunk)
        atoms = self.encoder.conditioner(batch, trunk.s_trunk, z)
        return DiffusionContext(s=s, z=z, atoms=atoms, token_mask=batch["token_mask"])

    def for_many_steps(self, context: DiffusionContext) -> DiffusionContext:
        """The context with every block's biases, unless they are large: they depend on no noise either."""
        z, p = context.z, context.atoms.p
        if self.n_bias * z[..., 0].numel() * z.element_size() > _MOST_BIASES:
            return context
        biases = PairBiases(
            encoder=self.encoder.transformer.biases(p),
            transformer=self.transformer.biases(z),
            decoder=self.decoder.transformer.biases(p),
        )
        return replace(context, biases=biases)

    def at_noise_levels(self, context: DiffusionContext, sigmas: Sequence[float]) -> Iterator[Tensor]:
        """s [B, 1, N, C_s] at one noise level after the other, in Å; computed for many at once."""
        s, each = context.s, _MOST_LEVELS
        dtype = torch.promote_types(s.dtype, torch.float32)
        for start in range(0, len(sigmas), each):
            # Filled one by one: a copy from the host would be waited for.
            some = [s.new_full((len(s),), sigma, dtype=dtype) for sigma in sigmas[start : start + each]]
            yield from self.conditioning.at_noise_level(s, torch.stack(some, dim=1)).split(1, dim=1)

    def forward(
        self, x_noisy: Tensor, sigma: Tensor, context: DiffusionContext, s: Tensor | None = None
    ) -> Tensor:
        """Denoised positions [B, S, A, 3]; padding atoms are 0.

        Args:
            x_noisy: [B, S, A, 3].
            sigma: [B, S], noise levels in Å.
            context: what :meth:`prepare` gave.
            s: single conditioning at these levels, if it is known; [B, 1, N, C_s] where copies share one.
        """
        variance = (sigma**2 + self.sigma_data**2)[:, :, None, None]
        level = sigma[:, :, None, None]
        if s is None:
            s = self.conditioning.at_noise_level(context.s, sigma)
        biases = context.biases
        a, q = self.encoder(context.atoms, x_noisy / variance.sqrt(), biases.encoder)
        # The residual stream of the transformer stays in float32, as in AF3.
        a = wide(a) + self.single(s)
        a = self.transformer(a, s, context.z, context.token_mask, None, biases.transformer)
        update = self.decoder(self.norm(a), q, context.atoms, biases.decoder)
        x = self.sigma_data**2 / variance * x_noisy
        x = x + self.sigma_data * level / variance.sqrt() * update
        return x * context.atoms.mask[:, None, :, None]
