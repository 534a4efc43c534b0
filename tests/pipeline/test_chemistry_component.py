"""The component definition: canonical form, digest, own definitions."""

import dataclasses
import pickle

import numpy as np
import pytest

from megafold.pipeline.chemistry import Component
from megafold.pipeline.errors import ComponentError


def water(**changes) -> Component:
    component = Component.from_atoms(
        "HOH", ["O", "H1", "H2"], [8, 1, 1], bonds=[(0, 1), (2, 0)], bond_orders=[1, 1], pos=np.eye(3)
    )
    return dataclasses.replace(component, **changes)


def test_bonds_are_sorted_with_the_lower_atom_first_and_each_is_kept_once():
    component = Component.from_atoms(
        "X", ["A", "B", "C"], [6, 6, 6], bonds=[(2, 1), (1, 0), (1, 2)], bond_orders=[2, 1, 3]
    )
    assert component.bonds.tolist() == [[0, 1], [1, 2]]
    assert component.bond_orders.tolist() == [1, 2]
    assert component.bond_rows() == [(0, 1, 1, False), (1, 2, 2, False)]


def test_the_order_of_bonds_and_of_their_atoms_is_not_part_of_the_digest():
    assert water(bonds=np.array([(0, 2), (1, 0)])).digest == water().digest


@pytest.mark.parametrize(
    "changes",
    [
        {"bond_orders": np.array([1, 2])},
        {"charges": np.array([-1, 0, 0])},
        {"leaving": np.array([False, True, False])},
        {"aromatic": np.array([True, False, False])},
        {"bond_aromatic": np.array([True, False])},
        {"stereo": np.array([1, 0, 0])},
        {"atom_names": ("O", "H1", "H3")},
        {"elements": np.array([8, 1, 9])},
        {"ideal_pos": np.ones((3, 3))},
        {"model_pos": np.ones((3, 3))},
        {"type": "L-PEPTIDE LINKING"},
        {"one_letter": "W"},
        {"parent": "ALA"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_features_depend_on_changes_the_digest(changes):
    assert water(**changes).digest != water().digest


def test_the_name_and_the_key_do_not_change_the_digest():
    assert water(name="WATER", key="ABC", code="ABC").digest == water().digest


def test_coordinates_are_rounded_so_that_noise_below_their_precision_changes_nothing():
    assert water(model_pos=np.eye(3) + 1e-5).digest == water(model_pos=np.eye(3) - 1e-5).digest
    assert water(model_pos=-np.zeros((3, 3))).digest == water(model_pos=np.zeros((3, 3))).digest


def test_an_own_definition_has_a_key_that_no_dictionary_has():
    component = water()
    assert component.key == f"~HOH:{component.digest[:12]}"
    assert component.is_own
    modified = dataclasses.replace(component, parent="LYS").as_own()
    assert modified.key == f"~HOH:{modified.digest[:12]}" != component.key


def test_an_atom_with_half_its_coordinates_has_none():
    pos = np.eye(3)
    pos[1, 2] = np.nan
    assert np.isnan(water(model_pos=pos).model_pos).all(axis=1).tolist() == [False, True, False]


def test_components_survive_pickling_and_cannot_be_changed():
    component = pickle.loads(pickle.dumps(water()))
    assert component.digest == water().digest
    with pytest.raises(ValueError, match="read-only"):
        water().charges[0] = 1


def test_bonds_may_be_absent():
    component = Component.from_atoms("ZN", ["ZN"], [30], charges=[2])
    assert component.bonds.shape == (0, 2)
    assert len(component) == 1


@pytest.mark.parametrize(
    ("atoms", "reason"),
    [
        ({"names": ["A", "A"], "elements": [6, 6]}, "repeated-atom-name"),
        ({"names": ["A", "B"], "elements": [6, 6], "bonds": [(0, 2)]}, "bad-bond"),
        ({"names": ["A", "B"], "elements": [6, 6], "bonds": [(1, 1)]}, "bad-bond"),
        ({"names": ["A", "B"], "elements": [6, 6], "bonds": [(0, 1), (1, 1)]}, "bad-bond"),
        ({"names": ["A", "B"], "elements": [6, 6], "bonds": [(0, 1), (-1, 1)]}, "bad-bond"),
        ({"names": ["A", "B"], "elements": [6]}, "bad-definition"),
        ({"names": ["A", "B"], "elements": [6, 6], "pos": np.zeros((3, 3))}, "bad-definition"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_definitions_that_do_not_fit_are_refused_by_name(atoms, reason):
    with pytest.raises(ComponentError, match="LIG") as caught:
        Component.from_atoms("LIG", **atoms)
    assert caught.value.reason == reason
