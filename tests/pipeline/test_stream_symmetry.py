import itertools
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megafold.cache_store import LocalStore
from megafold.pipeline.chemistry.library import ComponentLibrary
from megafold.pipeline.manifest import manifest_from_rows
from megafold.pipeline.schema import MolType
from megafold.pipeline.stream import CropConfig, SamplingConfig, Stream, StreamConfig
from megafold.pipeline.stream.crop_view import CropView
from megafold.pipeline.stream.entry import EntryTables
from megafold.pipeline.stream.memory import Recent
from megafold.pipeline.stream.symmetry import (
    ChainCandidates,
    Symmetry,
    chain_bonds,
    exchanges,
    residue_automorphisms,
)
from megafold.pipeline.stream.symmetry import _orders as residue_orders
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    chains = [
        Chain(["ALA", "GLY", "LYS"], sym=1, unresolved={1}),
        Chain(["ALA", "GLY", "LYS"], sym=2, origin=(0, 9, 0)),
        Chain(["GLY"] * 2, entity=2, origin=(0, 20, 0)),
        Chain(["ZN"], MolType.LIGAND, entity=3, sym=1, origin=(5, 3, 0)),
        Chain(["ZN"], MolType.LIGAND, entity=3, sym=2, origin=(5, 6, 0)),
    ]
    path = tmp_path_factory.mktemp("symmetry") / "cache"
    content = fake.structure("1abc", chains, (), [(0, 1)])
    fake.publish(path, [(content, chains, "")])
    sampling = SamplingConfig(epoch_size=50)
    return content, [
        Stream(path, StreamConfig(crop=CropConfig(tokens=tokens, atoms=60), sampling=sampling, seed=4))
        for tokens in (64, 3)
    ]


def test_candidates_are_the_copies_in_the_samples_frame(streams):
    content, (whole, small) = streams
    true = content.arrays["atom_coords"].astype(np.float64)
    first = dict(zip(content.arrays["chains"][0], content.arrays["chains"][8], strict=True))
    for stream, index in itertools.product((whole, small), range(10)):
        features, symmetry = stream.sample(index).features, stream.symmetry(index)
        asym = features["asym_id"][features["atom_to_token"]]
        chains = [(found.asym_id, list(found.candidate_asym_id)) for found in symmetry.chains]
        expected = {1: [1, 2], 2: [1, 2], 4: [4, 5], 5: [4, 5]}
        assert chains == [(a, expected[a]) for a in sorted(set(asym)) if a in expected]
        for found in symmetry.chains:
            assert list(found.atoms) == list(np.flatnonzero(asym == found.asym_id))
            own = list(found.candidate_asym_id).index(found.asym_id)
            np.testing.assert_array_equal(found.coords[own], features["coords"][found.atoms])
            np.testing.assert_array_equal(found.coords_mask[own], features["coords_mask"][found.atoms])
            if stream is whole:
                # Distances between the crop's atoms and a candidate's are those of the structure.
                for place, candidate in enumerate(found.candidate_asym_id):
                    mask = found.coords_mask[place]
                    there = true[first[candidate] : first[candidate] + len(found.atoms)]
                    np.testing.assert_array_equal(mask, ~np.isnan(there[:, 0]))
                    reference = features["coords"][0].astype(np.float64)
                    ours = np.linalg.norm(found.coords[place][mask] - reference, axis=1)
                    np.testing.assert_allclose(ours, np.linalg.norm(there[mask] - true[0], axis=1), atol=1e-3)


def test_corresponding_atoms_of_copies_share_their_places(streams):
    _, (whole, small) = streams
    for stream, index in itertools.product((whole, small), range(10)):
        features, symmetry = stream.sample(index).features, stream.symmetry(index)
        position = features["residue_index"][features["atom_to_token"]]
        entity = features["entity_id"][features["atom_to_token"]]
        names: dict = {}
        for found in symmetry.chains:
            assert (np.diff(found.places) > 0).all()
            for place, atom in zip(found.places.tolist(), found.atoms, strict=True):
                name = (int(position[atom]), tuple(features["ref_atom_name_chars"][atom]))
                assert names.setdefault((int(entity[atom]), place), name) == name
        assert len({(key[0], *name) for key, name in names.items()}) == len(names)
        assert stream is small or len(names) == 20  # 5 + 4 + 10 atoms of the peptide, a zinc ion


