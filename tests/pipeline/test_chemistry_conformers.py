"""Reference conformers: quality, the ladder of fall-backs, and the same result whoever asks."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import gemmi
import numpy as np
import pytest

from megafold.pipeline.chemistry import Component, load_dictionary
from megafold.pipeline.chemistry import conformers as conformers_module
from megafold.pipeline.chemistry.conformers import build_reference
from megafold.pipeline.chemistry.reference import ReferenceComponent
from megafold.pipeline.errors import ComponentError
from megafold.pipeline.schema import AMINO_ACIDS, DNA_BASES, RNA_BASES, RefOrigin

STANDARD = (*AMINO_ACIDS, *RNA_BASES, *DNA_BASES)


@pytest.fixture(scope="module")
def dictionary():
    return load_dictionary()


@pytest.fixture(scope="module")
def standard(dictionary):
    return {code: build_reference(dictionary.get(code)) for code in STANDARD}


@pytest.fixture
def no_embedding(monkeypatch):
    """RDKit's way to say that it failed."""
    monkeypatch.setattr(conformers_module.rdDistGeom, "EmbedMolecule", lambda mol, params: -1)


def heavy_bonds(ref: ReferenceComponent) -> np.ndarray:
    return ref.bonds[(ref.elements != 1)[ref.bonds].all(axis=1)]


def signed_volume(pos: np.ndarray, centre: int, others: list[int]) -> float:
    a, b, c = (pos[other].astype(np.float64) - pos[centre] for other in others)
    return float(np.dot(np.cross(a, b), c))


def chain(length: int, **atoms) -> Component:
    names = [f"C{number}" for number in range(length)]
    bonds = [(number, number + 1) for number in range(length - 1)]
    return Component.from_atoms("LIG", names, [6] * length, bonds=bonds, **atoms)


@pytest.mark.parametrize("code", STANDARD)
def test_standard_residues_come_from_rdkit_with_sound_bonds(dictionary, standard, code):
    ref, component = standard[code], dictionary.get(code)
    assert (ref.origin, ref.failure) == (RefOrigin.RDKIT, "")
    assert ref.ref_mask.all()
    i, j = heavy_bonds(ref).T
    ours = np.linalg.norm(ref.ref_pos[i] - ref.ref_pos[j], axis=1)
    ideal = np.linalg.norm(component.ideal_pos[i] - component.ideal_pos[j], axis=1)
    assert np.abs(ours - ideal).max() < 0.12
    assert np.abs(ref.ref_pos[ref.elements != 1].mean(axis=0)).max() < 1e-3
    np.testing.assert_array_equal(ref.ref_pos, np.round(ref.ref_pos.astype(np.float64), 3).astype(np.float32))


@pytest.mark.parametrize("code", [code for code in AMINO_ACIDS if code != "GLY"])
def test_amino_acids_are_left_handed(standard, code):
    """From N over C to CB about CA: positive for L amino acids, as in restraint libraries."""
    names = standard[code].atom_names
    centre, *others = (names.index(name) for name in ("CA", "N", "C", "CB"))
    assert signed_volume(standard[code].ref_pos, centre, others) > 1.5


@pytest.mark.corpus
@pytest.mark.parametrize("code", STANDARD)
def test_every_stereocentre_has_the_handedness_of_the_ideal_coordinates(standard, corpus_dir, code):
    """The ideal coordinates as gemmi reads them."""
    document = gemmi.cif.read(str(corpus_dir / "ccd" / "components.cif.gz"))
    table = document.find_block(code).find(
        "_chem_comp_atom.",
        ["atom_id", "pdbx_stereo_config", *(f"pdbx_model_Cartn_{axis}_ideal" for axis in "xyz")],
    )
    ideal = np.array([[float(row[column]) for column in (2, 3, 4)] for row in table])
    ref = standard[code]
    for centre in [number for number, row in enumerate(table) if row[1] in "RS"]:
        others = sorted({*ref.bonds[(ref.bonds == centre).any(axis=1)].ravel().tolist()} - {centre})[:3]
        assert np.sign(signed_volume(ref.ref_pos, centre, others)) == np.sign(
            signed_volume(ideal, centre, others)
        )


