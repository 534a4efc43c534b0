"""What the network hands to the losses.

Shapes: B batch, S noised copies (training) or samples, N tokens, A atoms.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TrunkOutputs:
    """The trunk's representations after the last cycle.

    Attributes:
        s_inputs: [B, N, c_s_inputs], algorithm 2.
        s_trunk: [B, N, c_s].
        z_trunk: [B, N, N, c_z].
        distogram_logits: [B, N, N, n_distogram_bins], symmetric; bins between 2 and 22 Å (SI 4.4).
    """

    s_inputs: Tensor
    s_trunk: Tensor
    z_trunk: Tensor
    distogram_logits: Tensor


@dataclass(frozen=True, kw_only=True)
class ConfidenceLogits:
    """What the confidence head says of a structure (algorithm 31).

    Ranks that share a sample have their rows of the pair-shaped ones, and all of the others.

    Attributes:
        plddt: [B, A, n_plddt_bins], of each atom; bins of [0, 1].
        resolved: [B, A, 2]: not resolved, resolved.
        pae: [B, N, N, n_pae_bins], error of token j seen from the frame of token i; bins of 0.5 Å from 0.
        pde: [B, N, N, n_pde_bins], error of a distance; bins of 0.5 Å from 0; symmetric.
        coords: [B, A, 3], the structure that is judged, detached.
    """

    plddt: Tensor
    resolved: Tensor
    pae: Tensor
    pde: Tensor
    coords: Tensor


@dataclass(frozen=True, kw_only=True)
class NoisedCopies:
    """What the diffusion module is trained on; see :class:`ModelOutputs`."""

    target: Tensor
    noised: Tensor
    sigma: Tensor


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """A training forward pass. All coordinates in Å and float32; padding atoms are 0.

    Attributes:
        trunk: the trunk's representations.
        denoised: [B, S, A, 3], the network's estimate of ``target`` from ``noised``.
        noised: [B, S, A, 3], ``target`` plus normal noise of standard deviation ``sigma``.
        sigma: [B, S], noise levels (SI 3.7.1).
        target: [B, S, A, 3], ``coords`` centred, rotated and translated anew for each copy
            (algorithm 19); unresolved atoms lie at the centre.
        confidence: of the mini roll-out's structure; None where it is not judged.
    """

    trunk: TrunkOutputs
    denoised: Tensor
    noised: Tensor
    sigma: Tensor
    target: Tensor
    confidence: ConfidenceLogits | None = None
