"""Reference conformers: RDKit's ETKDGv3, else the dictionary's coordinates, else none. AF3 SI 2.8.

The result depends on the definition alone (and RDKit's version): the seed comes from the definition's digest,
and what bounds an embedding is a number of attempts. The time limit is there for what attempts cannot bound;
where it strikes, no second strategy is tried and the failure class says ``timeout``, so that it can be seen.
RDKit's objects stay in this module.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rdkit import Chem, rdBase
from rdkit.Chem import rdDistGeom

from megafold.pipeline.chemistry.component import Component
from megafold.pipeline.chemistry.elements import HYDROGEN
from megafold.pipeline.chemistry.reference import ReferenceComponent
from megafold.pipeline.chemistry.symmetry import automorphisms
from megafold.pipeline.errors import ComponentError
from megafold.pipeline.schema import RefOrigin

#: Components of more atoms are not embedded: the CCD's largest has 440, and RDKit has died of 1 400.
MAX_EMBED_ATOMS: Final = 500
#: Attempts from the distance matrix's eigenvectors (cheap to fail), then from random coordinates.
_ATTEMPTS: Final = 100
_RANDOM_ATTEMPTS: Final = 20
#: An RDKit time limit is for both strategies together; it is in whole seconds. The slowest component of the
#: CCD (WJW) takes 34 s of a busy processor: with less, busy machines get other conformers than idle ones.
_TIMEOUT_S: Final = 480

_METALS: Final = frozenset(
    {3, 4, *range(11, 14), *range(19, 32), *range(37, 52), *range(55, 85), *range(87, 119)}
)
_BOND_TYPES: Final = {1: Chem.BondType.SINGLE, 2: Chem.BondType.DOUBLE, 3: Chem.BondType.TRIPLE}
#: Charge that makes a valence regular, for elements whose charge definitions often leave out.
_REGULAR_VALENCE: Final = {5: (3, -1), 7: (3, 1), 8: (2, 1)}
#: Bond lengths over the sum of covalent radii: outside, the conformer is no molecule.
_BOND_RANGE: Final = (0.65, 1.35)
_METAL_BOND_RANGE: Final = (0.75, 1.25)
_TIMED_OUT: Final = int(rdDistGeom.EmbedFailureCauses.EXCEEDED_TIMEOUT)


class EmbedError(Exception):
    """RDKit made no conformer: the failure class, and RDKit's own words if it had any."""

    def __init__(self, failure: str, message: str = "") -> None:
        super().__init__(failure, message)
        self.failure = failure
        self.message = message


def build_reference(
    component: Component, timeout_s: float = _TIMEOUT_S, *, skip_embedding: str = ""
) -> ReferenceComponent:
    """Reference conformer and automorphisms of a component.

    Tried in this order: RDKit ETKDGv3; the same from random coordinates; the definition's ideal coordinates;
    its model coordinates; none. Coordinates that lack heavy atoms come after complete ones. RDKit's failure,
    if any, is named in ``failure``: ``no-atoms``, ``too-many-atoms``, ``valence``, ``sanitization``,
    ``embedding``, ``distorted``, ``timeout`` or ``rdkit-error``.

    ``skip_embedding``: the failure to record instead of trying RDKit, for a component that took its process
    down or used up its time.

    Raises:
        ComponentError: more atoms than the library can index.
    """
    if len(component) > np.iinfo(np.int16).max:
        raise ComponentError(
            f"component {component.code!r} has {len(component)} atoms; split it into residues",
            reason="too-many-atoms",
        )
    found, capped = automorphisms(component)
    failure = message = ""
    try:
        if skip_embedding:
            raise EmbedError(skip_embedding)
        pos, origin = embed(component, timeout_s), RefOrigin.RDKIT
    except EmbedError as error:
        failure, message = error.failure, error.message
        pos, origin = _dictionary_positions(component)
    return ReferenceComponent(
        key=component.key,
        digest=component.digest,
        atom_names=component.atom_names,
        elements=component.elements,
        charges=component.charges,
        leaving=component.leaving,
        aromatic=component.aromatic,
        stereo=component.stereo,
        bonds=component.bonds,
        bond_orders=component.bond_orders,
        bond_aromatic=component.bond_aromatic,
        ref_pos=_centred(pos, component.heavy),
        origin=origin,
        failure=failure,
        message=message,
        automorphisms=found,
        capped=capped,
    )


