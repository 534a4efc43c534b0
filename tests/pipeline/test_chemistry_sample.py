"""500 components of the bundled dictionary against what biotite reads of them and gemmi knows of elements.

The sample: the 50 of most atoms; all whose only heavy atom is a metal; 68 of the others that have a metal,
and as many of the rest as make 500, by the SHA-256 of their codes.
"""

import hashlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gemmi
import numpy as np
import pytest
from biotite.structure.info.ccd import get_ccd
from numpy.typing import NDArray

from megafold.pipeline.chemistry.reference import ReferenceComponent
from megafold.pipeline.schema import RefOrigin
from tests.pipeline.component_sample_worker import SLOW, open_dictionary, reference

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SIZE, LARGEST, WITH_METAL = 500, 50, 68
#: Bonds over the sum of Cordero's covalent radii, which gemmi has.
BONDS, BONDS_OF_HYDROGEN, BONDS_OF_METALS = (0.75, 1.25), (0.75, 1.4), (0.6, 1.35)
FAILURES = {"valence", "sanitization", "embedding", "distorted", "rdkit-error"}


@dataclass(frozen=True)
class Definition:
    """One component as biotite reads it; ``pos`` ideal coordinates, else the model's, NaN where missing."""

    names: list[str]
    elements: list[str]
    stereo: NDArray[np.str_]
    pos: NDArray[np.float64]
    bonds: NDArray[np.int64]

    @cached_property
    def heavy(self) -> NDArray[np.bool_]:
        return np.array([element not in ("H", "D") for element in self.elements])

    @cached_property
    def metal(self) -> NDArray[np.bool_]:
        return np.array([gemmi.Element(element).is_metal for element in self.elements])

    @cached_property
    def radii(self) -> NDArray[np.float64]:
        return np.array([gemmi.Element(element).covalent_r for element in self.elements])

    def neighbours(self, atom: int) -> list[int]:
        return sorted({*self.bonds[(self.bonds == atom).any(axis=1)].ravel().tolist()} - {atom})


IDEAL = tuple(f"pdbx_model_Cartn_{axis}_ideal" for axis in "xyz")
MODEL = tuple(f"model_Cartn_{axis}" for axis in "xyz")


class Dictionary:
    """The bundled dictionary as biotite reads it, each column once: they have millions of rows."""

    def __init__(self) -> None:
        block = get_ccd()
        self._atoms, self._bonds = block["chem_comp_atom"], block["chem_comp_bond"]
        self._codes = text(self._atoms, "comp_id")
        self._elements = text(self._atoms, "type_symbol")

    def sample(self) -> dict[str, list[str]]:
        codes, component, atoms = np.unique(self._codes, return_inverse=True, return_counts=True)
        symbols, element = np.unique(self._elements, return_inverse=True)
        is_metal = np.array([gemmi.Element(symbol).is_metal for symbol in symbols])[element]
        is_heavy = ~np.isin(symbols, ("H", "D"))[element]
        heavy, metals = (np.bincount(component, weights=w) for w in (is_heavy, is_metal))
        largest = codes[np.lexsort((codes, -atoms))[:LARGEST]].tolist()
        ions = codes[(heavy == 1) & (metals == 1)].tolist()
        by_hash = sorted(codes.tolist(), key=lambda code: hashlib.sha256(code.encode()).digest())
        taken, of_metals = {*largest, *ions}, {*codes[metals > 0].tolist()}
        with_metal = [code for code in by_hash if code in of_metals - taken][:WITH_METAL]
        taken |= {*with_metal}
        rest = [code for code in by_hash if code not in taken][: SIZE - len(taken)]
        return {"largest": largest, "ions": ions, "with metal": with_metal, "rest": rest}

    def definitions(self, codes: list[str]) -> dict[str, Definition]:
        atoms = np.flatnonzero(np.isin(self._codes, codes))
        bonds = np.flatnonzero(np.isin(text(self._bonds, "comp_id"), codes))
        owners, bond_owners = self._codes[atoms], text(self._bonds, "comp_id")[bonds]
        names, elements = text(self._atoms, "atom_id")[atoms], self._elements[atoms]
        stereo = text(self._atoms, "pdbx_stereo_config")[atoms]
        ends = np.stack([text(self._bonds, f"atom_id_{end}")[bonds] for end in (1, 2)], axis=1)
        ideal, model = (
            np.stack(
                [self._atoms[name].as_array(np.float64, masked_value=np.nan)[atoms] for name in columns], 1
            )
            for columns in (IDEAL, MODEL)
        )
        found = {}
        for code in codes:
            rows = owners == code
            index = {name: place for place, name in enumerate(names[rows].tolist())}
            pairs = [[index[a], index[b]] for a, b in ends[bond_owners == code].tolist()]
            found[code] = Definition(
                names=names[rows].tolist(),
                elements=elements[rows].tolist(),
                stereo=stereo[rows],
                pos=ideal[rows] if np.isfinite(ideal[rows]).all() else model[rows],
                bonds=np.array(pairs, np.int64).reshape(-1, 2),
            )
        return found


