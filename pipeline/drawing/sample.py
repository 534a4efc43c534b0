"""The whole picture of a sample: which panels there are, and where."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from megafold.pipeline.drawing.chains import ChainStyle, Features, bonded_tokens, chain_styles
from megafold.pipeline.drawing.space import draw_contacts, draw_views
from megafold.pipeline.drawing.tracks import draw_tracks

_MOST_NAMES: Final = 12


def draw_sample(features: Features, meta: Mapping[str, Any], path: Path) -> None:
    """Draw a crop as PNG: its tokens, alignment, templates, bonds, contacts and coordinates.

    Args:
        features: an unpadded sample, named as in ``schema.SAMPLE``.
        meta: where the sample comes from; ``entry``, the crop's description and chain names are shown.
        path: the file to write.
    """
    figure = Figure(figsize=(17, 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title_of(features, meta), fontsize=12.5)
    styles = chain_styles(features, meta)
    left, right = figure.subfigures(1, 2, width_ratios=[1.1, 1], squeeze=False)[0]
    draw_tracks(left, features, styles, meta.get("paired_rows", 0))
    above, below = right.subfigures(2, 1, height_ratios=[1.1, 1], squeeze=False)[:, 0]
    draw_contacts(above.subplots(), features)
    front, side = below.subplots(1, 2, sharey=True)
    draw_views(front, side, features, styles, _center(features, meta))
    _name_chains(below, list(styles.values()))
    figure.savefig(path, format="png", dpi=110)


def title_of(features: Features, meta: Mapping[str, Any]) -> str:
    """Two lines: what the crop is of and how it was made; how much it holds."""
    made = [f"{meta.get('entry', 'sample')}"]
    if meta.get("crop_method") is not None:
        centre = "" if meta.get("crop_center") is None else f" around token {meta['crop_center']}"
        made.append(f"{str(meta['crop_method']).replace('_', ' ')} crop{centre}")
    key = [f"{name} {meta[name]}" for name in ("seed", "epoch", "index") if meta.get(name) is not None]
    return "  ·  ".join([*made, *([", ".join(key)] if key else [])]) + "\n" + counts_text(features, meta)


def counts_of(features: Features) -> dict[str, int]:
    """How much of everything a sample holds."""
    return {
        "tokens": len(features["restype"]),
        "atoms": len(features["ref_element"]),
        "resolved_atoms": int(np.asarray(features["coords_mask"]).sum()),
        "chains": len(np.unique(features["asym_id"])),
        "msa_rows": len(features["msa"]),
        "templates": len(features["template_restype"]),
        "token_bonds": len(bonded_tokens(features)),
    }


def counts_text(features: Features, meta: Mapping[str, Any]) -> str:
    """The counts as words."""
    counts = counts_of(features)
    whole = meta.get("n_token_uncropped")
    of = f" of {whole}" if whole is not None and whole != counts["tokens"] else ""
    nouns = {"chains": "chain", "msa_rows": "MSA row", "templates": "template", "token_bonds": "token bond"}
    parts = [f"{counts[key]} {noun}{'' if counts[key] == 1 else 's'}" for key, noun in nouns.items()]
    atoms = f"{counts['atoms']} atoms ({counts['resolved_atoms']} resolved)"
    return ", ".join([f"{counts['tokens']}{of} tokens", atoms, *parts])


def _center(features: Features, meta: Mapping[str, Any]) -> int | None:
    """The token of the crop that it is around; ``meta`` has its number in the entry."""
    if meta.get("crop_center") is None:
        return None
    found = np.flatnonzero(np.asarray(features["token_index"]) == meta["crop_center"])
    return int(found[0]) if len(found) else None


def _name_chains(panel: SubFigure, styles: list[ChainStyle]) -> None:
    shown = styles if len(styles) <= _MOST_NAMES else styles[: _MOST_NAMES - 1]
    handles = [Patch(color=style.colour, label=style.label) for style in shown]
    if len(shown) < len(styles):
        handles.append(Patch(alpha=0, label=f"and {len(styles) - len(shown)} more chains"))
    panel.legend(
        handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8, frameon=False,
        title="chain, kind and tokens in the crop", title_fontsize=8, handlelength=1, borderaxespad=0.8,
    )  # fmt: skip
