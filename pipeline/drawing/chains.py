"""What all panels share: which tokens are of which chain, its colour, its name, its kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from numpy.typing import NDArray

Features = Mapping[str, NDArray[Any]]
Colour = tuple[float, float, float]

#: Kinds of tokens: name, feature that tells, colour.
KINDS: Final = (
    ("protein", "is_protein", "#4c78a8"),
    ("RNA", "is_rna", "#e76f51"),
    ("DNA", "is_dna", "#2a9d8f"),
    ("ligand", "is_ligand", "#8d8d8d"),
)


@dataclass(frozen=True, kw_only=True)
class ChainStyle:
    """How one chain is drawn and called; ``tokens`` is how many of it the crop holds."""

    asym_id: int
    name: str
    kind: str
    colour: Colour
    tokens: int

    @property
    def label(self) -> str:
        """For legends: name, kind and number of tokens."""
        return f"{self.name}  {self.kind}, {self.tokens}"


def chain_styles(features: Features, meta: Mapping[str, Any]) -> dict[int, ChainStyle]:
    """A style for each ``asym_id`` of a crop. Names are the label ids of ``meta``, else the numbers."""
    asym = np.asarray(features["asym_id"])
    found = np.unique(asym)
    palette = colormaps["tab20" if len(found) > 10 else "tab10"]
    names: Mapping[Any, str] = meta.get("label_asym_ids") or {}
    styles = {}
    for place, number in enumerate(found.tolist()):
        own = np.flatnonzero(asym == number)
        kind = next((name for name, feature, _ in KINDS if features[feature][own[0]]), "unknown")
        red, green, blue, _ = palette(place % palette.N)
        styles[number] = ChainStyle(
            asym_id=number,
            name=names.get(number, str(number)),
            kind=kind,
            colour=(red, green, blue),
            tokens=len(own),
        )
    return styles


def chain_runs(features: Features) -> list[tuple[int, int, int]]:
    """Stretches of tokens of one chain: (``asym_id``, first token, one past the last)."""
    asym = np.asarray(features["asym_id"])
    starts = [0, *(np.flatnonzero(np.diff(asym)) + 1).tolist()]
    return [
        (int(asym[start]), start, end) for start, end in zip(starts, [*starts[1:], len(asym)], strict=True)
    ]


def draw_boundaries(axes: Axes, features: Features, *, both: bool = False) -> None:
    """Thin lines between chains; with ``both`` along the other axis, too."""
    for _, start, _ in chain_runs(features)[1:]:
        axes.axvline(start - 0.5, color="black", linewidth=0.6)
        if both:
            axes.axhline(start - 0.5, color="black", linewidth=0.6)


def bonded_tokens(features: Features) -> NDArray[np.int64]:
    """[N_bond, 2] pairs of tokens that are bonded, each once, the first one ascending."""
    found: NDArray[np.int64] = np.argwhere(np.triu(np.asarray(features["token_bonds"], bool), 1))
    return found
