"""What the confidence head says in numbers: pLDDT, PAE, PDE, pTM, ipTM, ranking score (AF3 SI 5.9).

Shapes: B samples, A atoms, N tokens. Lengths in Å. Everything is float32 at least.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch
from torch import Tensor

from megafold.trainer.losses.confidence import LAST_EDGE
from megafold.trainer.losses.term import masked_mean, without_autocast
from megafold.trainer.model.outputs import ConfidenceLogits
from megafold.trainer.ops.precision import wide
from megafold.trainer.ops.smooth_lddt import distances

#: Atoms of two chains that are nearer than this clash, Å; more than so many, or than such a share of the
#: smaller chain, make a clash of a structure (SI 5.9.2).
CLASH_DISTANCE: Final = 1.1
MOST_CLASHES: Final = 100
MOST_CLASHING: Final = 0.5

#: Cosine of 25°: three atoms nearer to a straight line are no frame (SI 4.3.2).
_STRAIGHT: Final = 0.9063077870366499
#: Rows of a matrix of distances that are in memory together.
_ROWS_AT_ONCE: Final = 1024


@dataclass(frozen=True, kw_only=True)
class LddtScores:
    """Expected lDDTs of one structure of each sample.

    Attributes:
        plddt: [B, A], of each atom, 0 to 1; 0 for padding.
        mean_plddt: [B], over the atoms.
    """

    plddt: Tensor
    mean_plddt: Tensor


@dataclass(frozen=True, kw_only=True)
class ConfidenceScores(LddtScores):
    """All scores of one structure of each sample.

    Attributes:
        pae: [B, N, N], expected error of token j's centre when i's frames are superposed, Å.
        pde: [B, N, N], expected error of the distance between representative atoms, Å.
        ptm: [B], expected TM score.
        iptm: [B], the same over pairs of tokens in different chains; NaN for a single chain.
        chain_pair_iptm: of each sample [C, C], see :func:`chain_pair_scores`.
        has_clash: bool [B], see :func:`has_clash`.
        ranking: [B], see :func:`ranking_score`.
    """

    pae: Tensor
    pde: Tensor
    ptm: Tensor
    iptm: Tensor
    chain_pair_iptm: tuple[Tensor, ...]
    has_clash: Tensor
    ranking: Tensor


@torch.no_grad()
def lddt_scores(batch: Mapping[str, Tensor], logits: ConfidenceLogits) -> LddtScores:
    """What :func:`confidence_scores` says of lDDT, of a head that has not learned PAE."""
    with without_autocast(logits.coords):
        atoms = batch["atom_mask"]
        plddt = torch.where(atoms, expected_value(logits.plddt, 1.0), 0.0)
        return LddtScores(plddt=plddt, mean_plddt=masked_mean(plddt, atoms, (-1,)))


@torch.no_grad()
def confidence_scores(batch: Mapping[str, Tensor], logits: ConfidenceLogits) -> ConfidenceScores:
    """All scores of the structures ``logits.coords`` [B, A, 3]; ``logits`` has all rows of PAE and PDE.

    Args:
        batch: features as in the sample schema, with a leading batch axis. Ground truth is not looked at.
        logits: what the head says of the structures.
    """
    lddt = lddt_scores(batch, logits)
    with without_autocast(logits.coords):
        tokens, chain = batch["token_mask"], batch["asym_id"]
        pair = tokens.unsqueeze(2) & tokens.unsqueeze(1)
        frames = predicted_frames(batch, logits.coords)
        near = expected_closeness(logits.pae, tokens.sum(dim=-1))
        ptm = tm_score(near, frames, pair)
        between = pair & (chain.unsqueeze(2) != chain.unsqueeze(1))
        iptm = tm_score(near, frames, between)
        iptm = torch.where(between.any(dim=(-1, -2)), iptm, torch.nan)
        clash = has_clash(batch, logits.coords)
        return ConfidenceScores(
            plddt=lddt.plddt,
            mean_plddt=lddt.mean_plddt,
            pae=torch.where(pair, expected_value(logits.pae, LAST_EDGE), 0.0),
            pde=torch.where(pair, expected_value(logits.pde, LAST_EDGE), 0.0),
            ptm=ptm,
            iptm=iptm,
            chain_pair_iptm=tuple(
                chain_pair_scores(*of_sample)
                for of_sample in zip(logits.pae, frames, chain, tokens, strict=True)
            ),
            has_clash=clash,
            ranking=ranking_score(ptm, iptm, clash),
        )


def bin_centers(n_bins: int, last_edge: float, like: Tensor) -> Tensor:
    """Centres [n_bins] of bins of equal width from 0 to ``last_edge``."""
    return (torch.arange(n_bins, device=like.device, dtype=like.dtype) + 0.5) * (last_edge / n_bins)


def expected_value(logits: Tensor, last_edge: float) -> Tensor:
    """Mean of the bins' centres over the distribution that logits [..., bins] give, [...]."""
    logits = wide(logits)
    centers = bin_centers(logits.shape[-1], last_edge, logits)
    return (logits.softmax(dim=-1) * centers).sum(dim=-1)


