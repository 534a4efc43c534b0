"""Exchanges of atoms and chains: each package's own rule, written out, finds the candidates' coordinates."""

import itertools

import numpy as np
import pytest

from megafold.pipeline.schema import MolType
from megafold.pipeline.stream import CropConfig, SamplingConfig, Stream, StreamConfig
from megafold.pipeline.stream.adapters import to_boltz, to_boltz_batch, to_openfold3, to_protenix
from megafold.pipeline.stream.adapters.boltz import MAX_CHAIN_SYMMETRIES
from megafold.pipeline.stream.adapters.terminal import without_terminal_atoms
from megafold.pipeline.stream.adapters.truth import whole_truth
from megafold.pipeline.stream.symmetry import Symmetry, bonded_chains
from tests.pipeline import stream_cache as fake
from tests.pipeline.adapter_samples import hand_made_sample
from tests.pipeline.stream_cache import Chain

NO_BONDS = np.empty((0, 2, 3), np.int64)
PEPTIDE = ["ALA", "GLY", "LYS", "ALA"]
CHAINS = [
    Chain(PEPTIDE, sym=1, unresolved={1}),
    Chain(PEPTIDE, sym=2, origin=(0, 9, 0)),
    Chain(PEPTIDE, sym=3, origin=(0, 18, 0)),
    Chain(["GLY"] * 2, entity=2, origin=(0, 27, 0)),
    Chain(["LGD"], MolType.LIGAND, entity=3, sym=1, origin=(5, 3, 0)),
    Chain(["LGD"], MolType.LIGAND, entity=3, sym=2, origin=(5, 6, 0)),
    Chain(["LGD"], MolType.LIGAND, entity=3, sym=3, origin=(7.6, 20, 0)),
]
#: The third peptide holds the third ligand.
BONDS = [((2, 2, "CE"), (6, 0, "C1"))]
#: asym_ids that may take each other's places: those of BONDS may not.
ALIKE = ({1, 2, 3}, {5, 6, 7})


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    path = tmp_path_factory.mktemp("exchanges") / "cache"
    fake.publish(path, [(fake.structure("1abc", CHAINS, BONDS), CHAINS, "")])
    found = []
    for tokens in (5, 9, 64):
        config = StreamConfig(
            crop=CropConfig(tokens=tokens, atoms=200), sampling=SamplingConfig(epoch_size=50), augment=False
        )
        stream = Stream(path, config)
        found += [(stream.sample(index).features, stream.symmetry(index)) for index in range(12)]
    return found


def name_of(chars):
    return "".join(chr(c + 32) for c in chars).strip()


def position(features, atom, chain):
    """Where the atom that corresponds to a crop's atom lies in another chain, by the cache's formula."""
    names = [name for name in fake.ATOMS[code_of(features, atom, chain)] if fake.element(name) > 1]
    row = features["residue_index"][features["atom_to_token"][atom]] - 1
    if row in CHAINS[chain - 1].unresolved:
        return np.full(3, np.nan)
    place = names.index(name_of(features["ref_atom_name_chars"][atom]))
    return np.array(CHAINS[chain - 1].origin) + [3.8 * row, 0.1 * place, 0]


def code_of(features, atom, chain):
    return CHAINS[chain - 1].codes[features["residue_index"][features["atom_to_token"][atom]] - 1]


def atoms_of(features, chain):
    return np.flatnonzero(features["asym_id"][features["atom_to_token"]] == chain)


def expected(features, chain, other):
    """Coordinates and mask of ``chain``'s atoms if ``other`` takes its place, in the sample's frame."""
    own = [
        position(features, atom, features["asym_id"][features["atom_to_token"][atom]])
        for atom in range(len(features["coords"]))
    ]
    center = np.nanmean(own, axis=0)
    there = np.array([position(features, atom, other) for atom in atoms_of(features, chain)]) - center
    known = ~np.isnan(there[:, 0])
    return np.where(known[:, None], there, 0), known


def allowed(features):
    """For each chain of the crop the chains that may take its place."""
    chains = set(np.unique(features["asym_id"]).tolist())
    bonded = {3, 7} if cross_bond(features) else set()
    found = {}
    for chain in chains:
        group = next((group for group in ALIKE if chain in group), {chain})
        found[chain] = {chain} if chain in bonded else group - bonded
    return found


def cross_bond(features):
    asym = features["asym_id"]
    return bool(features["token_bonds"][np.ix_(asym == 3, asym == 7)].any())


