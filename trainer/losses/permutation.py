"""The ground truth that is nearest to a prediction, of those that are as true (AF3 SI 4.2).

Equal chains may take each other's places, and so may a residue's equivalent atoms. Chains are assigned as in
AlphaFold-Multimer (SI 7.3): the truth is superposed by an anchor, then each chain goes to the nearest copy
that is left. Atoms then take the best of their residue's equivalent orders.

Shapes: A atoms; a chain has k of them and m candidates. Positions in Å.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from megafold.trainer.losses.alignment import RigidMotion, rigid_fit, weighted_rigid_align
from megafold.trainer.losses.diffusion import atom_weights, resolved_atoms

#: Most superpositions that are tried for one sample.
_MOST_ANCHORS: Final = 32
#: Fewest points that an anchor must have: fewer determine no rotation.
_FEWEST_POINTS: Final = 3


@dataclass(frozen=True, kw_only=True)
class ExchangeableChain:
    """A chain of the crop, or chains that are bonded to each other, and what could be in its place.

    ``atoms`` [k] indices into the sample's atoms; ``candidates`` [m] the chains that each takes, named the
    same everywhere; ``own`` which of them is the chain itself; ``coords`` [m, k, 3]; ``mask`` [m, k]
    resolved.
    """

    atoms: Tensor
    candidates: tuple[frozenset[int], ...]
    own: int
    coords: Tensor
    mask: Tensor

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor]) -> "ExchangeableChain":
        """From a loader's arrays."""
        return cls(
            atoms=arrays["atoms"],
            candidates=tuple(map(frozenset, arrays["candidates"].tolist())),
            own=int(arrays["own"]),
            coords=arrays["coords"].double(),
            mask=arrays["coords_mask"],
        )