def flipping_library():
    """The test library, in which the ligand's C2, O1 and C3 can be exchanged in two ways."""
    content = fake.library()
    arrays = dict(content.arrays)
    place = content.attributes["keys"].index("LGD")
    components = arrays["components"].copy()
    start = components[4, place]
    extra = np.array([0, 2, 1, 3, 0, 1, 3, 2], np.int16)
    arrays["automorphisms"] = np.insert(arrays["automorphisms"], start + 4, extra)
    components[5, place] = 3
    components[4, place + 1 :] += 8
    arrays["components"] = components
    return type(content)(arrays=arrays, attributes=content.attributes)


#: One for all the crops below: what one finds must not mislead the next.
KNOWN: Recent = Recent(100)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4], [[4, 5, 6, 7], [4, 5, 7, 6], [4, 6, 5, 7]]),
        ([1, 2, 3], [[4, 5, 6], [4, 6, 5]]),  # without C3 only the exchange of C2 and O1 is left
        ([1, 2], None),
        ([2, 3], [[4, 5], [5, 4]]),
    ],
)
def test_automorphisms_of_what_is_in_the_crop(tokens, expected):
    chains = [Chain(["GLY"]), Chain(["LGD"], MolType.LIGAND, entity=2)]
    content = fake.structure("1abc", chains)
    entry = EntryTables.from_arrays(content.arrays, content.attributes)
    view = CropView.of(entry, np.array([0, *tokens]))
    library = ComponentLibrary.from_content(flipping_library())
    component_atom = content.arrays["atoms"][0][view.atoms]
    found = residue_automorphisms(view, library, component_atom, KNOWN)
    again = residue_automorphisms(view, library, component_atom, KNOWN)
    assert [images.tolist() for images in again] == [images.tolist() for images in found]
    shift = 5 - 4  # GLY alone has five atoms: N CA C O OXT
    if expected is None:
        assert found == ()
    else:
        assert len(found) == 1
        assert found[0][0].tolist() == [atom + shift for atom in expected[0]]
        assert sorted(found[0].tolist()) == sorted([atom + shift for atom in row] for row in expected)


def test_arginines_nitrogens_are_told_apart_in_chains_alone():
    # A flat group has no handedness that would tell them; the two oxygens stay alike.
    guanidinium: Any = SimpleNamespace(
        atom_names=["NE", "CZ", "HE", "NH1", "NH2", "O", "OXT"],
        heavy_atoms=np.array([0, 1, 3, 4, 5, 6]),
        automorphisms=np.array([[0, 1, *n, *o] for n in ([3, 4], [4, 3]) for o in ([5, 6], [6, 5])]),
        bonds=np.array([[0, 1], [0, 2], [1, 3], [1, 4]]),
        ref_pos=np.array(
            [[0, 1, 0], [0, 0, 0], [1, 1.5, 0], [-0.9, -0.5, 0], [0.9, -0.5, 0], *[[9, 9, 9]] * 2]
        ),
    )
    library: Any = {"ARG": guanidinium, "GDN": guanidinium}
    here = np.array([0, 1, 3, 4, 5, 6], np.int32)
    oxygens = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5, 4]]
    assert residue_orders(library, "ARG", here, by_handedness=True).tolist() == oxygens
    assert len(residue_orders(library, "ARG", here, by_handedness=False)) == 4
    assert len(residue_orders(library, "GDN", here, by_handedness=True)) == 4