def text(category: Any, column: str) -> NDArray[np.str_]:
    found: NDArray[np.str_] = category[column].as_array()
    return found


@pytest.fixture(scope="module")
def dictionary() -> Dictionary:
    return Dictionary()


@pytest.fixture(scope="module")
def sample(dictionary) -> dict[str, list[str]]:
    return dictionary.sample()


@pytest.fixture(scope="module")
def references(sample) -> dict[str, ReferenceComponent]:
    """By code; the largest are begun first."""
    codes = [code for group in sample.values() for code in group]
    with ProcessPoolExecutor(
        min(2, os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=open_dictionary,
    ) as pool:
        return dict(zip(codes, pool.map(reference, codes), strict=True))


@pytest.fixture(scope="module")
def definitions(dictionary, references) -> dict[str, Definition]:
    found: dict[str, Definition] = dictionary.definitions([*references])
    return found


def test_the_sample_is_what_it_says(sample, references):
    assert {name: len(group) for name, group in sample.items()} == {
        "largest": 50,
        "ions": 82,
        "with metal": 68,
        "rest": 300,
    }
    assert len(references) == SIZE
    assert {"ZN", "MG", "NA", "FE2", "U1", "CF"} <= set(sample["ions"])
    assert sample["largest"][0] == "JSG"


def test_all_have_coordinates_and_nearly_all_from_rdkit(references, sample):
    origins = {code: ref.origin for code, ref in references.items()}
    # for ZPT, a cluster of platinum, the dictionary has none either
    assert {code for code, ref in references.items() if not ref.ref_mask.any()} == {"ZPT"}
    for code, ref in references.items():
        assert (ref.failure == "") == (ref.origin == RefOrigin.RDKIT), code
        assert ref.failure in FAILURES | {""} or code in SLOW, code
    assert all(origins[code] == RefOrigin.RDKIT for code in sample["ions"])
    assert sum(origins[code] == RefOrigin.RDKIT for code in sample["largest"]) >= 48
    assert sum(origins[code] == RefOrigin.RDKIT for code in sample["rest"]) >= 294
    assert sum(origins[code] == RefOrigin.RDKIT for code in sample["with metal"]) >= 30


def test_atoms_are_the_dictionary_s_and_finite(references, definitions):
    for code, ref in references.items():
        expected = definitions[code]
        assert list(ref.atom_names) == expected.names
        assert [gemmi.Element(int(number)).name for number in ref.elements] == [
            gemmi.Element(symbol).name for symbol in expected.elements
        ]
        if ref.origin == RefOrigin.RDKIT:
            assert ref.ref_mask.all(), code
        elif np.isfinite(expected.pos[expected.heavy]).all():
            assert ref.ref_mask[expected.heavy].all(), code
        assert np.isfinite(ref.ref_pos[ref.ref_mask]).all()
        if ref.ref_mask.any():
            assert np.abs(ref.ref_pos[ref.ref_mask & expected.heavy].mean(axis=0)).max() < 2e-3, code


def test_coordinates_of_the_dictionary_are_moved_and_not_changed(references, definitions):
    found = 0
    for code, ref in references.items():
        pos = definitions[code].pos
        if ref.origin in (RefOrigin.IDEAL, RefOrigin.MODEL) and np.isfinite(pos).all():
            shift = pos - ref.ref_pos
            assert np.ptp(shift, axis=0).max() < 2.5e-3, code
            found += 1
    assert found >= 5


def test_bonds_are_as_long_as_covalent_radii_say(references, definitions):
    count, wrong = 0, []
    for code, ref in references.items():
        known = definitions[code]
        if ref.origin != RefOrigin.RDKIT or not len(known.bonds):
            continue
        i, j = known.bonds.T
        ratio = np.linalg.norm(ref.ref_pos[i] - ref.ref_pos[j], axis=1) / (known.radii[i] + known.radii[j])
        metal, heavy = known.metal[i] | known.metal[j], known.heavy[i] & known.heavy[j]
        limits = np.where(metal[:, None], BONDS_OF_METALS, np.where(heavy[:, None], BONDS, BONDS_OF_HYDROGEN))
        bad = (ratio < limits[:, 0]) | (ratio > limits[:, 1])
        count += len(bad)
        wrong += [
            (code, known.names[a], known.names[b], round(float(r), 2))
            for a, b, r in zip(i[bad], j[bad], ratio[bad], strict=True)
        ]
    assert count > 20_000
    assert wrong == []


def test_carbon_centres_keep_the_hand_of_the_dictionary_s_coordinates(references, definitions):
    """Signed volumes of the first three neighbours, of the centres that the dictionary calls R or S."""
    count, wrong = 0, []
    for code, ref in references.items():
        known = definitions[code]
        if ref.origin != RefOrigin.RDKIT or not np.isfinite(known.pos).all():
            continue
        for centre in np.flatnonzero(np.isin(known.stereo, ("R", "S"))).tolist():
            near = known.neighbours(centre)
            if known.elements[centre] != "C" or len(near) != 4 or known.metal[near].any():
                continue
            ours, theirs = (signed_volume(pos, centre, near) for pos in (ref.ref_pos, known.pos))
            count += 1
            if ours * theirs <= 0:
                wrong.append((code, known.names[centre], round(ours, 2), round(theirs, 2)))
    assert count > 1_000
    assert wrong == []


def signed_volume(pos: NDArray[np.floating], centre: int, near: list[int]) -> float:
    return float(np.linalg.det(pos[near[:3]].astype(np.float64) - pos[centre]))


def test_automorphisms_map_the_molecule_onto_itself_and_are_a_group(references, definitions):
    groups = 0
    for code, ref in references.items():
        known = definitions[code]
        atoms = np.flatnonzero(known.heavy)
        rows = ref.automorphisms.astype(np.int64)
        assert rows.shape[1] == len(atoms)
        assert rows[0].tolist() == atoms.tolist()
        assert (np.sort(rows, axis=1) == atoms).all(), code
        assert len(np.unique(rows, axis=0)) == len(rows), code
        bonded = np.zeros((len(known.names),) * 2, bool)
        bonded[tuple(known.bonds.T)] = bonded[tuple(known.bonds[:, ::-1].T)] = True
        elements = np.array(known.elements)
        for row in rows:
            assert (elements[row] == elements[atoms]).all(), code
            assert (bonded[np.ix_(row, row)] == bonded[np.ix_(atoms, atoms)]).all(), code
        if not ref.capped and 1 < len(rows) <= 64:
            groups += 1
            place = np.zeros(len(known.names), np.int64)
            place[atoms] = np.arange(len(atoms))
            every = {row.tobytes() for row in rows}
            assert all(first[place[second]].tobytes() in every for first in rows for second in rows), code
    assert groups > 150
