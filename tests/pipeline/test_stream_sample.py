import hashlib
import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest

from megafold.cache_store import Digest, LocalStore, MissingObject
from megafold.pipeline import schema
from megafold.pipeline.errors import InputError
from megafold.pipeline.manifest import manifest_from_rows
from megafold.pipeline.schema import BondKind, MolType
from megafold.pipeline.stream import (
    CropConfig,
    MsaConfig,
    PadSizes,
    SampleError,
    SamplingConfig,
    Stream,
    StreamConfig,
    TemplateConfig,
    collate,
    validate_sample,
)
from megafold.pipeline.stream.labels import label_features
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

#: Chain A: tokens 0 ALA, 1 GLY, 2 to 9 MSE, 10 LYS, 11 ALA. B, a copy of C: 3 GLY. D: U, PSU, U; then a
#: ligand bound to LYS, and a zinc.
A = "ALA GLY MSE LYS ALA".split()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "cache"
    store = LocalStore.create(path)
    deep = ["".join("AG-KM"[(i * j) % 5] for j in range(1, 6)) for i in range(1, 40)]
    msas = [str(store.put(fake.msa("AGMKA", deep))), str(store.put(fake.msa("GGG", ["GAG", "AAA", "-GG"])))]
    rna = str(store.put(fake.msa("UUU", ["AAA"], mol_type="rna")))
    hits = [{"entry": f"{i}tpl", "release_date": "2001-01-01"} for i in range(6)]
    template = str(store.put(fake.template("AGMKA", hits)))
    pairing = str(store.put(fake.pairing(msas, [[0, 0], [2, 1], [7, 3]])))
    chains = [
        Chain(A, msa=msas[0], template=template),
        Chain(["GLY"] * 3, entity=2, sym=1, origin=(0, 6, 0), msa=msas[1]),
        Chain(["GLY"] * 3, entity=2, sym=2, origin=(0, 9, 0), msa=msas[1], unresolved={0}),
        Chain(["U", "PSU", "U"], MolType.RNA, entity=3, origin=(0, 13, 0), msa=rna),
        Chain(["LGD"], MolType.LIGAND, entity=4, origin=(11.4, 0.8, 1)),
        Chain(["ZN"], MolType.LIGAND, entity=5, origin=(3, 6, 3)),
    ]
    bonds = [((0, 3, "NZ"), (4, 0, "C1")), ((1, 0, "N"), (5, 0, "ZN")), ((0, 0, "CB"), (1, 0, "CA"))]
    main = fake.structure("1abc", chains, bonds, [(0, 1), (1, 2), (0, 4)])
    other = [Chain(["ALA"] * 40), Chain(["GLY"] * 30, entity=2, origin=(3, 9, 0))]
    fake.publish(path, [(main, chains, pairing), (fake.structure("2xyz", other, (), [(0, 1)]), other, "")])
    return path


def config(**changes):
    values: dict[str, Any] = {
        "crop": CropConfig(tokens=64, atoms=500),
        "template": TemplateConfig(min_aligned=1),
        "sampling": SamplingConfig(entries=("1abc",), epoch_size=100),
    }
    return StreamConfig(**values | changes)


def whole(cache, **changes):
    return Stream(cache, config(**changes)).sample(0).features


def digest_of(sample):
    state = hashlib.sha256(repr(sorted(sample.meta.items())).encode())
    for name, value in sample.features.items():
        state.update(name.encode() + str(value.dtype).encode() + repr(value.shape).encode() + value.tobytes())
    return state.hexdigest()


def test_samples_fit_the_schema(cache):
    for tokens, rows in ((64, 1024), (20, 7), (1, 1)):
        settings = config(crop=CropConfig(tokens=tokens, atoms=100), msa=MsaConfig(rows=rows))
        stream = Stream(cache, settings)
        for index in range(30):
            sample = stream.sample(index)
            validate_sample(sample.features)
            assert list(sample.features) == [feature.name for feature in schema.SAMPLE]
            assert len(sample.features["token_mask"]) <= tokens
            assert len(sample.features["atom_mask"]) <= 100
            assert len(sample.features["msa"]) <= rows