def embed(component: Component, timeout_s: float = _TIMEOUT_S) -> NDArray[np.float64]:
    """RDKit's conformer [N_atom, 3], Å.

    Raises:
        EmbedError: there is none.
    """
    if not len(component):
        raise EmbedError("no-atoms")
    if len(component) > MAX_EMBED_ATOMS:
        raise EmbedError("too-many-atoms")
    with rdBase.BlockLogs():
        try:
            mol = _sanitized(component)
            _assign_stereo(mol, component)
            mol = Chem.AddHs(mol)
            pos = _embedded(mol, int(component.digest[:8], 16) & 0x7FFFFFFF, timeout_s)
        except Chem.MolSanitizeException as error:
            valence = "Valence" in type(error).__name__
            raise EmbedError("valence" if valence else "sanitization", str(error)) from error
        except (RuntimeError, ValueError) as error:
            raise EmbedError("rdkit-error", str(error)) from error
    pos = pos[: len(component)]
    if not np.isfinite(pos).all() or _is_distorted(component, pos):
        raise EmbedError("distorted")
    return pos


def _sanitized(component: Component) -> Chem.Mol:
    """The molecule, metals held by dative bonds; charges of irregular valences are set for RDKit alone.

    Raises:
        Chem.MolSanitizeException: RDKit does not accept it.
    """
    mol = _molecule(component)
    for problem in Chem.DetectChemistryProblems(mol):
        if problem.GetType() == "AtomValenceException":
            atom = mol.GetAtomWithIdx(problem.GetAtomIdx())
            valence = round(sum(bond.GetValenceContrib(atom) for bond in atom.GetBonds()))
            regular, sign = _REGULAR_VALENCE.get(atom.GetAtomicNum(), (valence, 0))
            if valence <= regular + 1:
                atom.SetFormalCharge(sign * (valence - regular))
    Chem.SanitizeMol(mol)
    return mol


def _molecule(component: Component) -> Chem.Mol:
    elements = component.elements.tolist()
    metal = [element in _METALS for element in elements]
    # A dictionary's definition names every hydrogen; an input's own may have left all of them out.
    implicit = component.is_own and HYDROGEN not in elements
    mol = Chem.RWMol()
    for element, charge in zip(elements, component.charges.tolist(), strict=True):
        atom = Chem.Atom(element)
        atom.SetFormalCharge(charge)
        atom.SetNoImplicit(not implicit)
        mol.AddAtom(atom)
    for i, j, order, aromatic in component.bond_rows():
        if metal[i] != metal[j]:
            donor, acceptor = (j, i) if metal[i] else (i, j)
            mol.AddBond(donor, acceptor, Chem.BondType.DATIVE)
            mol.GetAtomWithIdx(donor).SetNoImplicit(True)
        elif order == 0 and aromatic:
            mol.AddBond(i, j, Chem.BondType.AROMATIC)
            for end in (i, j):
                mol.GetAtomWithIdx(end).SetIsAromatic(True)
        else:
            mol.AddBond(i, j, _BOND_TYPES.get(order, Chem.BondType.SINGLE))
    return mol.GetMol()


