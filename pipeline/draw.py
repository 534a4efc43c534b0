"""Pictures of what a sample holds.

Figures are made with matplotlib's object interface and its Agg canvas, so that nothing depends on a display
or on global state.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megafold.pipeline.schema import GAP, N_RESTYPE, RESTYPES

Features = Mapping[str, NDArray[Any]]

#: Classes of ``restype`` that are drawn alike: name, colour, codes.
_CLASSES: Final = (
    ("aliphatic", "#4c78a8", "ALA ILE LEU MET VAL CYS"),
    ("aromatic", "#7b5ea7", "PHE TRP TYR HIS"),
    ("polar", "#59a14f", "ASN GLN SER THR"),
    ("positive", "#d1495b", "ARG LYS"),
    ("negative", "#e8871e", "ASP GLU"),
    ("Gly, Pro", "#b8a13b", "GLY PRO"),
    ("A", "#2a9d8f", "A DA"),
    ("G", "#264653", "G DG"),
    ("C", "#8ab17d", "C DC"),
    ("U, T", "#e76f51", "U DT"),
    ("unknown, atom", "#9a9a9a", "UNK N DN"),
    ("gap", "#ffffff", "-"),
)
_KINDS: Final = (
    ("protein", "is_protein", "#4c78a8"),
    ("RNA", "is_rna", "#e76f51"),
    ("DNA", "is_dna", "#2a9d8f"),
    ("ligand", "is_ligand", "#8d8d8d"),
)
_DISTANCE_STEPS: Final = (0, 4, 6, 8, 10, 12, 16, 20)
_MOST_ROWS: Final = 400


def draw_sample(features: Features, meta: Mapping[str, Any], path: Path) -> None:
    """Draw a crop as PNG: its alignment, templates, chains and coordinates.

    Args:
        features: an unpadded sample, named as in ``schema.SAMPLE``.
        meta: where the sample comes from; ``entry`` and the crop's description go to the title.
        path: the file to write.
    """
    figure = Figure(figsize=(15, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(features, meta), fontsize=13)
    left, right = figure.subfigures(1, 2, width_ratios=[1.15, 1], squeeze=False)[0]
    heights = [0.22, 0.22, 2.6, 0.8, _template_height(features)]
    kinds, chains, msa, coverage, templates = left.subplots(
        5, 1, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    _draw_kinds(kinds, features)
    _draw_chains(chains, features)
    _draw_msa(msa, features)
    _draw_coverage(coverage, features)
    _draw_templates(templates, features)
    contacts, projection = right.subplots(2, 1, gridspec_kw={"height_ratios": [1.15, 1]})
    _draw_contacts(contacts, features)
    _draw_projection(projection, features)
    figure.savefig(path, format="png", dpi=110)


def _title(features: Features, meta: Mapping[str, Any]) -> str:
    tokens, atoms = len(features["restype"]), len(features["ref_element"])
    resolved = int(features["coords_mask"].sum())
    parts = [f"{meta.get('entry', 'sample')}"]
    if meta.get("crop_method") is not None:
        centre = "" if meta.get("crop_center") is None else f" around token {meta['crop_center']}"
        parts.append(f"{str(meta['crop_method']).replace('_', ' ')} crop{centre}")
    chains = len(np.unique(features["asym_id"]))
    parts.append(f"{tokens} tokens, {atoms} atoms ({resolved} resolved), {chains} chains")
    key = [f"{name} {meta[name]}" for name in ("seed", "epoch", "index") if meta.get(name) is not None]
    return "  ·  ".join([*parts, *([", ".join(key)] if key else [])])


def _chain_runs(features: Features) -> list[tuple[int, int, int]]:
    """Stretches of tokens of one chain: (``asym_id``, first token, one past the last)."""
    asym = np.asarray(features["asym_id"])
    starts = [0, *(np.flatnonzero(np.diff(asym)) + 1).tolist()]
    return [
        (int(asym[start]), start, end) for start, end in zip(starts, [*starts[1:], len(asym)], strict=True)
    ]


def _chain_colours(features: Features) -> dict[int, Any]:
    palette = colormaps["tab20" if len(np.unique(features["asym_id"])) > 10 else "tab10"]
    return {
        int(asym): palette(k % palette.N) for k, asym in enumerate(np.unique(np.asarray(features["asym_id"])))
    }


def _boundaries(axes: Axes, features: Features, *, both: bool = False) -> None:
    for _, start, _ in _chain_runs(features)[1:]:
        axes.axvline(start - 0.5, color="black", linewidth=0.7)
        if both:
            axes.axhline(start - 0.5, color="black", linewidth=0.7)


def _draw_kinds(axes: Axes, features: Features) -> None:
    kind = np.zeros(len(features["restype"]), int)
    for k, (_, name, _) in enumerate(_KINDS):
        kind[np.asarray(features[name], bool)] = k
    colours = ListedColormap([colour for _, _, colour in _KINDS])
    axes.imshow(
        kind[None], aspect="auto", cmap=colours, vmin=-0.5, vmax=len(_KINDS) - 0.5, interpolation="nearest"
    )
    _boundaries(axes, features)
    axes.set_yticks([0], ["type"])
    present = [
        Patch(color=colour, label=label) for k, (label, _, colour) in enumerate(_KINDS) if (kind == k).any()
    ]
    axes.legend(
        handles=present, ncols=4, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.95)
    )
    axes.tick_params(axis="x", bottom=False, labelbottom=False)


def _draw_chains(axes: Axes, features: Features) -> None:
    colours = _chain_colours(features)
    strip = np.array([[colours[int(asym)][:3] for asym in features["asym_id"]]])
    axes.imshow(strip, aspect="auto", interpolation="nearest")
    for asym, start, end in _chain_runs(features):
        # Short stretches have no room for a number.
        if end - start > 0.02 * strip.shape[1]:
            axes.text(
                (start + end - 1) / 2, 0, str(asym), ha="center", va="center", fontsize=8, color="white"
            )
    axes.set_yticks([0], ["chain"])
    axes.tick_params(axis="x", bottom=False, labelbottom=False)


def _class_lookup() -> NDArray[np.int64]:
    groups = {code: k for k, (_, _, codes) in enumerate(_CLASSES) for code in codes.split()}
    return np.array([groups[code] for code in RESTYPES])


def _show_classes(axes: Axes, classes: NDArray[Any]) -> None:
    """An image of ``restype`` classes [N_row, N_token] in the colours of ``_CLASSES``."""
    colours = ListedColormap([colour for _, colour, _ in _CLASSES])
    image = _class_lookup()[np.clip(classes, 0, N_RESTYPE - 1)]
    axes.imshow(
        image, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(_CLASSES) - 0.5, interpolation="nearest"
    )


def _draw_msa(axes: Axes, features: Features) -> None:
    msa = np.asarray(features["msa"])
    shown = msa[:_MOST_ROWS]
    if len(shown):
        _show_classes(axes, shown)
    _boundaries(axes, features)
    more = f", first {len(shown)} shown" if len(shown) < len(msa) else ""
    axes.set_ylabel(f"row of the MSA\n({len(msa)} rows{more})")
    present = set(_class_lookup()[np.unique(shown)].tolist()) if shown.size else set()
    handles = [
        Patch(facecolor=colour, edgecolor="0.6", linewidth=0.5, label=label)
        for k, (label, colour, _) in enumerate(_CLASSES)
        if k in present
    ]
    axes.legend(
        handles=handles, ncols=len(handles), fontsize=7.5, frameon=False, loc="lower left",
        bbox_to_anchor=(-0.01, 0.985), handlelength=0.9, columnspacing=0.8, handletextpad=0.3,
    )  # fmt: skip
    axes.tick_params(axis="x", labelbottom=False)


def _draw_coverage(axes: Axes, features: Features) -> None:
    """How many rows have a residue, and where there are deletions."""
    msa = np.asarray(features["msa"])
    tokens = np.arange(msa.shape[1])
    axes.fill_between(tokens, (msa != GAP).sum(axis=0), step="mid", color="#4c78a8", alpha=0.35, linewidth=0)
    axes.step(tokens, (msa != GAP).sum(axis=0), where="mid", color="#4c78a8", linewidth=1)
    axes.set_ylim(0, max(1, len(msa)) * 1.05)
    axes.set_ylabel("rows with\na residue", color="#4c78a8", fontsize=9)
    _boundaries(axes, features)
    deletions = axes.twinx()
    deletions.step(tokens, features["deletion_mean"], where="mid", color="#e8871e", linewidth=1)
    deletions.set_ylim(0, max(0.02, 1.3 * float(np.max(features["deletion_mean"], initial=0))))
    deletions.set_ylabel("deletion\nmean", color="#e8871e", fontsize=9)


def _template_height(features: Features) -> float:
    return 0.35 + 0.13 * min(len(features["template_restype"]), 8)


def _draw_templates(axes: Axes, features: Features) -> None:
    classes = np.asarray(features["template_restype"])
    axes.set_xlabel("token of the crop")
    axes.set_xlim(-0.5, len(features["restype"]) - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(classes) == 0:
        axes.set_yticks([])
        axes.set_title("no templates", fontsize=10, loc="left")
        return
    _show_classes(axes, classes)
    missing = np.asarray(features["template_backbone_frame_mask"], bool) < (classes != GAP)
    rows, tokens = np.nonzero(missing)
    axes.plot(tokens, rows, "x", color="black", markersize=2.5, markeredgewidth=0.6)
    _boundaries(axes, features)
    axes.set_yticks(range(len(classes)), [str(k + 1) for k in range(len(classes))], fontsize=8)
    axes.set_ylabel("template")
    note = " (x: aligned, but its backbone is missing)" if len(tokens) else ""
    axes.set_title(f"templates{note}", fontsize=10, loc="left")


def _token_positions(features: Features, which: str) -> NDArray[np.float64]:
    """Coordinates [N_token, 3] of each token's atom named by ``which``, NaN where unresolved."""
    atoms = np.asarray(features[which])
    coords = np.where(np.asarray(features["coords_mask"], bool)[:, None], features["coords"], np.nan)
    return np.asarray(coords[atoms], float)