def check(features, chain, other, coords, mask, without=""):
    names = [name_of(chars) for chars in features["ref_atom_name_chars"][atoms_of(features, chain)]]
    stays = np.array([name != without for name in names])
    there, known = (array[stays] for array in expected(features, chain, other))
    np.testing.assert_array_equal(mask, known)
    np.testing.assert_allclose(coords[known], there[known], atol=1e-4)


def test_the_crops_differ(cases):
    crops = [frozenset(np.unique(features["asym_id"]).tolist()) for features, _ in cases]
    assert len(set(crops)) > 5
    assert any(cross_bond(features) for features, _ in cases)
    assert any(3 in np.unique(features["asym_id"]) and not cross_bond(features) for features, _ in cases)


def test_protenix_finds_each_candidate(cases):
    # A chain's label is the atoms of a molecule with the same mol_atom_index, in the same order.
    for features, symmetry in cases:
        inputs, full, labels = to_protenix(features, symmetry=symmetry)
        np.testing.assert_array_equal(labels["coordinate"], features["coords"])
        for chain, others in allowed(features).items():
            atoms = atoms_of(features, chain)
            entity = set(inputs["entity_mol_id"][atoms].tolist())
            assert len(entity) == 1
            candidates = np.unique(full["mol_id"][full["entity_mol_id"] == entity.pop()])
            if others != {chain}:
                assert set(candidates.tolist()) == others
            for other in others if others != {chain} else ():
                here = (full["mol_id"] == other) & np.isin(
                    full["mol_atom_index"], inputs["mol_atom_index"][atoms]
                )
                np.testing.assert_array_equal(full["mol_atom_index"][here], inputs["mol_atom_index"][atoms])
                check(features, chain, other, full["coordinate"][here], full["coordinate_mask"][here] == 1)


@pytest.mark.parametrize("method", ["spatial", "interface", "contiguous"])
def test_crops_in_space_exchange_their_own_chains_alone(cases, method):
    n_outside = 0
    for features, symmetry in cases:
        own = set(features["asym_id"].tolist())
        outside = set().union(*allowed(features).values()) - own
        n_outside += len(outside)
        wanted = len(own) - cross_bond(features) + (len(outside) if method == "contiguous" else 0)
        _, full, _ = to_protenix(features, symmetry=symmetry, crop_method=method)
        assert len(np.unique(full["mol_id"])) == wanted
        truth = to_openfold3(features, symmetry=symmetry, crop_method=method)["ground_truth"]
        pairs = np.stack([truth["mol_entity_id"], truth["mol_sym_id"]])
        assert np.unique(pairs, axis=1).shape[1] == wanted
    assert n_outside > 10


def test_openfold3_finds_each_candidate(cases):
    # A chain's tokens are those of a molecule with the same mol_sym_token_index; its atoms those of the same
    # mol_sym_component_id, in the order of ref_space_uid_to_perm.
    for features, symmetry in cases:
        batch = to_openfold3(features, symmetry=symmetry)
        left, _ = without_terminal_atoms(features, None)
        truth = batch["ground_truth"]
        token = np.repeat(np.arange(len(truth["token_index"])), truth["num_atoms_per_token"])
        assert (np.diff(truth["token_index"]) > 0).all()
        np.testing.assert_array_equal(
            truth["token_index"][np.isin(truth["token_index"], batch["token_index"])], batch["token_index"]
        )
        for chain, others in allowed(features).items():
            if others == {chain}:
                continue
            own = features["asym_id"] == chain
            kind = truth["mol_entity_id"] == batch["mol_entity_id"][own][0]
            copies = np.unique(truth["mol_sym_id"][kind])
            assert len(copies) == len(others)
            for copy, other in zip(copies, sorted(others), strict=True):
                here = kind & (truth["mol_sym_id"] == copy)
                shared = here & np.isin(truth["mol_sym_token_index"], batch["mol_sym_token_index"][own])
                for name in ("restype", "mol_sym_token_index", "mol_sym_component_id", "is_ligand"):
                    np.testing.assert_array_equal(truth[name][shared], batch[name][own])
                picked = []
                for uid in np.unique(left["ref_space_uid"][atoms_of(left, chain)]):
                    component = batch["mol_sym_component_id"][left["atom_to_token"]][
                        left["ref_space_uid"] == uid
                    ][0]
                    residue = np.flatnonzero((here & (truth["mol_sym_component_id"] == component))[token])
                    picked.append(residue[batch["ref_space_uid_to_perm"][uid][0]])
                rows = np.concatenate(picked)
                mask = truth["atom_resolved_mask"][rows] == 1
                check(features, chain, other, truth["atom_positions"][rows], mask, "OXT")


