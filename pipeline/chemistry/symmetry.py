"""Automorphisms of a component's heavy-atom graph: which atoms may swap names without changing the molecule.

Two atoms may be swapped when the graph looks the same from either, with resonance taken into account: the
bonds of aromatic rings are alike, and so are the terminal oxygens (nitrogens, sulphurs) of carboxylates,
phosphates, nitro and guanidinium groups, whichever of them the definition draws with the double bond, the
charge or the hydrogen. Stereocentres keep their R or S. AF3 SI 4.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.component import Component

#: Most automorphisms kept for a component.
AUTOMORPHISM_CAP: Final = 1000
#: Most assignments tried for a component: bounds the time in a way that no machine's speed enters.
_MAX_STEPS: Final = 300_000

#: Bond labels beside the orders 0 to 3.
_AROMATIC: Final = 4
_DELOCALISED: Final = 5
_RESONANT_ENDS: Final = frozenset({7, 8, 16, 34})


@dataclass(frozen=True)
class _Graph:
    """Heavy atoms, numbered by themselves: bond labels by neighbour, and a label for each atom."""

    bonds: list[dict[int, int]]
    labels: list[tuple[Any, ...]]


def automorphisms(component: Component, cap: int = AUTOMORPHISM_CAP) -> tuple[NDArray[np.int16], bool]:
    """Automorphisms of the heavy-atom graph, and whether some were left out.

    Returns [N_automorphism, N_heavy] int16 indices into the component's atoms: by row ``p``, heavy atom
    number ``k`` may be called what atom ``p[k]`` is called. The identity is first; at most ``cap`` rows, in
    an order that depends on the definition alone.
    """
    heavy = np.flatnonzero(component.heavy)
    graph = _heavy_graph(component, heavy)
    colours = _refine(graph)
    rows: list[list[int]] = []
    capped = False
    for mapping in _search(graph, colours):
        if mapping is None or len(rows) == cap:
            capped = True
            break
        rows.append(mapping)
    found = np.array(rows, np.int64).reshape(len(rows), len(heavy))
    return heavy[found].astype(np.int16) if len(heavy) else np.empty((1, 0), np.int16), capped


def _heavy_graph(component: Component, heavy: NDArray[np.int64]) -> _Graph:
    number = {int(atom): index for index, atom in enumerate(heavy)}
    bonds: list[dict[int, int]] = [{} for _ in heavy]
    hydrogens = [0] * len(heavy)
    for i, j, order, aromatic in component.bond_rows():
        if i in number and j in number:
            label = _AROMATIC if aromatic else order
            bonds[number[i]][number[j]] = bonds[number[j]][number[i]] = label
        elif i in number or j in number:
            hydrogens[number[i] if i in number else number[j]] += 1
    elements, charges = component.elements[heavy].tolist(), component.charges[heavy].tolist()
    for atom in _resonant_ends(bonds, elements, charges):
        hydrogens[atom] = charges[atom] = 0
        (centre,) = bonds[atom]
        bonds[atom][centre] = bonds[centre][atom] = _DELOCALISED
    stereo = component.stereo[heavy].tolist()
    return _Graph(bonds, list(zip(elements, charges, hydrogens, stereo, strict=True)))


def _resonant_ends(bonds: list[dict[int, int]], elements: list[int], charges: list[int]) -> list[int]:
    """Terminal atoms that share a double bond or a charge with others of their element on the same centre."""
    ends: list[int] = []
    for neighbours in bonds:
        for element in sorted({elements[atom] for atom in neighbours} & _RESONANT_ENDS):
            group = [atom for atom in neighbours if elements[atom] == element and len(bonds[atom]) == 1]
            if len(group) > 1 and any(neighbours[atom] != 1 or charges[atom] for atom in group):
                ends += group
    return sorted(set(ends))


def _refine(graph: _Graph) -> list[int]:
    """Colours of the atoms: equal only where the labels, and the colours and bonds around, are equal."""
    colours, count = _numbered(graph.labels)
    while True:
        around = [
            (colours[atom], *sorted((label, colours[other]) for other, label in neighbours.items()))
            for atom, neighbours in enumerate(graph.bonds)
        ]
        colours, refined = _numbered(around)
        if refined == count:
            return colours
        count = refined


def _numbered(labels: list[tuple[Any, ...]]) -> tuple[list[int], int]:
    numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
    return [numbers[label] for label in labels], len(numbers)


def _order(graph: _Graph, colours: list[int]) -> list[int]:
    """Atoms so that each, where possible, follows one it is bonded to; rare colours first."""
    size = np.bincount(colours).tolist() if colours else []
    rank = [(size[colour], atom) for atom, colour in enumerate(colours)]
    left, order = set(range(len(colours))), []
    border: set[int] = set()
    while left:
        atom = min(border or left, key=rank.__getitem__)
        order.append(atom)
        left.discard(atom)
        border = {other for other in border | set(graph.bonds[atom]) if other in left}
    return order


def _search(graph: _Graph, colours: list[int]) -> Iterator[list[int] | None]:
    """Automorphisms by depth-first search, the identity first; None, at last, where the steps ran out."""
    order = _order(graph, colours)
    position = {atom: place for place, atom in enumerate(order)}
    before = [
        [(other, label) for other, label in graph.bonds[atom].items() if position[other] < place]
        for place, atom in enumerate(order)
    ]
    same_colour: dict[int, list[int]] = {}
    for atom, colour in enumerate(colours):
        same_colour.setdefault(colour, []).append(atom)
    image, used = [-1] * len(order), [False] * len(order)

    def candidates(place: int) -> Iterator[int]:
        atom = order[place]
        near = graph.bonds[image[before[place][0][0]]] if before[place] else same_colour[colours[atom]]
        for other in sorted(near, key=lambda other: (other != atom, other)):
            if colours[other] == colours[atom] and not used[other]:
                bonds = graph.bonds[other]
                if all(bonds.get(image[mapped]) == label for mapped, label in before[place]):
                    yield other

    stack: list[Iterator[int]] = [candidates(0)] if order else []
    steps = 0
    while stack:
        atom = order[len(stack) - 1]
        if image[atom] >= 0:
            used[image[atom]] = False
            image[atom] = -1
        chosen = next(stack[-1], None)
        if chosen is None:
            stack.pop()
            continue
        steps += 1
        if steps > max(_MAX_STEPS, len(order)):
            yield None
            return
        image[atom], used[chosen] = chosen, True
        if len(stack) == len(order):
            yield list(image)
        else:
            stack.append(candidates(len(stack)))
