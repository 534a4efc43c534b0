"""The panels about coordinates: distances between tokens, and the crop seen from two sides."""

from collections.abc import Mapping
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megafold.pipeline.drawing.chains import ChainStyle, Features, bonded_tokens, draw_boundaries

_DISTANCE_STEPS: Final = (0, 4, 6, 8, 10, 12, 16, 20)
#: How far colours at the very back go to white.
_FOG: Final = 0.72


def draw_contacts(axes: Axes, features: Features) -> None:
    """Distances between representative atoms, Å."""
    points = token_positions(features, "rep_atom")
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    colours = colormaps["viridis_r"].with_extremes(bad="0.8", over="#f7f7f7")
    image = axes.imshow(
        np.ma.masked_invalid(distances),
        cmap=colours,
        norm=BoundaryNorm(_DISTANCE_STEPS, colours.N),
        interpolation="nearest",
    )
    draw_boundaries(axes, features, both=True)
    axes.set_title("contacts: distance of representative atoms (grey: unresolved)", fontsize=10, loc="left")
    axes.set(xlabel="token of the crop", ylabel="token of the crop")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = axes.figure.colorbar(image, ax=axes, extend="max", shrink=0.85, ticks=_DISTANCE_STEPS)
    bar.set_label("distance / Å")


def principal_frame(features: Features) -> NDArray[np.float64]:
    """Coordinates [N_atom, 3] along the principal axes of the resolved atoms, largest extent first, Å.

    NaN where unresolved. The frame is right-handed, so that no picture shows a mirror image.
    """
    mask = np.asarray(features["coords_mask"], bool)
    coords = np.where(mask[:, None], np.asarray(features["coords"], float), np.nan)
    if not mask.any():
        return coords
    centred = coords - coords[mask].mean(axis=0)
    axes = np.linalg.svd(centred[mask], full_matrices=True)[2]
    axes[2] *= np.sign(np.linalg.det(axes))
    return np.asarray(centred @ axes.T)


def draw_views(
    front: Axes, side: Axes, features: Features, styles: Mapping[int, ChainStyle], center: int | None = None
) -> None:
    """The crop in parallel projection, from the front and turned by 90° about the vertical axis.

    Lines are the traces of polymers and the bonds of ligands; what is further away is paler. ``center`` is
    the token of the crop that a spatial crop is around.
    """
    frame = principal_frame(features)
    x, y, z = frame.T
    draw_view(front, features, styles, np.stack([x, y, z], axis=1), center)
    draw_view(side, features, styles, np.stack([z, y, -x], axis=1), center)
    # One scale for both, so that the pictures are of the same size.
    reach = 1.05 * np.nanmax(np.abs(frame), initial=1.0)
    for view in (front, side):
        view.set(xlim=(-reach, reach), ylim=(-reach, reach))
    front.set(xlabel="x / Å", ylabel="y / Å")
    side.set(xlabel="z / Å")
    front.set_title(
        "coordinates, from the front" + ("" if center is None else "  (★: centre)"), fontsize=10, loc="left"
    )
    side.set_title("turned by 90°", fontsize=10, loc="left")


def draw_view(
    axes: Axes,
    features: Features,
    styles: Mapping[int, ChainStyle],
    points: NDArray[np.float64],
    center: int | None,
) -> None:
    """Atoms at ``points`` [N_atom, 3]: right, up, and towards the reader, Å, NaN where unresolved."""
    axes.set_aspect("equal")
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    mask = np.asarray(np.isfinite(points).all(axis=1))
    if not mask.any():
        axes.text(0.5, 0.5, "no resolved atoms", ha="center", va="center", transform=axes.transAxes)
        return
    tokens = np.asarray(features["atom_to_token"])
    colours = np.array([styles[int(asym)].colour for asym in features["asym_id"]])[tokens]
    depth = points[:, 2]
    nearest, furthest = np.nanmax(depth), np.nanmin(depth)
    fog = _FOG * (nearest - depth) / max(nearest - furthest, 1e-6)
    shaded = colours + (1 - colours) * fog[:, None]
    is_ligand = np.asarray(features["is_ligand"], bool)[tokens]
    for own, size, edge in ((mask & ~is_ligand, 3.0, 0.0), (mask & is_ligand, 15.0, 0.4)):
        order = np.flatnonzero(own)[np.argsort(depth[own], kind="stable")]
        axes.scatter(
            points[order, 0],
            points[order, 1],
            s=size,
            c=shaded[order],
            linewidths=edge,
            edgecolors="black",
            zorder=1 + edge,
        )
    pairs = np.concatenate([trace_atoms(features, mask), bond_atoms(features, mask)])
    pairs = pairs[np.argsort(depth[pairs].mean(axis=1), kind="stable")]
    axes.add_collection(_lines(points[pairs][..., :2], shaded[pairs[:, 0]]))
    if center is not None and mask[features["center_atom"][center]]:
        place = points[features["center_atom"][center]]
        axes.plot(place[0], place[1], "*", color="black", markersize=11, markeredgecolor="white", zorder=3)


def _lines(ends: NDArray[np.float64], colours: NDArray[np.float64]) -> LineCollection:
    """Lines between ``ends`` [N, 2, 2], in the order given, that cut those behind them.

    Each has a white rim, which leaves its ends free: there it would cut the line that goes on.
    """
    middle = ends.mean(axis=1, keepdims=True)
    rims = middle + 0.55 * (ends - middle)
    both = np.stack([rims, ends], axis=1).reshape(-1, 2, 2)
    return LineCollection(
        list(both),
        colors=np.stack([np.ones_like(colours), colours], axis=1).reshape(-1, 3),
        linewidths=np.tile([4.2, 2.0], len(ends)),
        capstyle="round",
        zorder=1.2,
    )


def trace_atoms(features: Features, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[N, 2] centre atoms of neighbouring residues of a polymer, both resolved by ``mask`` [N_atom]."""
    asym, number = np.asarray(features["asym_id"]), np.asarray(features["residue_index"])
    centre = np.asarray(features["center_atom"])
    polymer = ~np.asarray(features["is_ligand"], bool) & mask[centre]
    linked = (asym[1:] == asym[:-1]) & (number[1:] == number[:-1] + 1) & polymer[1:] & polymer[:-1]
    first = np.flatnonzero(linked)
    return np.stack([centre[first], centre[first + 1]], axis=1).astype(np.int64)


def bond_atoms(features: Features, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[N, 2] centre atoms of bonded tokens, both resolved by ``mask`` [N_atom]."""
    pairs = np.asarray(features["center_atom"])[bonded_tokens(features)].astype(np.int64)
    return pairs[mask[pairs].all(axis=1)]


def token_positions(features: Features, which: str) -> NDArray[np.float64]:
    """Coordinates [N_token, 3] of each token's atom named by ``which``, Å, NaN where unresolved."""
    atoms = np.asarray(features[which])
    coords = np.where(np.asarray(features["coords_mask"], bool)[:, None], features["coords"], np.nan)
    return np.asarray(coords[atoms], float)