def test_openfold3_falls_back_to_the_crops_own_tokens(cases):
    # Its naive alignment takes the atoms of tokens of the same token_index.
    for features, symmetry in cases:
        batch = to_openfold3(features, symmetry=symmetry)
        truth = batch["ground_truth"]
        own = np.isin(truth["token_index"], batch["token_index"])
        np.testing.assert_array_equal(truth["token_index"][own], features["token_index"])
        here = np.repeat(own, truth["num_atoms_per_token"])
        left, _ = without_terminal_atoms(features, None)
        np.testing.assert_array_equal(truth["atom_positions"][here], left["coords"])


def test_boltz_finds_each_candidate(cases):
    # Coordinates of start2:end2 take the places of those of start1:end1; then the crop is taken.
    for features, symmetry in cases:
        boltz = to_boltz(features, symmetry=symmetry)
        left, _ = without_terminal_atoms(features, None)
        crop = boltz["crop_to_all_atom_map"].astype(int)
        ways = boltz["chain_symmetries"]
        seen = set()
        for number, way in enumerate(ways):
            coords, mask = boltz["all_coords"].copy(), boltz["all_resolved_mask"].copy()
            for start, end, other_start, other_end, _, _ in way:
                coords[start:end] = boltz["all_coords"][other_start:other_end]
                mask[start:end] = boltz["all_resolved_mask"][other_start:other_end]
            if number == 0:
                np.testing.assert_array_equal(coords[crop], left["coords"])
            present = sorted({int(c) for c in features["asym_id"]} | set().union(*allowed(features).values()))
            taken = {present[a]: present[b] for *_, a, b in way}
            assert set(taken) == set(features["asym_id"].tolist())
            assert len(set(taken.values())) == len(taken)
            seen.add(tuple(sorted(taken.items())))
            for chain, other in taken.items():
                atoms = atoms_of(left, chain)
                check(features, chain, other, coords[crop][atoms], mask[crop][atoms] == 1, "OXT")
        options = allowed(features)
        every = itertools.product(*(sorted(options[chain]) for chain in sorted(options)))
        possible = {
            tuple(zip(sorted(options), way, strict=True)) for way in every if len(set(way)) == len(way)
        }
        assert len(ways) == len(seen)
        assert seen == possible


def test_boltz_tries_some_of_many_ways(tmp_path):
    chains = [Chain(["ZN"], MolType.LIGAND, sym=number + 1, origin=(4 * number, 0, 0)) for number in range(9)]
    fake.publish(tmp_path / "cache", [(fake.structure("1abc", chains), chains, "")])
    stream = Stream(tmp_path / "cache", StreamConfig(crop=CropConfig(tokens=4)))
    features, symmetry = stream.sample(0).features, stream.symmetry(0)
    ways = to_boltz(features, symmetry=symmetry)["chain_symmetries"]
    assert len(ways) == MAX_CHAIN_SYMMETRIES < 9 * 8 * 7 * 6
    assert all(len(way) == 4 for way in ways)
    assert all(a == b for *_, a, b in ways[0])
    for way in ways:
        assert len({b for *_, b in way}) == len(way)
    assert len({tuple(b for *_, b in way) for way in ways}) > MAX_CHAIN_SYMMETRIES // 2
    assert ways == to_boltz(features, symmetry=symmetry)["chain_symmetries"]


def test_ends_of_chains_lose_their_terminal_atoms(cases):
    n_lost = 0
    for features, symmetry in cases:
        left, rest = without_terminal_atoms(features, symmetry)
        assert rest
        names = [name_of(chars) for chars in features["ref_atom_name_chars"]]
        stays = np.array([name != "OXT" for name in names])
        n_lost += (~stays).sum()
        for name in ("coords", "ref_pos", "atom_to_token", "ref_space_uid"):
            np.testing.assert_array_equal(left[name], features[name][stays])
        for token, count in enumerate(left["token_atom_count"]):
            start = left["token_atom_start"][token]
            assert (left["atom_to_token"][start : start + count] == token).all()
        for name in ("center_atom", "rep_atom"):
            np.testing.assert_array_equal(left["coords"][left[name]], features["coords"][features[name]])
        framed = left["frame_mask"]
        np.testing.assert_array_equal(framed, features["frame_mask"])
        np.testing.assert_array_equal(
            left["coords"][left["frame_atoms"][framed]], features["coords"][features["frame_atoms"][framed]]
        )
        for chain, whole in zip(rest.chains, symmetry.chains, strict=True):
            own = stays[whole.atoms]
            np.testing.assert_array_equal(left["coords"][chain.atoms], features["coords"][whole.atoms][own])
            np.testing.assert_array_equal(chain.coords, whole.coords[:, own])
            np.testing.assert_array_equal(chain.places, whole.places[own])
    assert n_lost > 10