@pytest.mark.parametrize(
    ("code", "origin", "failure"),
    [
        ("ZN", RefOrigin.RDKIT, ""),
        ("HEM", RefOrigin.RDKIT, ""),
        ("CLA", RefOrigin.RDKIT, ""),
        ("SF4", RefOrigin.RDKIT, ""),
        ("RAP", RefOrigin.RDKIT, ""),  # a macrocycle of 31 members
        ("UNX", RefOrigin.RDKIT, ""),
        ("UNL", RefOrigin.NONE, "no-atoms"),
        ("CFM", RefOrigin.IDEAL, "distorted"),
        ("10R", RefOrigin.IDEAL, "valence"),  # a carborane
        ("OEX", RefOrigin.MODEL, "distorted"),  # no ideal coordinates
    ],
)
def test_difficult_components_have_their_outcome(dictionary, capfd, code, origin, failure):
    ref = build_reference(dictionary.get(code))
    assert (ref.origin, ref.failure) == (origin, failure)
    assert ref.ref_mask.all()
    assert capfd.readouterr() == ("", "")


def test_haem_is_flat_around_its_iron(dictionary):
    ref = build_reference(dictionary.get("HEM"))
    iron, *nitrogens = (ref.atom_names.index(name) for name in ("FE", "NA", "NB", "NC", "ND"))
    lengths = np.linalg.norm(ref.ref_pos[nitrogens] - ref.ref_pos[iron], axis=1)
    assert ((lengths > 1.8) & (lengths < 2.3)).all()
    assert abs(signed_volume(ref.ref_pos, nitrogens[0], [iron, *nitrogens[1:3]])) < 4


def test_a_failed_embedding_is_a_failure(dictionary, no_embedding):
    component = dictionary.get("ALA")
    ref = build_reference(component)
    assert (ref.origin, ref.failure) == (RefOrigin.IDEAL, "embedding")
    shift = component.ideal_pos[component.heavy].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(ref.ref_pos, component.ideal_pos - shift, atol=1e-3)


def test_model_coordinates_follow_ideal_ones_and_nothing_follows_them(dictionary, no_embedding):
    component = dictionary.get("ALA")
    absent = np.full((len(component), 3), np.nan)
    model = build_reference(dataclasses.replace(component, ideal_pos=absent))
    assert model.origin == RefOrigin.MODEL
    assert model.ref_mask.all()
    none = build_reference(dataclasses.replace(component, ideal_pos=absent, model_pos=absent))
    assert (none.origin, none.failure) == (RefOrigin.NONE, "embedding")
    assert np.isnan(none.ref_pos).all()
    assert not none.ref_mask.any()


def test_coordinates_that_lack_heavy_atoms_come_after_complete_ones(dictionary, no_embedding):
    component = dictionary.get("ALA")
    partial = component.ideal_pos.copy()
    partial[2] = np.nan
    ref = build_reference(dataclasses.replace(component, ideal_pos=partial))
    assert ref.origin == RefOrigin.MODEL
    absent = np.full((len(component), 3), np.nan)
    ref = build_reference(dataclasses.replace(component, ideal_pos=partial, model_pos=absent))
    assert ref.origin == RefOrigin.IDEAL
    assert np.flatnonzero(~ref.ref_mask).tolist() == [2]
    heavy = ref.ref_mask & (ref.elements != 1)
    assert np.abs(ref.ref_pos[heavy].mean(axis=0)).max() < 1e-3


def test_coordinates_that_are_all_zero_are_none(dictionary, no_embedding):
    component = dictionary.get("ALA")
    zeros = np.zeros((len(component), 3))
    ref = build_reference(dataclasses.replace(component, ideal_pos=zeros, model_pos=zeros))
    assert ref.origin == RefOrigin.NONE


def test_random_coordinates_are_tried_where_the_first_strategy_fails(dictionary, monkeypatch):
    embed, seen = conformers_module.rdDistGeom.EmbedMolecule, []

    def second_time_lucky(mol, params):
        seen.append(params.useRandomCoords)
        return embed(mol, params) if len(seen) > 1 else -1

    monkeypatch.setattr(conformers_module.rdDistGeom, "EmbedMolecule", second_time_lucky)
    assert build_reference(dictionary.get("ALA")).origin == RefOrigin.RDKIT
    assert seen == [False, True]


def test_the_time_limit_ends_the_embedding_and_says_so(dictionary, monkeypatch):
    """No attempt at C60 succeeds."""
    monkeypatch.setattr(conformers_module, "_ATTEMPTS", 1_000_000)
    ref = build_reference(dictionary.get("60C"), timeout_s=1)
    assert (ref.origin, ref.failure) == (RefOrigin.IDEAL, "timeout")


def test_an_embedding_that_is_not_tried_has_the_failure_it_is_given(dictionary):
    ref = build_reference(dictionary.get("ALA"), skip_embedding="worker-died")
    assert (ref.origin, ref.failure) == (RefOrigin.IDEAL, "worker-died")
    assert ref.ref_mask.all()