def test_bonds_between_chains_are_named_alike_in_copies():
    peptides = [Chain(["ALA", "LYS"], sym=sym, origin=(0, 9 * sym, 0)) for sym in (1, 2)]
    ligands = [Chain(["LGD"], MolType.LIGAND, entity=2, sym=sym, origin=(2, 9 * sym, 0)) for sym in (1, 2)]
    bonds = [((c, 1, "NZ"), (c + 2, 0, "C2")) for c in (0, 1)]
    bonds += [((0, 0, "CB"), (2, 0, "C3")), ((0, 0, "CB"), (0, 1, "NZ"))]  # the last within a chain
    content = fake.structure("1abc", peptides + ligands, bonds)
    found = chain_bonds(EntryTables.from_arrays(content.arrays, content.attributes))
    ends = {tuple((chain, token) for chain, _, token in bond) for bond in found.tolist()}
    # By hand: tokens 1 and 2 are chain 1, 3 and 4 chain 2; 5 to 8 and 9 to 12 the ligands C1, C2, O1, C3.
    one_way = {((1, 2), (3, 6)), ((2, 4), (4, 10)), ((1, 1), (3, 8))}
    assert len(found) == 6
    assert ends == one_way | {bond[::-1] for bond in one_way}
    place = {(chain, token): place for chain, place, token in found.reshape(-1, 3).tolist()}
    assert place[1, 2] == place[2, 4] != place[1, 1]
    assert place[3, 6] == place[4, 10] != place[3, 8]


def test_a_crop_without_copies_has_no_candidates(tmp_path):
    chains = [Chain(["ALA"] * 3)]
    store = LocalStore.create(tmp_path / "c")
    content = fake.structure("1abc", chains)
    row = fake.row_of(content, store.put(content), chains)
    attributes = {"components": str(store.put(fake.library())), "config": {}, "versions": {}}
    store.move_ref("main", None, store.put_manifest(manifest_from_rows([row], attributes)))
    symmetry = Stream(tmp_path / "c").symmetry(0)
    assert symmetry.chains == ()
    assert symmetry.automorphisms == ()