def test_meta_names_components_and_chains(cache):
    meta = Stream(cache, config()).sample(0).meta
    assert meta["resolution"] == 2.0
    chain_a = ["ALA", "GLY", *["MSE"] * 8, "LYS", "ALA"]
    rna = ["U", *["PSU"] * 20, "U"]
    assert meta["comp_ids"] == [*chain_a, *["GLY"] * 6, *rna, *["LGD"] * 4, "ZN"]
    assert sorted(meta["label_asym_ids"]) == [1, 2, 3, 4, 5, 6]
    assert len(set(meta["label_asym_ids"].values())) == 6


def test_token_features_by_hand(cache):
    features = whole(cache)
    n_mse, n_psu = 8, 20
    chain_tokens = [4 + n_mse, 3, 3, 2 + n_psu, 4, 1]
    assert features["asym_id"].tolist() == np.repeat([1, 2, 3, 4, 5, 6], chain_tokens).tolist()
    assert features["entity_id"].tolist() == np.repeat([1, 2, 2, 3, 4, 5], chain_tokens).tolist()
    assert features["sym_id"].tolist() == np.repeat([1, 1, 2, 1, 1, 1], chain_tokens).tolist()
    assert features["residue_index"][:12].tolist() == [1, 2, *[3] * 8, 4, 5]
    assert features["token_index"].tolist() == list(range(1, sum(chain_tokens) + 1))
    assert features["is_protein"].sum() == 18
    assert features["is_rna"].sum() == 22
    assert features["is_ligand"].sum() == 5
    assert not features["is_dna"].any()
    assert features["restype"][:4].tolist() == [0, 7, 12, 12]
    assert features["restype"][-5:].tolist() == [20] * 5
    # ALA 5 atoms, GLY 4, MSE 8 x 1, LYS 9, ALA with its OXT 6
    assert features["token_atom_count"][:12].tolist() == [5, 4, *[1] * 8, 9, 6]
    assert features["token_atom_start"][:4].tolist() == [0, 5, 9, 10]
    assert features["center_atom"][:4].tolist() == [1, 6, 9, 10]  # CA, CA, the atoms
    assert features["rep_atom"][:4].tolist() == [4, 6, 9, 10]  # CB, GLY's CA, the atoms
    assert features["frame_atoms"][0].tolist() == [0, 1, 2]
    assert not features["frame_mask"][-1]
    assert features["frame_atoms"][-1].tolist() == [0, 0, 0]
    assert not features["frame_mask"][features["asym_id"] == 3].all()  # C's first residue is unresolved


