"""Weighted rigid alignment (AF3 SI algorithm 28)."""

import torch
from torch import Tensor


@torch.no_grad()
def weighted_rigid_align(moving: Tensor, fixed: Tensor, weights: Tensor) -> Tensor:
    """Superpose ``moving`` on ``fixed`` by the proper rotation and translation of least weighted squares.

    The decomposition runs in float64 and no gradient flows through it, so the result is a constant target.
    Without any weight the points come back unchanged; where the rotation is not determined (fewer than
    three points, points on a line) one of the best is taken.

    Args:
        moving: positions to move, [..., N, 3], Å. Finite wherever the weight is not 0.
        fixed: positions to superpose on, [..., N, 3], Å. Finite wherever the weight is not 0.
        weights: weights ≥ 0, broadcastable to [..., N]; 0 leaves a point out of the fit.

    Returns:
        All of ``moving``, moved, [..., N, 3], in its dtype.
    """
    shape = torch.broadcast_shapes(moving.shape, fixed.shape)
    w = weights.double().expand(shape[:-1]).unsqueeze(-1)
    present = w > 0
    source = moving.double().expand(shape)
    x = torch.where(present, source, 0.0)
    y = torch.where(present, fixed.double().expand(shape), 0.0)
    total = w.sum(dim=-2, keepdim=True)
    weighted = w / torch.where(total > 0, total, 1.0)
    x_center = (weighted * x).sum(dim=-2, keepdim=True)
    y_center = (weighted * y).sum(dim=-2, keepdim=True)
    covariance = (weighted * (y - y_center)).transpose(-1, -2) @ (x - x_center)
    # One point off by an infinity would make the decomposition raise. It poisons the loss anyway, and the
    # loop skips such a step, so the rotation is of no consequence.
    u, _, vh = torch.linalg.svd(torch.nan_to_num(covariance, posinf=0.0, neginf=0.0))
    # det(U Vᵀ) is ±1. Where it is -1 the best orthogonal map is a reflection: the axis of the least
    # singular value is turned round.
    flip = torch.ones_like(u[..., 0, :])
    flip[..., 2] = torch.sign(torch.linalg.det(u @ vh))
    rotation = (u * flip.unsqueeze(-2)) @ vh
    aligned = (source - x_center) @ rotation.transpose(-1, -2) + y_center
    return torch.where(total > 0, aligned, source).to(moving.dtype)
