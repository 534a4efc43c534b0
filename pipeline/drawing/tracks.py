"""The panels along the tokens of a crop: chains, types, bonds, alignment, coverage, templates."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megafold.pipeline.drawing.chains import (
    KINDS,
    ChainStyle,
    Features,
    bonded_tokens,
    chain_runs,
    draw_boundaries,
)
from megafold.pipeline.schema import GAP, N_RESTYPE, RESTYPES

#: Classes of ``restype`` that are drawn alike: name, colour, codes.
CLASSES: Final = (
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
_MOST_ROWS: Final = 400


def draw_tracks(
    panel: SubFigure, features: Features, styles: Mapping[int, ChainStyle], paired_rows: int = 0
) -> None:
    """All tracks of a sample, one above the other, over the same tokens.

    ``paired_rows`` of the MSA, behind the query, are paired over chains.
    """
    depth = min(2.4, 0.15 + 0.05 * len(features["msa"]))
    # What a short alignment leaves free stays free, below: a track is as high in every picture.
    heights = [0.2, 0.2, 0.3, depth, 0.7, _template_height(features), 2.45 - depth]
    chains, kinds, bonds, msa, coverage, templates, rest = panel.subplots(
        7, 1, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    rest.remove()
    draw_chains(chains, features, styles)
    draw_kinds(kinds, features)
    draw_bonds(bonds, features, styles)
    draw_msa(msa, features, paired_rows)
    draw_coverage(coverage, features)
    draw_templates(templates, features)


def draw_chains(axes: Axes, features: Features, styles: Mapping[int, ChainStyle]) -> None:
    """Which chain each token is of; names where there is room for them."""
    strip = np.array([[styles[int(asym)].colour for asym in features["asym_id"]]])
    axes.imshow(strip, aspect="auto", interpolation="nearest")
    draw_boundaries(axes, features)
    for asym, start, end in chain_runs(features):
        name = styles[asym].name
        if end - start > 0.014 * (1 + len(name)) * strip.shape[1]:
            axes.text((start + end - 1) / 2, 0, name, ha="center", va="center", fontsize=9, color="white")
    _strip(axes, "chain")


def draw_kinds(axes: Axes, features: Features) -> None:
    """The type of each token, from its features' four masks."""
    kind = np.zeros(len(features["restype"]), int)
    for k, (_, name, _) in enumerate(KINDS):
        kind[np.asarray(features[name], bool)] = k
    colours = ListedColormap([colour for _, _, colour in KINDS])
    axes.imshow(
        kind[None], aspect="auto", cmap=colours, vmin=-0.5, vmax=len(KINDS) - 0.5, interpolation="nearest"
    )
    draw_boundaries(axes, features)
    _strip(axes, "type")
    _key(axes, [(label, colour) for k, (label, _, colour) in enumerate(KINDS) if (kind == k).any()])


def draw_bonds(axes: Axes, features: Features, styles: Mapping[int, ChainStyle]) -> None:
    """Token bonds as arcs: in the chain's colour within one, black between chains."""
    pairs = bonded_tokens(features)
    asym = np.asarray(features["asym_id"])
    draw_boundaries(axes, features)
    axes.set_ylim(0, 1)
    _strip(axes, "bonds", place=0.5)
    if not len(pairs):
        axes.set_title("no token bonds", fontsize=9, loc="left", pad=2)
        return
    span = (pairs[:, 1] - pairs[:, 0]).astype(float)
    # The longest arc is as high as the track; the root keeps those of neighbours visible.
    height = 0.95 * np.sqrt(span / span.max())
    turn = np.linspace(0, np.pi, 25)
    across = pairs.mean(axis=1)[:, None] - 0.5 * span[:, None] * np.cos(turn)
    arcs = np.stack([across, height[:, None] * np.sin(turn)], axis=-1)
    is_within = asym[pairs[:, 0]] == asym[pairs[:, 1]]
    colours = [
        styles[int(asym[first])].colour if within else (0.0, 0.0, 0.0)
        for first, within in zip(pairs[:, 0], is_within, strict=True)
    ]
    axes.add_collection(LineCollection(list(arcs), colors=colours, linewidths=1))
    between = int((~is_within).sum())
    note = f", {between} of them between chains (black)" if between else ""
    axes.set_title(f"{len(pairs)} token bonds{note}", fontsize=9, loc="left", pad=2)


