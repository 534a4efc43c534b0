"""Building blocks from the chemical component dictionary: heavy atoms, coordinates, rotamers."""

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry import Component, ComponentDictionary, load_dictionary
from megafold.pipeline.chemistry.elements import SYMBOLS
from megafold.pipeline.errors import ComponentError
from megafold.pipeline.sample_corpus.geometry import Coords, local_frame, rotation_about, torsion_angle
from megafold.pipeline.schema import AMINO_ACID_LETTERS, AMINO_ACIDS

ONE_TO_THREE: Final = dict(zip(AMINO_ACID_LETTERS, AMINO_ACIDS, strict=True))
#: Modified residues that the corpus uses, with the letter of their parent.
MODIFIED: Final = {"MSE": "M", "SEP": "S", "TPO": "T", "PTR": "Y"}
LETTER: Final = {three: one for one, three in ONE_TO_THREE.items()} | MODIFIED
BACKBONE: Final = ("N", "CA", "C", "O")

#: Side-chain torsions: the atoms of chi 1, chi 2, ...
_CHI: Final = {
    "ARG": "N-CA-CB-CG CA-CB-CG-CD CB-CG-CD-NE CG-CD-NE-CZ",
    "ASN": "N-CA-CB-CG CA-CB-CG-OD1",
    "ASP": "N-CA-CB-CG CA-CB-CG-OD1",
    "CYS": "N-CA-CB-SG",
    "GLN": "N-CA-CB-CG CA-CB-CG-CD CB-CG-CD-OE1",
    "GLU": "N-CA-CB-CG CA-CB-CG-CD CB-CG-CD-OE1",
    "HIS": "N-CA-CB-CG CA-CB-CG-ND1",
    "ILE": "N-CA-CB-CG1 CA-CB-CG1-CD1",
    "LEU": "N-CA-CB-CG CA-CB-CG-CD1",
    "LYS": "N-CA-CB-CG CA-CB-CG-CD CB-CG-CD-CE CG-CD-CE-NZ",
    "MET": "N-CA-CB-CG CA-CB-CG-SD CB-CG-SD-CE",
    "MSE": "N-CA-CB-CG CA-CB-CG-SE CB-CG-SE-CE",
    "PHE": "N-CA-CB-CG CA-CB-CG-CD1",
    "PTR": "N-CA-CB-CG CA-CB-CG-CD1 CE1-CZ-OH-P CZ-OH-P-O1P",
    "SEP": "N-CA-CB-OG CA-CB-OG-P CB-OG-P-O1P",
    "SER": "N-CA-CB-OG",
    "THR": "N-CA-CB-OG1",
    "TPO": "N-CA-CB-OG1 CA-CB-OG1-P CB-OG1-P-O1P",
    "TRP": "N-CA-CB-CG CA-CB-CG-CD1",
    "TYR": "N-CA-CB-CG CA-CB-CG-CD1",
    "VAL": "N-CA-CB-CG1",
}
_STAGGERED: Final = (-65.0, 180.0, 62.0)
#: Preferred torsions, one tuple for each chi (all combinations) or a list of combinations.
_PREFERRED: Final[dict[str, tuple[tuple[float, ...], ...] | list[tuple[float, ...]]]] = {
    "ARG": (_STAGGERED, (180.0, -65.0), (180.0, 65.0), (180.0, 90.0, -90.0)),
    "ASN": (_STAGGERED, (-20.0, 30.0, 120.0)),
    "ASP": (_STAGGERED, (-15.0, 30.0)),
    "CYS": (_STAGGERED,),
    "GLN": (_STAGGERED, (180.0, -65.0, 65.0), (0.0, 50.0, -50.0)),
    "GLU": (_STAGGERED, (180.0, -65.0, 65.0), (0.0, 40.0)),
    "HIS": (_STAGGERED, (-70.0, 80.0, 165.0)),
    "ILE": [(-65.0, 170.0), (-57.0, -60.0), (62.0, 170.0), (-177.0, 165.0), (-177.0, 66.0)],
    "LEU": [(-65.0, 174.0), (-177.0, 65.0), (-85.0, 65.0), (-172.0, 145.0)],
    "LYS": (_STAGGERED, (180.0, -65.0), (180.0, 65.0, -65.0), (180.0,)),
    "MET": (_STAGGERED, (180.0, -65.0), (180.0, 75.0, -70.0)),
    "MSE": (_STAGGERED, (180.0, -65.0), (180.0, 75.0, -70.0)),
    "PHE": (_STAGGERED, (90.0, -85.0, -30.0)),
    "PTR": (_STAGGERED, (90.0, -30.0), (180.0, 90.0, -90.0, 0.0), (60.0,)),
    "SEP": (_STAGGERED, (180.0, 120.0, -120.0, 90.0, -90.0), (60.0,)),
    "SER": (_STAGGERED,),
    "THR": (_STAGGERED,),
    "TPO": (_STAGGERED, (180.0, 120.0, -120.0, 90.0, -90.0), (60.0,)),
    "TRP": [(-65.0, 95.0), (-65.0, 0.0), (-65.0, -90.0), (-177.0, -105.0), (-177.0, 90.0), (62.0, 90.0)],
    "TYR": (_STAGGERED, (90.0, -85.0, -30.0)),
    "VAL": (_STAGGERED,),
}