def nearest_truth(
    predicted: Tensor, coords: Tensor, mask: Tensor, weights: Tensor, exchanges: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The ground truth of one sample with chains and atoms exchanged so as to be near the prediction.

    All of it on the CPU.

    Args:
        predicted: [A, 3] anywhere in space.
        coords: ground truth as it is, [A, 3].
        mask: which of it is resolved, [A].
        weights: of the atoms in superpositions and errors, [A].
        exchanges: ``orders``: tensors [G, n, k] of n equivalent orders of k atoms of G residues, [:, 0] as
            they are; ``chains``: of each chain that may be exchanged ``atoms``, ``candidates`` [m, c],
            ``own``, ``coords`` and ``coords_mask``, as in :class:`ExchangeableChain`.

    Returns:
        coords [A, 3] and mask [A]; never further from the prediction than those given.
    """
    x, truth, w = predicted.detach().double(), coords.double(), weights.double()
    chains = [ExchangeableChain.of(arrays) for arrays in exchanges["chains"]]
    truth, present = _exchange_chains(x, truth, mask, w, chains)
    truth, present = _exchange_atoms(x, truth, present, w, exchanges["orders"])
    return truth.to(coords), present


def with_nearest_truth(
    batch: Mapping[str, Tensor], predicted: Tensor, exchanges: Sequence[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """A batch whose ``coords`` and ``coords_mask`` are :func:`nearest_truth` to ``predicted`` [B, A, 3].

    Padding stays as it is. ``exchanges``: of each sample. A sample whose prediction is not finite stays, too.
    """
    if not any(own["chains"] or own["orders"] for own in exchanges):
        return dict(batch)
    given = (predicted, batch["coords"], batch["coords_mask"], resolved_atoms(batch), atom_weights(batch))
    # The host waits for a GPU here, once for all samples.
    x, coords, mask, resolved, weights = (tensor.to("cpu", copy=True) for tensor in given)
    for index, own in enumerate(exchanges):
        if not (own["chains"] or own["orders"]) or not x[index][resolved[index]].isfinite().all():
            continue
        coords[index], mask[index] = nearest_truth(
            torch.nan_to_num(x[index]), coords[index], resolved[index], weights[index], own
        )
    return {**batch, "coords": coords.to(predicted.device), "coords_mask": mask.to(predicted.device)}


# ----------------------------------------------------------------------------------------------------------
# Chains


def _exchange_chains(
    x: Tensor, truth: Tensor, mask: Tensor, weights: Tensor, chains: Sequence[ExchangeableChain]
) -> tuple[Tensor, Tensor]:
    """The assignment of least error of those that an anchor gives, or the truth as it is."""
    if not chains:
        return truth, mask
    own = tuple(chain.own for chain in chains)
    tried = dict.fromkeys([own])  # in order
    pairs = _Pairs(x, chains)
    for motion in islice(_anchors(x, truth, mask, chains), _MOST_ANCHORS):
        if (places := pairs.nearest(motion)) is not None:
            tried[places] = None
    truths = torch.stack([truth] * len(tried))
    masks = torch.stack([mask] * len(tried))
    for number, places in enumerate(tried):
        for chain, place in zip(chains, places, strict=True):
            truths[number, chain.atoms] = chain.coords[place]
            masks[number, chain.atoms] = chain.mask[place]
    errors = _errors(x, truths, masks, weights)
    best = int(errors.argmin())
    if errors[0] <= errors[best] * (1 + 1e-6):  # but for rounding equal: nothing is exchanged
        best = 0
    return truths[best], masks[best]


def _anchors(
    x: Tensor, truth: Tensor, mask: Tensor, chains: Sequence[ExchangeableChain]
) -> Iterator[RigidMotion]:
    """Superpositions of the truth on the prediction by a part of it, the least ambiguous parts first.

    The first part is what cannot be exchanged. Then, in each of its candidates' places, for each set of
    copies the longest chain of the crop; then the other chains.
    """
    fixed = mask.clone()
    for chain in chains:
        fixed[chain.atoms] = False
    if fixed.sum() >= _FEWEST_POINTS:
        yield rigid_fit(truth, x, fixed.double())
    ordered = sorted(chains, key=lambda chain: (len(chain.candidates), -len(chain.atoms)))
    seen: Counter[tuple[frozenset[int], ...]] = Counter()
    turns = []
    for chain in ordered:
        turns.append(seen[chain.candidates])
        seen[chain.candidates] += 1
    for _, chain in sorted(zip(turns, ordered, strict=True), key=lambda pair: pair[0]):
        for coords, present in zip(chain.coords, chain.mask, strict=True):
            if present.sum() >= _FEWEST_POINTS:
                yield rigid_fit(coords, x[chain.atoms], present.double())


class _Pairs:
    """Every chain with every candidate of its, by the centres of the atoms that are resolved in it."""

    def __init__(self, x: Tensor, chains: Sequence[ExchangeableChain]) -> None:
        self._n_chain = len(chains)
        self._names = [
            (number, place, candidate)
            for number, chain in enumerate(chains)
            for place, candidate in enumerate(chain.candidates)
        ]
        weights = [chain.mask.double() / chain.mask.sum(dim=1, keepdim=True).clamp(min=1) for chain in chains]
        each = list(zip(weights, chains, strict=True))
        self._there = torch.cat([torch.einsum("mk,mkc->mc", weight, chain.coords) for weight, chain in each])
        self._here = torch.cat([weight @ x[chain.atoms] for weight, chain in each])
        self._is_empty = torch.cat([~chain.mask.any(dim=1) for chain in chains])

    def nearest(self, motion: RigidMotion) -> tuple[int, ...] | None:
        """For each chain its candidate: of all free pairs the nearest again and again.

        None where a chain is left without: candidates of several chains may overlap in a part of them.
        """
        apart = (motion(self._there) - self._here).norm(dim=-1).masked_fill(self._is_empty, torch.inf)
        chosen: dict[int, int] = {}
        taken: set[int] = set()
        for pair in apart.argsort(stable=True).tolist():
            number, place, candidate = self._names[pair]
            if number not in chosen and taken.isdisjoint(candidate):
                chosen[number] = place
                taken |= candidate
        if len(chosen) < self._n_chain:
            return None
        return tuple(chosen[number] for number in range(self._n_chain))


def _errors(x: Tensor, truths: Tensor, masks: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean squared errors [T] of truths [T, A, 3] superposed on the prediction."""
    w = weights * masks
    aligned = weighted_rigid_align(truths, x.expand_as(truths), w)
    return (w * (aligned - x).square().sum(dim=-1)).sum(dim=-1) / w.sum(dim=-1).clamp(min=1e-9)


# ----------------------------------------------------------------------------------------------------------
# Atoms


def _exchange_atoms(
    x: Tensor, truth: Tensor, mask: Tensor, weights: Tensor, orders: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Each residue's order of least error, all of them after one superposition."""
    aligned = weighted_rigid_align(truth, x, weights * mask)
    coords, present = truth.clone(), mask.clone()
    for group in orders:
        apart = (x[group[:, :1]] - aligned[group]).square().sum(dim=-1)
        # The same atoms in every order, so the sums are of equally many.
        errors = torch.where(mask[group], apart, 0.0).sum(dim=-1)
        best = group[torch.arange(len(group)), errors.argmin(dim=-1)]
        coords[group[:, 0]] = truth[best]
        present[group[:, 0]] = mask[best]
    return coords, present