def test_too_many_atoms_are_not_embedded():
    pos = np.arange(4200, dtype=float).reshape(1400, 3)
    ref = build_reference(chain(1400, pos=pos))
    assert (ref.origin, ref.failure) == (RefOrigin.MODEL, "too-many-atoms")
    with pytest.raises(ComponentError, match="LIG"):
        build_reference(chain(40_000))


def test_an_own_definition_without_hydrogens_is_embedded_with_them():
    ref = build_reference(chain(4, bond_orders=[1, 2, 1]))
    assert ref.origin == RefOrigin.RDKIT
    lengths = np.linalg.norm(np.diff(ref.ref_pos, axis=0), axis=1)
    np.testing.assert_allclose(lengths, [1.5, 1.33, 1.5], atol=0.06)


@pytest.mark.parametrize(("element", "bonds"), [(8, 3), (7, 4), (5, 4)])
def test_charges_that_a_definition_left_out(element, bonds):
    """Oxonium, ammonium, borate: embedded with the charge that their valence needs; stored as they were."""
    names, pairs = (
        ["X", *(f"C{number}" for number in range(bonds))],
        [(0, number + 1) for number in range(bonds)],
    )
    ref = build_reference(Component.from_atoms("LIG", names, [element, *[6] * bonds], bonds=pairs))
    assert (ref.origin, ref.failure) == (RefOrigin.RDKIT, "")
    assert not ref.charges.any()


def test_a_valence_that_no_charge_explains_is_a_failure():
    names, pairs = ["X", *(f"C{number}" for number in range(5))], [(0, number + 1) for number in range(5)]
    ref = build_reference(Component.from_atoms("LIG", names, [7, *[6] * 5], bonds=pairs))
    assert (ref.origin, ref.failure) == (RefOrigin.NONE, "valence")


def test_parts_that_no_bond_joins_do_not_lie_upon_each_other():
    ref = build_reference(Component.from_atoms("LIG", ["C1", "C2", "C3"], [6, 6, 6], bonds=[(0, 1)]))
    assert ref.origin == RefOrigin.RDKIT
    assert np.linalg.norm(ref.ref_pos[:2] - ref.ref_pos[2], axis=1).min() > 1.5


def test_aromatic_bonds_of_unknown_order(dictionary):
    ring = [(number, (number + 1) % 6) for number in range(6)]
    component = Component.from_atoms("LIG", [f"C{number}" for number in range(6)], [6] * 6, bonds=ring)
    ref = build_reference(dataclasses.replace(component, bond_aromatic=np.ones(6, bool)))
    assert ref.origin == RefOrigin.RDKIT
    i, j = ref.bonds.T
    np.testing.assert_allclose(np.linalg.norm(ref.ref_pos[i] - ref.ref_pos[j], axis=1), 1.39, atol=0.05)
    assert len(ref.automorphisms) == 12


@pytest.mark.parametrize("code", ["HEM", "UNL", "OEX", "SO4"])
def test_references_survive_json_exactly(dictionary, code):
    ref = build_reference(dictionary.get(code))
    back = ReferenceComponent.from_json(json.loads(json.dumps(ref.to_json())))
    for field in dataclasses.fields(ref):
        ours, theirs = getattr(ref, field.name), getattr(back, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes(), field.name
        else:
            assert ours == theirs


PROBE = """
import hashlib, json, sys
from megafold.pipeline.chemistry import load_dictionary
from megafold.pipeline.chemistry.conformers import build_reference
dictionary = load_dictionary()
found = {code: build_reference(dictionary.get(code)).to_json() for code in sys.argv[1:]}
print(hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest())
"""


def test_the_same_in_another_process_in_another_order_with_another_hash_seed():
    codes = ["ATP", "HEM", "TRP", "SF4", "IHP", "NAG"]
    root = Path(__file__).resolve().parents[2]
    digests = [
        subprocess.run(
            [sys.executable, "-c", PROBE, *order],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order, seed in ((codes, "0"), (codes[::-1], "17"))
    ]
    assert digests[0] == digests[1]
    assert len(digests[0].strip()) == 64


def test_a_neighbour_in_the_dictionary_does_not_change_the_conformer(dictionary, standard):
    again = build_reference(dictionary.get("TRP"))
    assert again.ref_pos.tobytes() == standard["TRP"].ref_pos.tobytes()
    renamed = dataclasses.replace(dictionary.get("TRP"), name="another name", key="T", code="T")
    assert build_reference(renamed).ref_pos.tobytes() == again.ref_pos.tobytes()
