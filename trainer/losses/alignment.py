"""Weighted rigid alignment (AF3 SI algorithm 28)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RigidMotion:
    """x ↦ ``rotation`` · (x - ``source``) + ``target``: [..., 3, 3], [..., 1, 3], [..., 1, 3], float64."""

    rotation: Tensor
    source: Tensor
    target: Tensor

    def __call__(self, points: Tensor) -> Tensor:
        """Move points [..., N, 3]."""
        moved: Tensor = (points - self.source) @ self.rotation.transpose(-1, -2) + self.target
        return moved


@torch.no_grad()
def rigid_fit(moving: Tensor, fixed: Tensor, weights: Tensor) -> RigidMotion:
    """The proper rotation and translation of least weighted squares that put ``moving`` on ``fixed``.

    Found in float64. Where the rotation is not determined (fewer than three points, points on a line) one of
    the best is taken.

    Args:
        moving: positions to move, [..., N, 3]. Finite wherever the weight is not 0.
        fixed: positions to superpose on, [..., N, 3]. Finite wherever the weight is not 0.
        weights: weights ≥ 0, broadcastable to [..., N]; 0 leaves a point out of the fit.
    """
    shape = torch.broadcast_shapes(moving.shape, fixed.shape)
    w = weights.double().expand(shape[:-1]).unsqueeze(-1)
    present = w > 0
    x = torch.where(present, moving.double().expand(shape), 0.0)
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
    return RigidMotion((u * flip.unsqueeze(-2)) @ vh, x_center, y_center)


@torch.no_grad()
def weighted_rigid_align(moving: Tensor, fixed: Tensor, weights: Tensor) -> Tensor:
    """Superpose ``moving`` on ``fixed`` by the proper rotation and translation of least weighted squares.

    No gradient flows through it, so the result is a constant target. Without any weight the points come back
    unchanged.

    Args:
        moving: positions to move, [..., N, 3], Å; see :func:`rigid_fit`.
        fixed: positions to superpose on, [..., N, 3], Å.
        weights: weights ≥ 0, broadcastable to [..., N]; 0 leaves a point out of the fit.

    Returns:
        All of ``moving``, moved, [..., N, 3], in its dtype.
    """
    shape = torch.broadcast_shapes(moving.shape, fixed.shape)
    source = moving.double().expand(shape)
    aligned = rigid_fit(moving, fixed, weights)(source)
    is_fitted = (weights > 0).expand(shape[:-1]).any(dim=-1)[..., None, None]
    return torch.where(is_fitted, aligned, source).to(moving.dtype)