def _assign_stereo(mol: Chem.Mol, component: Component) -> None:
    """Take the handedness of centres and double bonds from the definition's coordinates, if complete.

    Metals and the atoms that hold them get none: RDKit's tetrahedral centres are too narrow for them.
    """
    every = np.ones(len(component), bool)
    complete = [pos for pos in (component.ideal_pos, component.model_pos) if _is_usable(pos, every)]
    if not complete:
        return
    conformer = Chem.Conformer(len(component))
    for index, point in enumerate(complete[0].astype(np.float64)):
        conformer.SetAtomPosition(index, point)
    mol.AddConformer(conformer, assignId=True)
    Chem.AssignStereochemistryFrom3D(mol)
    mol.RemoveAllConformers()
    for atom in mol.GetAtoms():
        if any(near.GetAtomicNum() in _METALS for near in (atom, *atom.GetNeighbors())):
            atom.SetChiralTag(Chem.ChiralType.CHI_UNSPECIFIED)


def _embedded(mol: Chem.Mol, seed: int, timeout_s: float) -> NDArray[np.float64]:
    for random_coords, attempts in ((False, _ATTEMPTS), (True, _RANDOM_ATTEMPTS)):
        params = rdDistGeom.ETKDGv3()
        settings = {
            "randomSeed": seed,
            "numThreads": 1,
            "maxIterations": attempts,
            "useRandomCoords": random_coords,
            "timeout": max(1, round(timeout_s / 2)),
            "trackFailures": True,
            # Parts that no bond joins are embedded together, else they would lie upon each other.
            "embedFragmentsSeparately": False,
        }
        for name, value in settings.items():
            setattr(params, name, value)
        if rdDistGeom.EmbedMolecule(mol, params) >= 0:
            return np.array(mol.GetConformer().GetPositions(), np.float64)
        counts = params.GetFailureCounts()
        if any(counts[_TIMED_OUT : _TIMED_OUT + 1]):
            raise EmbedError("timeout")
    raise EmbedError("embedding")


def _is_distorted(component: Component, pos: NDArray[np.float64]) -> bool:
    """Whether a bond of heavy atoms is too short or too long: RDKit has no parameters for many metals."""
    table = Chem.GetPeriodicTable()
    radii = np.array([table.GetRcovalent(element) for element in component.elements.tolist()])
    checked = (component.heavy & (component.elements > 0))[component.bonds].all(axis=1)
    i, j = component.bonds[checked].T
    ratio = np.linalg.norm(pos[i] - pos[j], axis=1) / (radii[i] + radii[j])
    metal = np.isin(component.elements, sorted(_METALS))
    low, high = np.where((metal[i] | metal[j])[:, None], _METAL_BOND_RANGE, _BOND_RANGE).T
    return bool(((ratio < low) | (ratio > high)).any())


def _dictionary_positions(component: Component) -> tuple[NDArray[np.float64], RefOrigin]:
    """The definition's coordinates: complete ones first, then ideal before model."""
    choices: Sequence[tuple[NDArray[np.float32], RefOrigin]] = (
        (component.ideal_pos, RefOrigin.IDEAL),
        (component.model_pos, RefOrigin.MODEL),
    )
    wanted = component.heavy
    for complete in (True, False):
        for pos, origin in choices:
            known = np.asarray(np.isfinite(pos).all(axis=1))
            if known.any() and _is_usable(pos, wanted if complete else known):
                return pos.astype(np.float64), origin
    return np.full((len(component), 3), np.nan), RefOrigin.NONE


def _centred(pos: NDArray[np.float64], heavy: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Positions about the mean of the heavy atoms that have any, rounded; zero is never negative."""
    known = np.asarray(np.isfinite(pos).all(axis=1))
    pos = np.where(known[:, None], pos, np.nan)
    if known.any():
        chosen = known & heavy if (known & heavy).any() else known
        pos = pos - pos[chosen].mean(axis=0)
    return np.asarray(np.round(pos, 3) + 0.0, np.float32)


def _is_usable(pos: NDArray[np.float32], wanted: NDArray[np.bool_]) -> bool:
    """Whether all wanted atoms have coordinates of their own: some files hold zeros for all."""
    chosen = pos[wanted]
    return bool(np.isfinite(chosen).all()) and len(np.unique(chosen, axis=0)) == len(chosen)
