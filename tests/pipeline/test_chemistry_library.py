"""The component library: what goes in comes out, by key and as whole arrays."""

import dataclasses

import numpy as np
import pytest

from megafold.cache_store import Content
from megafold.pipeline import schema
from megafold.pipeline.chemistry import Component, load_dictionary
from megafold.pipeline.chemistry.conformers import build_reference
from megafold.pipeline.chemistry.library import ComponentLibrary, library_content
from megafold.pipeline.chemistry.reference import VERSION, stage_versions
from megafold.pipeline.schema import RefOrigin

CODES = ("ZN", "ALA", "ATP", "UNL", "HEM", "IHP")


@pytest.fixture(scope="module")
def refs():
    dictionary = load_dictionary()
    components = [dictionary.get(code) for code in CODES]
    return {component.code: build_reference(component) for component in components if component}


@pytest.fixture(scope="module")
def library(refs):
    return ComponentLibrary.from_content(library_content(list(refs.values())))


def test_the_object_fits_the_schema_and_names_its_failures(refs):
    content = library_content(list(refs.values()))
    schema.validate("component", content.arrays, content.attributes)
    assert content.attributes["keys"] == sorted(CODES)
    assert content.attributes["failures"] == {"UNL": "no-atoms"}
    assert content.attributes["capped"] == ["IHP"]
    assert content.attributes["digests"] == [refs[code].digest for code in sorted(CODES)]


def test_order_and_repetition_leave_the_digest_alone(refs):
    forward, backward = list(refs.values()), list(refs.values())[::-1]
    assert library_content(forward).digest() == library_content(backward + forward).digest()


def test_two_definitions_under_one_key_are_refused(refs):
    other = dataclasses.replace(refs["ALA"], digest="0" * 64)
    with pytest.raises(ValueError, match="ALA"):
        library_content([refs["ALA"], other])


@pytest.mark.parametrize("code", CODES)
def test_views_hold_what_went_in(refs, library, code):
    ref, view = refs[code], library[code]
    assert view.atom_names == ref.atom_names
    np.testing.assert_array_equal(view.elements, ref.elements)
    np.testing.assert_array_equal(view.charges, ref.charges)
    np.testing.assert_array_equal(view.leaving, ref.leaving)
    np.testing.assert_array_equal(view.aromatic, ref.aromatic)
    np.testing.assert_array_equal(view.stereo, ref.stereo)
    np.testing.assert_array_equal(view.ref_pos, ref.ref_pos)
    np.testing.assert_array_equal(view.ref_mask, ref.ref_mask)
    np.testing.assert_array_equal(view.bonds, ref.bonds)
    np.testing.assert_array_equal(view.bond_orders, ref.bond_orders)
    np.testing.assert_array_equal(view.bond_aromatic, ref.bond_aromatic)
    np.testing.assert_array_equal(view.automorphisms, ref.automorphisms)
    np.testing.assert_array_equal(view.heavy_atoms, np.flatnonzero(ref.elements != 1))
    assert view.origin == ref.origin


def test_views_share_memory_and_are_made_once(library):
    assert np.shares_memory(library["ATP"].ref_pos, library.ref_pos)
    assert np.shares_memory(library["ATP"].atom_name_chars, library.atom_name_chars)
    assert library["ATP"] is library["ATP"]


def test_whole_arrays_with_offsets(library):
    number = library.index["ATP"]
    assert library.keys_in_order[number] == "ATP"
    first, count = library.first_atom[number], library.atom_count[number]
    names = library.atom_name_chars[first : first + count]
    assert "".join(map(chr, names[0])) == "PG  "
    assert library.elements[first] == 15
    assert library.ref_origin[library.index["UNL"]] == RefOrigin.NONE
    assert len(library) == len(CODES)
    assert list(library) == sorted(CODES)
    assert "XYZ" not in library


def test_an_unknown_key_is_a_key_error(library):
    with pytest.raises(KeyError, match="XYZ"):
        library["XYZ"]


def test_names_are_kept_within_the_characters_that_a_model_knows():
    own = Component.from_atoms("LIG", ["c1'x9", "O~é", "N"], [6, 8, 7], bonds=[(0, 1), (0, 2)])
    view = ComponentLibrary.from_content(library_content([build_reference(own)]))[own.key]
    assert view.atom_names == ("C1'X", "O__", "N")
    assert ((view.atom_name_chars >= 32) & (view.atom_name_chars < 96)).all()


def test_a_masked_component_is_nan_in_the_library():
    lone = Component.from_atoms("LIG", ["C1", "C2"], [6, 6])
    ref = dataclasses.replace(build_reference(lone), ref_pos=np.full((2, 3), np.nan, np.float32))
    view = ComponentLibrary.from_content(library_content([ref]))[lone.key]
    assert not view.ref_mask.any()
    assert np.isnan(view.ref_pos).all()


def test_a_library_without_components():
    content = library_content([])
    assert isinstance(content, Content)
    assert len(ComponentLibrary.from_content(content)) == 0


def golden_components() -> list[Component]:
    """Defined here, so that no release of a dictionary changes them: fluoro-chloro-bromomethane, acetate."""
    halves = np.array([[0, 0, 0], [1.2, 0.8, 0], [-1.4, 1.0, 0.2], [0.1, -1.2, 1.5], [0.2, -0.6, -0.9]])
    chiral = Component.from_atoms(
        "CHX", ["C", "F", "CL", "BR", "H"], [6, 9, 17, 35, 1],
        bonds=[(0, 1), (0, 2), (0, 3), (0, 4)], bond_orders=[1] * 4, pos=halves,
    )  # fmt: skip
    flat = np.array([[0, 0, 0], [1.5, 0, 0], [2.1, 1.05, 0], [2.1, -1.05, 0]])
    acetate = Component.from_atoms(
        "ACX", ["C1", "C2", "O1", "O2"], [6, 6, 8, 8],
        bonds=[(0, 1), (1, 2), (1, 3)], bond_orders=[1, 2, 1], charges=[0, 0, 0, -1], pos=flat,
    )  # fmt: skip
    return [chiral, acetate]


#: With what the figures were made. Another RDKit is another recipe: its conformers need new ones.
GOLDEN_VERSIONS = {"chemistry": "1", "rdkit": "2026.9.1"}


def test_golden_digest_of_what_needs_no_rdkit():
    refs = [build_reference(component, skip_embedding="timeout") for component in golden_components()]
    assert [len(ref.automorphisms) for ref in refs] == [1, 2]
    assert (VERSION, str(library_content(refs).digest())) == (
        GOLDEN_VERSIONS["chemistry"],
        "5e21415879feb3eac6e11bd6d7280f7034daf7385f0df7e5aef407ae1d379676",
    )


def test_golden_digest_of_conformers():
    if stage_versions()["rdkit"] != GOLDEN_VERSIONS["rdkit"]:
        pytest.skip(f"the digest is of RDKit {GOLDEN_VERSIONS['rdkit']}; store one of this version")
    refs = [build_reference(component) for component in golden_components()]
    assert [ref.origin for ref in refs] == [RefOrigin.RDKIT] * 2
    assert (stage_versions(), str(library_content(refs).digest())) == (
        GOLDEN_VERSIONS,
        "b29c7ab95517f69b7007829436f649e22cb7a467005799a03478230e40261995",
    )