def _draw_contacts(axes: Axes, features: Features) -> None:
    points = _token_positions(features, "rep_atom")
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    colours = colormaps["viridis_r"].with_extremes(bad="0.85", over="#f7f7f7")
    image = axes.imshow(
        np.ma.masked_invalid(distances),
        cmap=colours,
        norm=BoundaryNorm(_DISTANCE_STEPS, colours.N),
        interpolation="nearest",
    )
    _boundaries(axes, features, both=True)
    bonded = np.argwhere(np.triu(np.asarray(features["token_bonds"], bool), 1))
    if len(bonded):
        axes.plot(bonded[:, 1], bonded[:, 0], ".", color="#d1495b", markersize=2.5, label="token bonds")
        axes.legend(fontsize=8, loc="lower left", framealpha=0.9)
    axes.set_title("distances of representative atoms (grey: unresolved)", fontsize=10, loc="left")
    axes.set(xlabel="token of the crop", ylabel="token of the crop")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = axes.figure.colorbar(image, ax=axes, extend="max", shrink=0.85, ticks=_DISTANCE_STEPS)
    bar.set_label("distance / Å")


def _draw_projection(axes: Axes, features: Features) -> None:
    """All resolved atoms in the plane of their two largest extents, polymer traces drawn through."""
    mask = np.asarray(features["coords_mask"], bool)
    axes.set_title("atoms in their principal plane (lines: traces of polymers)", fontsize=10, loc="left")
    axes.set(xlabel="first principal axis / Å", ylabel="second principal axis / Å", aspect="equal")
    if not mask.any():
        axes.text(0.5, 0.5, "no resolved atoms", ha="center", va="center", transform=axes.transAxes)
        return
    coords = np.asarray(features["coords"], float)
    centre = coords[mask].mean(axis=0)
    plane = np.linalg.svd(coords[mask] - centre, full_matrices=False)[2]
    flat = (coords - centre) @ plane.T
    colours = _chain_colours(features)
    asym_of_atom = np.asarray(features["asym_id"])[np.asarray(features["atom_to_token"])]
    is_ligand = np.asarray(features["is_ligand"], bool)[np.asarray(features["atom_to_token"])]
    # Atoms at the back first, so that those in front cover them.
    order = np.argsort(flat[:, 2] if flat.shape[1] > 2 else np.zeros(len(flat)), kind="stable")
    order = order[mask[order]]
    styles: tuple[tuple[NDArray[Any], dict[str, Any]], ...] = (
        (order[~is_ligand[order]], {"s": 9, "linewidths": 0, "alpha": 0.55}),
        (order[is_ligand[order]], {"s": 24, "linewidths": 0.5, "alpha": 0.9, "edgecolors": "black"}),
    )
    for shown, style in styles:
        colour = [colours[int(asym)] for asym in asym_of_atom[shown]]
        axes.scatter(flat[shown, 0], flat[shown, 1], c=colour, **style)
    _draw_traces(axes, features, flat, mask, colours)
    handles = [Patch(color=colour, label=f"chain {asym}") for asym, colour in colours.items()][:12]
    axes.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    axes.grid(alpha=0.25)


def _draw_traces(
    axes: Axes, features: Features, flat: NDArray[Any], mask: NDArray[Any], colours: Mapping[int, Any]
) -> None:
    """Lines between the centre atoms of neighbouring residues of polymers."""
    asym, number = np.asarray(features["asym_id"]), np.asarray(features["residue_index"])
    centre = np.asarray(features["center_atom"])
    polymer = ~np.asarray(features["is_ligand"], bool) & mask[centre]
    linked = (asym[1:] == asym[:-1]) & (number[1:] == number[:-1] + 1) & polymer[1:] & polymer[:-1]
    first = np.flatnonzero(linked)
    segments = np.stack([flat[centre[first], :2], flat[centre[first + 1], :2]], axis=1)
    lines = LineCollection(list(segments), colors=[colours[int(a)] for a in asym[first]], linewidths=1.6)
    axes.add_collection(lines)