def expected_closeness(pae_logits: Tensor, n_token: Tensor) -> Tensor:
    """What each pair of tokens is expected to count in a TM score, [B, N, N] (SI 5.9.1).

    Args:
        pae_logits: [B, N, N, bins].
        n_token: [B], tokens of the structure, by which errors are scaled.
    """
    logits = wide(pae_logits)
    scale = 1.24 * (n_token.to(logits.dtype).clamp(min=19) - 15) ** (1 / 3) - 1.8
    centers = bin_centers(logits.shape[-1], LAST_EDGE, logits)
    weight = 1 / (1 + (centers / scale.unsqueeze(-1)).square())
    return (logits.softmax(dim=-1) * weight[:, None, None]).sum(dim=-1)


def tm_score(near: Tensor, frames: Tensor, pairs: Tensor) -> Tensor:
    """Expected TM score by the frame that gives the highest (SI 5.9.1, equations 17 and 18).

    Args:
        near: [B, N, N], see :func:`expected_closeness`.
        frames: tokens that have a frame to superpose by, bool [B, N].
        pairs: for each frame the tokens that count, bool [B, N, N].

    Returns:
        [B], between 0 and 1; 0 where no frame has a token that counts.
    """
    score = torch.where(pairs, near, 0.0).sum(dim=-1) / pairs.sum(dim=-1).clamp(min=1)
    return torch.where(frames, score, 0.0).amax(dim=-1)


def chain_pair_scores(pae_logits: Tensor, frames: Tensor, chain: Tensor, present: Tensor) -> Tensor:
    """TM scores of each two chains of a structure, and of each chain by itself (SI 5.9.3).

    Errors are scaled by the tokens of the one chain or the two, as in AF3's published code.

    Args:
        pae_logits: [N, N, bins].
        frames: tokens that have a frame, bool [N].
        chain: number of each token's chain, [N].
        present: tokens that are no padding, bool [N].

    Returns:
        [C, C], chains by rising numbers: the ipTM of the tokens of two chains, or a chain's pTM.
    """
    members = [(chain == number) & present for number in chain[present].unique()]
    best = wide(pae_logits).new_zeros(len(members), len(members))
    for (row, own), (column, other) in product(enumerate(members), repeat=2):
        n_token = (own | other).sum().unsqueeze(0)
        near = expected_closeness(pae_logits[own][:, other].unsqueeze(0), n_token)
        every = torch.ones_like(near, dtype=torch.bool)
        best[row, column] = tm_score(near, frames[own].unsqueeze(0), every).squeeze(0)
    return torch.maximum(best, best.T)