def _strip(axes: Axes, name: str, place: float = 0) -> None:
    """A track without numbers: its name alone."""
    axes.set_yticks([place], [name])
    axes.tick_params(axis="both", left=False, bottom=False, labelbottom=False)


def _key(axes: Axes, entries: list[tuple[str, str]]) -> None:
    """A one-line legend right above a track."""
    handles = [
        Patch(facecolor=colour, edgecolor="0.6", linewidth=0.5, label=label) for label, colour in entries
    ]
    axes.legend(
        handles=handles, ncols=max(1, len(handles)), fontsize=8, frameon=False, loc="lower left",
        bbox_to_anchor=(0, 1), borderpad=0, borderaxespad=0.2, handlelength=0.9, columnspacing=0.9,
        handletextpad=0.35,
    )  # fmt: skip


def class_lookup() -> NDArray[np.int64]:
    """[N_restype] the place of each class in :data:`CLASSES`."""
    groups = {code: k for k, (_, _, codes) in enumerate(CLASSES) for code in codes.split()}
    return np.array([groups[code] for code in RESTYPES])


def _show_classes(axes: Axes, classes: NDArray[Any]) -> None:
    """An image of ``restype`` classes [N_row, N_token] in the colours of ``CLASSES``."""
    colours = ListedColormap([colour for _, colour, _ in CLASSES])
    image = class_lookup()[np.clip(classes, 0, N_RESTYPE - 1)]
    axes.imshow(
        image, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(CLASSES) - 0.5, interpolation="nearest"
    )


def draw_msa(axes: Axes, features: Features, paired_rows: int = 0) -> None:
    """The first rows of the alignment, by class of residue; a line below the paired rows."""
    msa = np.asarray(features["msa"])
    shown = msa[:_MOST_ROWS]
    if len(shown):
        _show_classes(axes, shown)
    draw_boundaries(axes, features)
    more = f", first {len(shown)} shown" if len(shown) < len(msa) else ""
    axes.set_ylabel(f"row of the MSA\n({len(msa)} rows{more})" if len(msa) > 20 else "MSA")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    present = set(class_lookup()[np.unique(shown)].tolist()) if shown.size else set()
    _key(axes, [(label, colour) for k, (label, colour, _) in enumerate(CLASSES) if k in present])
    if paired_rows and paired_rows + 1 < len(shown):
        axes.axhline(paired_rows + 0.5, color="black", linewidth=1.2)
        axes.text(
            msa.shape[1] - 1, paired_rows, "paired above ", ha="right", va="bottom", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
        )  # fmt: skip
    axes.tick_params(axis="x", labelbottom=False)


def draw_coverage(axes: Axes, features: Features) -> None:
    """How many rows have a residue at each token, and the mean of its deletions."""
    msa = np.asarray(features["msa"])
    tokens = np.arange(msa.shape[1])
    axes.fill_between(tokens, (msa != GAP).sum(axis=0), step="mid", color="#4c78a8", alpha=0.35, linewidth=0)
    axes.step(tokens, (msa != GAP).sum(axis=0), where="mid", color="#4c78a8", linewidth=1)
    axes.set_ylim(0, max(1, len(msa)) * 1.05)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3, min_n_ticks=1))
    axes.set_ylabel("rows with\na residue", color="#4c78a8", fontsize=9)
    draw_boundaries(axes, features)
    deletions = axes.twinx()
    deletions.step(tokens, features["deletion_mean"], where="mid", color="#e8871e", linewidth=1)
    deletions.set_ylim(0, max(0.02, 1.3 * float(np.max(features["deletion_mean"], initial=0))))
    deletions.yaxis.set_major_locator(MaxNLocator(nbins=3))
    deletions.set_ylabel("deletion\nmean", color="#e8871e", fontsize=9)


def _template_height(features: Features) -> float:
    return 0.35 + 0.13 * min(len(features["template_restype"]), 8)


def draw_templates(axes: Axes, features: Features) -> None:
    """The templates by class of residue; white where they do not align."""
    classes = np.asarray(features["template_restype"])
    axes.set_xlabel("token of the crop")
    axes.tick_params(axis="x", labelbottom=True)
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
    draw_boundaries(axes, features)
    axes.set_yticks(range(len(classes)), [str(k + 1) for k in range(len(classes))], fontsize=8)
    axes.set_ylabel("template")
    note = " (x: aligned, but its backbone is missing)" if len(tokens) else ""
    axes.set_title(f"templates{note}", fontsize=10, loc="left")