def test_orders_of_what_stays_are_kept():
    features = hand_made_sample()
    # The alanine's last atoms are O, OXT and the glycine's are as before; its N and CA may be exchanged.
    features["ref_atom_name_chars"][8] = [ord(letter) - 32 for letter in "OXT "]
    orders = np.array([[4, 5, 6, 7, 8], [5, 4, 6, 7, 8], [4, 5, 6, 8, 7], [5, 4, 6, 8, 7]])
    other = np.array([[0, 1, 2, 3], [0, 1, 3, 2]])
    left, rest = without_terminal_atoms(
        features, Symmetry(automorphisms=(other, orders), chains=(), bonds=NO_BONDS)
    )
    assert rest
    assert len(left["coords"]) == 9
    assert [found.tolist() for found in rest.automorphisms] == [
        [[0, 1, 2, 3], [0, 1, 3, 2]],
        [[4, 5, 6, 7], [5, 4, 6, 7]],
    ]
    nothing = Symmetry(automorphisms=(), chains=(), bonds=NO_BONDS)
    only = Symmetry(automorphisms=(orders[[0, 2]],), chains=(), bonds=NO_BONDS)
    assert without_terminal_atoms(features, only)[1] == nothing


def flipped():
    """The hand-made sample, in which the glycine's C and O can be exchanged, and the alanine's O and CB."""
    automorphisms = (np.array([[0, 1, 2, 3], [0, 1, 3, 2]]), np.array([[4, 5, 6, 7, 8], [4, 5, 6, 8, 7]]))
    return hand_made_sample(), Symmetry(automorphisms=automorphisms, chains=(), bonds=NO_BONDS)


def test_equivalent_atoms_are_named_as_each_package_does():
    features, symmetry = flipped()
    inputs, _, _ = to_protenix(features, symmetry=symmetry)
    assert inputs["atom_perm_list"] == [
        *([0, 0], [1, 1], [2, 3], [3, 2]),
        *([0, 0], [1, 1], [2, 2], [3, 4], [4, 3]),
        [0],
    ]
    orders = to_openfold3(features, symmetry=symmetry)["ref_space_uid_to_perm"]
    assert {uid: order.tolist() for uid, order in orders.items()} == {
        0: [[0, 1, 2, 3], [0, 1, 3, 2]],
        1: [[0, 1, 2, 3, 4], [0, 1, 2, 4, 3]],
        2: [[0]],
    }
    boltz = to_boltz(features, symmetry=symmetry)
    assert boltz["amino_acids_symmetries"] == [[[(2, 3), (3, 2)]], [[(7, 8), (8, 7)]]]
    assert boltz["ligand_symmetries"] == []


def test_without_symmetry_nothing_is_exchanged():
    features = hand_made_sample()
    inputs, full, _ = to_protenix(features)
    assert inputs["atom_perm_list"] == [[0], [1], [2], [3], [0], [1], [2], [3], [4], [0]]
    assert len(np.unique(full["mol_id"])) == len(np.unique(full["entity_mol_id"])) == 2
    boltz = to_boltz_batch([to_boltz(features)])
    assert [(a, b) for *_, a, b in boltz["chain_symmetries"][0][0]] == [(0, 0), (1, 1)]
    assert len(boltz["chain_symmetries"][0]) == 1
    truth = whole_truth(features, None)
    np.testing.assert_array_equal(truth.coords, features["coords"])
    assert truth.own.tolist() == list(range(10))


def test_bonded_chains_are_one_molecule():
    features = hand_made_sample()
    assert bonded_chains(features) == {1: 1, 2: 2}
    features["token_bonds"][1, 2] = features["token_bonds"][2, 1] = True
    assert bonded_chains(features) == {1: 1, 2: 1}
    inputs, full, _ = to_protenix(features)
    assert np.unique(inputs["mol_id"]).tolist() == [1]
    assert (np.diff(full["mol_atom_index"]) > 0).all()