def predicted_frames(batch: Mapping[str, Tensor], coords: Tensor) -> Tensor:
    """Tokens that have a frame in a predicted structure [B, A, 3] (SI 4.3.2), bool [B, N].

    A whole residue always has. A token of one atom has one with the two atoms of its chain that are nearest
    to it, unless the three lie on a line.
    """
    single = batch["token_mask"] & (batch["token_atom_count"] == 1)
    found = batch["token_mask"] & ~single
    chain = torch.gather(batch["asym_id"], 1, batch["atom_to_token"].long())
    for sample, own in enumerate(single):
        tokens = own.nonzero().squeeze(-1)
        atoms = batch["atom_mask"][sample].nonzero().squeeze(-1)
        if not len(tokens) or len(atoms) < 3:
            continue
        x = wide(coords[sample, atoms])
        for some in tokens.split(_ROWS_AT_ONCE):
            atom = batch["token_atom_start"][sample, some].long()
            origin = wide(coords[sample, atom])
            distance = distances(origin, x)
            other = chain[sample, atoms] != chain[sample, atom].unsqueeze(-1)
            distance = distance.masked_fill(other | (atoms == atom.unsqueeze(-1)), torch.inf)
            near = distance.topk(2, largest=False)
            first, second = (x[near.indices] - origin.unsqueeze(1)).unbind(1)
            # NaN, and so no frame, where two of the atoms coincide.
            cosine = (first * second).sum(dim=-1) / (first.norm(dim=-1) * second.norm(dim=-1))
            found[sample, some] = near.values.isfinite().all(dim=-1) & (cosine.abs() < _STRAIGHT)
    return found


def has_clash(batch: Mapping[str, Tensor], coords: Tensor) -> Tensor:
    """Whether two polymer chains of a structure [B, A, 3] run through each other (SI 5.9.2), bool [B].

    They do if more than 100 of the one's atoms, or more than half of the smaller chain's, lie within 1.1 Å of
    the other's.
    """
    polymer = torch.gather(~batch["is_ligand"], 1, batch["atom_to_token"].long()) & batch["atom_mask"]
    chain = torch.gather(batch["asym_id"], 1, batch["atom_to_token"].long())
    found = torch.zeros(len(coords), dtype=torch.bool, device=coords.device)
    for sample, own in enumerate(polymer):
        x, (_, place) = wide(coords[sample, own]), chain[sample, own].unique(return_inverse=True)
        n_chain = int(place.max()) + 1 if len(place) else 0
        if n_chain < 2:
            continue
        member = torch.nn.functional.one_hot(place, n_chain).to(x.dtype)
        clashes = torch.zeros(n_chain, n_chain, dtype=x.dtype, device=x.device)
        for rows in torch.arange(len(x), device=x.device).split(_ROWS_AT_ONCE):
            near = (distances(x[rows], x) < CLASH_DISTANCE).to(x.dtype)
            clashes += member[rows].T @ ((near @ member) > 0).to(x.dtype)
        size = member.sum(dim=0)
        smaller = torch.minimum(size.unsqueeze(0), size.unsqueeze(1))
        clashing = (clashes > MOST_CLASHES) | (clashes > MOST_CLASHING * smaller)
        clashing.fill_diagonal_(False)
        found[sample] = clashing.any()
    return found


def ranking_score(ptm: Tensor, iptm: Tensor, clash: Tensor, disordered: Tensor | float = 0.0) -> Tensor:
    """0.8·ipTM + 0.2·pTM + 0.5·disorder - 100·clash (SI 5.9.3), pTM in the place of ipTM where that is NaN.

    ``disordered``: share of residues without order, which AF3 counts so as not to prefer structures that fold
    them up; 0 where it is not known.
    """
    quality = torch.where(iptm.isnan(), ptm, 0.8 * iptm + 0.2 * ptm)
    return quality + 0.5 * disordered - 100.0 * clash.to(ptm.dtype)