@dataclass(frozen=True, eq=False)
class Monomer:
    """The heavy atoms of a component.

    ``pos`` [N_atom, 3] are the dictionary's ideal coordinates, ``model_pos`` those of an experimental model;
    ``bonds`` are index pairs, ``leaving`` [N_atom] marks the atoms that go when it is linked.
    """

    component: Component
    names: tuple[str, ...]
    elements: tuple[str, ...]
    pos: Coords
    model_pos: Coords
    bonds: tuple[tuple[int, int], ...]
    leaving: NDArray[np.bool_]

    @property
    def code(self) -> str:
        """The component's code."""
        return self.component.code

    def index(self, name: str) -> int:
        """Index of the atom called ``name``."""
        return self.names.index(name)


@lru_cache(maxsize=1)
def _dictionary() -> ComponentDictionary:
    return load_dictionary()


@cache
def monomer(code: str) -> Monomer:
    """The building block ``code``.

    Raises:
        ComponentError: the dictionary lacks it.
    """
    component = _dictionary().get(code)
    if component is None:
        raise ComponentError(
            f"the component dictionary has no {code}, which the sample corpus is built from; "
            "install biotite's wheel anew",
            reason="unknown-component",
        )
    kept = np.flatnonzero(component.heavy)
    new_index = {int(old): new for new, old in enumerate(kept)}
    bonds = [(int(i), int(j)) for i, j in component.bonds]
    return Monomer(
        component=component,
        names=tuple(component.atom_names[i] for i in kept),
        elements=tuple(SYMBOLS[int(component.elements[i])].upper() for i in kept),
        pos=np.asarray(component.ideal_pos[kept], float),
        model_pos=np.asarray(component.model_pos[kept], float),
        bonds=tuple((new_index[i], new_index[j]) for i, j in bonds if i in new_index and j in new_index),
        leaving=np.asarray(component.leaving[kept], bool),
    )


def _beyond(block: Monomer, near: int, far: int) -> list[int]:
    """Atoms on the far side of the bond near-far, ``far`` itself excluded."""
    seen, queue = {near, far}, [far]
    while queue:
        atom = queue.pop()
        for i, j in block.bonds:
            for here, there in ((i, j), (j, i)):
                if here == atom and there not in seen:
                    seen.add(there)
                    queue.append(there)
    return sorted(seen - {near, far})


def turn(block: Monomer, pos: Coords, atoms: tuple[str, ...], torsion: float) -> Coords:
    """Coordinates [N_atom, 3] with the torsion over four named atoms set; its far side moves."""
    a, b, c, d = (block.index(name) for name in atoms)
    moved = _beyond(block, b, c)
    change = torsion - float(torsion_angle(pos[a], pos[b], pos[c], pos[d]))
    rotation = rotation_about(pos[c] - pos[b], change)
    result = pos.copy()
    result[moved] = (pos[moved] - pos[c]) @ rotation.T + pos[c]
    return result


def chi_atoms(code: str) -> list[tuple[str, ...]]:
    """The four atom names of each side-chain torsion; none for ALA, GLY and PRO."""
    return [tuple(chi.split("-")) for chi in _CHI.get(code, "").split()]


def in_residue_frame(block: Monomer, pos: Coords) -> Coords:
    """Coordinates in the residue's own frame: CA at the origin, N on x, C in the plane."""
    n, ca, c = (pos[block.index(name)] for name in ("N", "CA", "C"))
    return np.asarray((pos - ca) @ local_frame(ca, n, c))


@dataclass(frozen=True, eq=False)
class SideChain:
    """Side-chain atoms beyond the backbone, in the residue's frame: ``rotamers`` [N_rotamer, N_atom, 3]."""

    code: str
    names: tuple[str, ...]
    elements: tuple[str, ...]
    rotamers: Coords


@cache
def side_chain(code: str) -> SideChain:
    """The preferred side-chain conformations of an amino acid."""
    preferred = _PREFERRED.get(code, ())
    return _conformers(code, preferred if isinstance(preferred, list) else list(product(*preferred)))


def grid_side_chain(code: str, *angles: NDArray[np.float64]) -> SideChain:
    """Side-chain conformations over a grid: all combinations of the given values of chi 1, chi 2, ..."""
    return _conformers(code, [tuple(map(float, combination)) for combination in product(*angles)])


def _conformers(code: str, torsions: list[tuple[float, ...]]) -> SideChain:
    block = monomer(code)
    kept = [i for i, name in enumerate(block.names) if name not in (*BACKBONE, "OXT")]
    rotamers = []
    for combination in torsions:
        pos = block.pos
        for atoms, value in zip(chi_atoms(code), combination, strict=False):
            pos = turn(block, pos, atoms, value)
        rotamers.append(in_residue_frame(block, pos)[kept])
    return SideChain(
        code=code,
        names=tuple(block.names[i] for i in kept),
        elements=tuple(block.elements[i] for i in kept),
        rotamers=np.stack(rotamers),
    )