def test_samples_carry_their_symmetry_if_asked(streams):
    _, both = streams
    for stream in both:
        config = replace(stream.config, symmetry=True)
        asked = Stream(stream._cache, config)
        assert asked.identity() == stream.identity()  # the samples are the same
        for index in range(5):
            sample, plain = asked.sample(index), stream.sample(index)
            assert plain.symmetry is None
            assert sample.meta == plain.meta
            for name, value in plain.features.items():
                np.testing.assert_array_equal(sample.features[name], value)
            expected = stream.symmetry(index)
            found = sample.symmetry
            assert found is not None
            for ours, theirs in zip(found.automorphisms, expected.automorphisms, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            for mine, other in zip(found.chains, expected.chains, strict=True):
                for field in fields(ChainCandidates):
                    np.testing.assert_array_equal(getattr(mine, field.name), getattr(other, field.name))


def some_chain(asym_id, atom, candidates=(1, 2, 3)):
    count = len(candidates)
    return ChainCandidates(
        asym_id=asym_id,
        atoms=np.array([atom]),
        places=np.array([0]),
        candidate_asym_id=np.array(candidates),
        coords=np.arange(3 * count, dtype=np.float32).reshape(count, 1, 3),
        coords_mask=np.arange(count)[:, None] != 1,
    )


def both_ways(*bonds):
    """Rows of ``Symmetry.bonds``: (asym_id, place, token_index) of both ends."""
    return np.array(
        [[list(one), list(other)] for bond in bonds for one, other in (bond, bond[::-1])]
    ).reshape(-1, 2, 3)


def test_exchanges_of_chains_that_are_bonded_to_nothing():
    images = [np.array([[0, 1], [1, 0]]), np.array([[2, 3, 4], [4, 3, 2]]), np.array([[5, 6], [6, 5]])]
    symmetry = Symmetry(
        automorphisms=tuple(images), chains=(some_chain(1, 0), some_chain(2, 1)), bonds=both_ways()
    )
    features, _ = glycoprotein()
    features["token_bonds"][:] = False
    features["token_bonds"][3, 4] = features["token_bonds"][4, 3] = True  # within the glycan
    found = exchanges(features, symmetry)
    assert [group.tolist() for group in found["orders"]] == [
        [[[0, 1], [1, 0]], [[5, 6], [6, 5]]],
        [[[2, 3, 4], [4, 3, 2]]],
    ]
    assert names(found) == [([0], [[1], [2], [3]], 0), ([1], [[1], [2], [3]], 1)]
    assert exchanges(features, None) == {"orders": [], "chains": []}


def names(found):
    return [(c["atoms"].tolist(), c["candidates"].tolist(), int(c["own"])) for c in found["chains"]]


def glycoprotein(*bonds):
    """Chains 1 to 3 are copies, and so are the glycans 4 to 6; in the crop are 1, 2 and 4, which is on 1.

    Returns the features, and the symmetry with this bond (at place 7, by the glycan's first atom) and others.
    """
    features = {
        "asym_id": np.array([1, 1, 2, 4, 4]),
        "token_index": np.array([3, 8, 13, 31, 32]),
        "atom_to_token": np.array([0, 2, 3]),
        "token_bonds": np.zeros((5, 5), bool),
    }
    features["token_bonds"][1, 3] = features["token_bonds"][3, 1] = True
    chains = (some_chain(1, 0), some_chain(2, 1), some_chain(4, 2, candidates=(4, 5, 6)))
    own = ((1, 7, 8), (4, 0, 31))
    return features, Symmetry(automorphisms=(), chains=chains, bonds=both_ways(own, *bonds))


@pytest.mark.parametrize(
    ("bonds", "together", "alone"),
    [
        # Nowhere else is such a bond: what is bonded keeps its place, and nobody else can have it.
        ([], None, [[2], [3]]),
        ([((3, 6, 28), (5, 0, 41))], None, [[2], [3]]),  # at another place of the chain
        ([((3, 7, 28), (5, 1, 42))], None, [[2], [3]]),  # by another atom of the glycan
        # The third chain has one of its own, and the second one too.
        ([((3, 7, 28), (5, 0, 41))], [[1, 4], [3, 5]], [[1], [2], [3]]),
        (
            [((3, 7, 28), (5, 0, 41)), ((2, 7, 18), (6, 0, 51))],
            [[1, 4], [2, 6], [3, 5]],
            [[1], [2], [3]],
        ),
    ],
)
def test_bonded_chains_are_exchanged_together(bonds, together, alone):
    features, symmetry = glycoprotein(*bonds)
    found = exchanges(features, symmetry)
    expected = [] if together is None else [([0, 2], together, 0)]
    assert names(found) == [*expected, ([1], alone, alone.index([2]))]
    chains, glycans = some_chain(1, 0), some_chain(4, 2, candidates=(4, 5, 6))
    for exchange in found["chains"][: len(expected)]:
        for row, (chain, glycan) in enumerate(exchange["candidates"]):
            assert exchange["coords"][row].tolist() == [
                *chains.coords[chain - 1].tolist(),
                *glycans.coords[glycan - 4].tolist(),
            ]
            assert exchange["coords_mask"][row].tolist() == [chain != 2, glycan != 5]


def test_a_ligand_between_two_copies_stays_where_it_is():
    """A zinc ion, 4, that two copies hold alike: they may be exchanged around it."""
    features, symmetry = glycoprotein(((2, 7, 13), (4, 0, 31)))
    features["token_bonds"][2, 3] = features["token_bonds"][3, 2] = True
    symmetry = replace(symmetry, chains=symmetry.chains[:2])
    features |= {"coords": np.full((3, 3), 9.0, np.float32), "coords_mask": np.ones(3, bool)}
    (found,) = exchanges(features, symmetry)["chains"]
    assert (found["atoms"].tolist(), found["candidates"].tolist()) == ([0, 1, 2], [[1, 2, 4], [2, 1, 4]])
    assert found["coords"][:, 2].tolist() == [[9.0] * 3] * 2
    assert found["coords"][:, :2, 0].tolist() == [[0, 3], [3, 0]]