def test_labels_are_the_coordinates_moved_rigidly(cache):
    store = LocalStore.at(cache)
    stream = Stream(cache, config())
    with store.open(store_digest(stream)) as reader:
        arrays = reader.read_all().arrays
    features = stream.sample(0).features
    mask = features["coords_mask"]
    true = arrays["atom_coords"].astype(np.float64)
    assert (mask == ~np.isnan(true[:, 0])).all()
    assert 0 < mask.sum() < len(mask)
    found = features["coords"].astype(np.float64)

    def distances(position):
        return np.linalg.norm(position[mask][:, None] - position[mask][None], axis=-1)

    np.testing.assert_allclose(distances(found), distances(true), atol=1e-3)
    # proper rotation: the triple product of three edges keeps its sign
    edges = [position[mask][[3, 40, 60]] - position[mask][0] for position in (found, true)]
    assert np.linalg.det(edges[0]) == pytest.approx(np.linalg.det(edges[1]), rel=1e-3, abs=1e-2)
    assert np.linalg.norm(found[mask].mean(axis=0)) < 6  # centred, then moved by N(0, 1) on each axis
    assert (features["b_factor"][mask] == arrays["atom_occupancy_b"][mask, 1]).all()
    plain = whole(cache, augment=False)
    np.testing.assert_allclose(plain["coords"][mask].mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(plain["coords"][mask] - plain["coords"][0], (true[mask] - true[0]), atol=1e-4)


def test_a_resolved_atom_without_a_b_factor_has_none():
    coords = np.array([[1, 2, 3], [3, 2, 1], [np.nan] * 3], np.float32)
    b_factor = np.array([np.nan, 7, np.nan], np.float32)
    labels = label_features(coords, b_factor, np.array([True, True, False]), None)
    assert labels["b_factor"].tolist() == [0, 7, 0]
    assert labels["coords"].tolist() == [[-1, 0, 1], [1, 0, -1], [0, 0, 0]]


def store_digest(stream):
    return Digest.parse(stream.entry(int(stream.sampler.rows[0])).structure)


def test_reference_features_come_from_the_library(cache):
    features, plain = whole(cache), whole(cache, augment=False)
    names = ["".join(chr(c + 32) for c in chars).strip() for chars in plain["ref_atom_name_chars"]]
    assert names[:18] == "N CA C O CB N CA C O N CA C O CB CG SE CE N".split()
    assert plain["ref_element"][:5].tolist() == [7, 6, 6, 8, 6]
    assert plain["ref_charge"][-1] == 2
    # The library's position of atom i of component number k is (k, i, i²/2).
    keys = sorted(fake.ATOMS)
    assert plain["ref_pos"][4].tolist() == [keys.index("ALA"), 4, 8]
    assert plain["ref_pos"][15].tolist() == [keys.index("MSE"), 6, 18]
    assert not plain["ref_mask"][-1]  # the zinc has none
    assert plain["ref_mask"][:-1].all()
    uid = features["ref_space_uid"]
    assert (
        uid.tolist() == np.repeat(np.arange(16), [5, 4, 8, 9, 6, 4, 4, 5, 4, 4, 5, 21, 20, 20, 4, 1]).tolist()
    )
    for space in range(15):
        own = uid == space
        edges = [f["ref_pos"][own].astype(np.float64) for f in (features, plain)]
        lengths = [np.linalg.norm(e[:, None] - e[None], axis=-1) for e in edges]
        np.testing.assert_allclose(lengths[0], lengths[1], rtol=1e-4, atol=1e-3)
        assert abs(edges[0] - edges[1]).max() > 0.1


def test_token_bonds_by_hand(cache):
    features = whole(cache)
    bonds = {(int(i), int(j)) for i, j in np.argwhere(features["token_bonds"]) if i < j}
    mse = dict(zip("N CA C O CB CG SE CE".split(), range(2, 10), strict=True))
    psu = {name: 19 + i for i, name in enumerate(fake.NUCLEOTIDE.split()[1:])}
    lgd = {name: 40 + i for i, name in enumerate(["C1", "C2", "O1", "C3"])}
    expected = {
        (mse[a], mse[b]) for a, b in (p.split("-") for p in "N-CA CA-C C-O CA-CB CB-CG CG-SE SE-CE".split())
    }
    expected |= {
        (psu[a], psu[b]) for a, b in (p.split("-") for p in "P-OP1 P-O5' O5'-C5' C5'-C4' C3'-O3'".split())
    }
    expected |= {(lgd[a], lgd[b]) for a, b in (("C1", "C2"), ("C2", "O1"), ("C2", "C3"))}
    expected |= {(10, lgd["C1"])}  # 1 Å off NZ
    # Left out: N-ZN and the links between residues 3.8 Å apart are over 2.4 Å long; CB-CA joins two
    # standard residues.
    assert bonds == expected


def test_metal_coordination_is_no_bond(tmp_path):
    # AlphaFold 3's published code takes rows of `struct_conn` that say `covale`, and of these no others.
    chains = [Chain(["ALA", "LYS"]), Chain(["ZN"], MolType.LIGAND, entity=2, origin=(3.8, 2, 0))]
    ends = (0, 1, "NZ"), (1, 0, "ZN")
    for name, kind in (("metal", BondKind.METAL), ("covalent", BondKind.COVALENT)):
        fake.publish(tmp_path / name, [(fake.structure("1abc", chains, [(*ends, kind)]), chains, "")])
        features = Stream(tmp_path / name, config()).sample(0).features
        assert features["token_bonds"].sum() == 2 * (kind == BondKind.COVALENT)


def test_backbone_bonds_are_kept_where_atoms_touch_or_are_unresolved(tmp_path):
    # Residues 3.8 Å apart do not touch, but nothing says so of an unresolved one.
    chains = [Chain(["ALA", "MSE", "ALA"], unresolved={1})]
    fake.publish(tmp_path / "c", [(fake.structure("1abc", chains), chains, "")])
    features = Stream(tmp_path / "c", config()).sample(0).features
    bonds = features["token_bonds"]
    assert bonds[0, 1]  # C of ALA to N of MSE
    assert bonds[3, 9]  # C of MSE to N of ALA
    assert bonds.sum() == 2 * (7 + 2)


def test_msa_of_the_whole_entry(cache):
    features = whole(cache)
    # query, 2 paired, then unpaired rows: 39 - 2 of A's, 3 - 2 of B's and C's, 1 of the RNA's
    assert features["msa"].shape[0] == 1 + 2 + 37 + 1 + 1
    assert features["msa"][0, :12].tolist() == [0, 7, *[12] * 8, 11, 0]
    assert (features["msa"][0, -5:] == 20).all()
    protein, copies = slice(0, 12), slice(12, 18)
    is_gap = features["msa"] == schema.GAP
    assert (~is_gap[1:3, protein]).any(axis=1).all()
    assert (features["msa"][1, copies] == [7, 0, 7, 7, 0, 7]).all()  # row 1 of GGG: GAG, in both copies
    assert (features["msa"][2, copies] == [31, 7, 7, 31, 7, 7]).all()
    assert is_gap[3:40, copies].all()
    assert is_gap[40:, protein].all()
    assert (features["msa"][40, copies] == 0).all()  # AAA
    assert features["msa"][41, 18] == 21
    assert is_gap[41, :18].all()
    assert is_gap[1:, -5:].all()


def test_templates_go_to_standard_residues_of_their_chain(cache):
    stream = Stream(cache, config())
    counts = set()
    for index in range(40):
        features = stream.sample(index).features
        counts.add(len(features["template_restype"]))
        chain = features["asym_id"] == 1
        atomised = (features["token_atom_count"] == 1) & chain
        mask = features["template_backbone_frame_mask"]
        assert mask[:, chain & ~atomised].all()
        assert not mask[:, ~chain | atomised].any()
        # Hit h has every atom at (h, h, h): slots hold different hits.
        hits = features["template_pseudo_beta"][:, 0, 0] - 1
        assert len(set(hits)) == len(hits)
        assert (features["template_restype"][:, 0] == hits).all()
    assert counts == {0, 1, 2, 3, 4}
    none = Stream(cache, config(template=TemplateConfig(count=0))).sample(0)
    assert none.features["template_restype"].shape[0] == 0


def test_crops_read_the_same_values_as_the_whole(cache):
    full = whole(cache, augment=False)
    stream = Stream(cache, config(crop=CropConfig(tokens=9, atoms=60), augment=False))
    for index in range(30):
        part = stream.sample(index).features
        at = part["token_index"] - 1
        for name in ("restype", "asym_id", "profile", "deletion_mean", "token_atom_count"):
            np.testing.assert_array_equal(part[name], full[name][at])
        atoms = np.concatenate(
            [full["token_atom_start"][t] + np.arange(full["token_atom_count"][t]) for t in at]
        )
        for name in ("ref_pos", "ref_element", "b_factor", "coords_mask"):
            np.testing.assert_array_equal(part[name], full[name][atoms])
        np.testing.assert_array_equal(part["token_bonds"], full["token_bonds"][np.ix_(at, at)])
        np.testing.assert_array_equal(part["msa"][0], full["msa"][0][at])


def sample_digest(arguments):
    stream, index = arguments
    return digest_of(stream.sample(index, epoch=3))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_samples_are_the_same_in_any_order_and_process(cache, method):
    settings = config(crop=CropConfig(tokens=16, atoms=120), sampling=SamplingConfig(epoch_size=10))
    stream = Stream(cache, settings)
    here = [digest_of(stream.sample(i, epoch=3)) for i in range(6)]
    assert len(set(here)) == 6
    again = Stream(cache, settings)
    assert [digest_of(again.sample(i, epoch=3)) for i in (5, 4, 3, 2, 1, 0)] == here[::-1]
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(sample_digest, [(stream, i) for i in range(6)]) == here


def test_a_sample_depends_on_seed_and_epoch(cache):
    stream = Stream(cache, config(crop=CropConfig(tokens=16, atoms=120)))
    first = digest_of(stream.sample(0))
    assert digest_of(stream.sample(0, epoch=1)) != first
    assert digest_of(stream.sample(0, seed=1)) != first
    assert digest_of(stream.sample(0, seed=0)) == first
    stream.forget()
    assert digest_of(stream.sample(0)) == first
    assert digest_of(pickle.loads(pickle.dumps(stream)).sample(0)) == first


def test_a_stream_stays_with_its_snapshot(cache, tmp_path):
    chains = [Chain(["ALA"] * 5)]
    store = fake.publish(tmp_path / "c", [(fake.structure("1abc", chains), chains, "")])
    stream = Stream(tmp_path / "c", config())
    before = stream.manifest
    store.move_ref("main", before, empty_manifest(store))
    assert pickle.loads(pickle.dumps(stream)).sample(0).meta["manifest"] == str(before)
    assert Stream(tmp_path / "c", config(), before).sample(0).meta["entry"] == "1abc"


def empty_manifest(store):
    attributes = {"components": str(store.put(fake.library())), "config": {}, "versions": {}}
    return store.put_manifest(manifest_from_rows([], attributes))


def test_a_cache_without_a_data_set_says_so(tmp_path):
    LocalStore.create(tmp_path / "c")
    with pytest.raises(SampleError, match="megafold cache build"):
        Stream(tmp_path / "c")


def test_a_missing_object_is_named(tmp_path):
    chains = [Chain(["ALA"] * 5, msa="0" * 64)]
    fake.publish(tmp_path / "c", [(fake.structure("1abc", chains), chains, "")])
    with pytest.raises(MissingObject, match="0000"):
        Stream(tmp_path / "c", config()).sample(0)


def test_an_msa_that_is_too_short_is_named(tmp_path):
    store = LocalStore.create(tmp_path / "c")
    chains = [Chain(["ALA"] * 5, msa=str(store.put(fake.msa("AAA", ["AGA"]))))]
    fake.publish(tmp_path / "c", [(fake.structure("1abc", chains), chains, "")])
    with pytest.raises(SampleError, match=r"1abc: msa object .* has 3 residues, residue 5"):
        Stream(tmp_path / "c", config()).sample(0)


def test_padding_holds_the_schemas_values(cache):
    stream = Stream(cache, config(crop=CropConfig(tokens=16, atoms=120)))
    samples = [stream.sample(i).features for i in range(4)]
    batch = collate(samples, PadSizes(tokens=24, atoms=128, msa=60, templates=4))
    lengths = {"N_token": 24, "N_atom": 128, "N_msa": 60, "N_templ": 4}
    for feature in schema.SAMPLE:
        value = batch[feature.name]
        axes = [int(axis) if axis.isdigit() else lengths[axis] for axis in feature.axes]
        assert value.shape == (4, *axes)
        assert value.dtype == np.dtype(feature.dtype)
        for row, sample in zip(value, samples, strict=True):
            inside = tuple(slice(n) for n in sample[feature.name].shape)
            np.testing.assert_array_equal(row[inside], sample[feature.name])
            outside = np.ones(row.shape, bool)
            outside[inside] = False
            assert (row[outside] == feature.pad).all()
    for place in range(4):
        validate_sample({name: value[place] for name, value in batch.items()})
    free = collate(samples)
    assert free["atom_mask"].shape == (4, max(len(sample["atom_mask"]) for sample in samples))


def test_samples_longer_than_the_padding_and_empty_batches_are_refused(cache):
    features = Stream(cache, config()).sample(0).features
    with pytest.raises(SampleError, match="N_token 45, padding to 20"):
        collate([features], PadSizes(tokens=20))
    with pytest.raises(SampleError, match="no samples"):
        collate([])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("restype", lambda v: v.astype(np.int64), "dtype int64, expected int32"),
        ("restype", lambda v: v[:-1], "axis N_token"),
        ("restype", lambda v: v + 40, "expected 0 to 31"),
        ("coords", lambda v: v * np.nan, "not all values are finite"),
        ("coords", lambda v: v + 1, "where coords_mask is false"),
        ("atom_to_token", lambda v: v[::-1], "does not agree"),
        ("center_atom", lambda v: v + 10_000, "center_atom: values"),
        ("profile", lambda v: v[..., :20], "axis 32 has length 20"),
        ("token_bonds", lambda v: np.triu(v), "not symmetric"),
    ],
)
def test_bad_samples_are_told(cache, name, change, message):
    features = whole(cache)
    with pytest.raises(SampleError, match=message):
        validate_sample({**features, name: change(features[name])})
    with pytest.raises(SampleError, match=r"missing \['restype'\]"):
        validate_sample({key: value for key, value in features.items() if key != "restype"})


def test_tables_of_another_version_are_told():
    table = schema.STRUCTURE.table("chains")
    stored = np.zeros((len(table.columns) - 1, 3), np.int32)
    with pytest.raises(
        InputError, match=r"chains was stored with 10 columns and has 11 .* build the cache again"
    ):
        table.unpack(stored)
