"""Pictures: they are made for every sort of crop, and what they show is where it should be."""

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from megafold.pipeline import schema
from megafold.pipeline.drawing import draw_sample, space, tracks
from megafold.pipeline.drawing.chains import chain_styles
from megafold.pipeline.drawing.sample import title_of


def make_features(n_msa: int = 7, n_templ: int = 2, *, resolved: bool = True) -> dict[str, np.ndarray]:
    """A protein of 12 residues (two atoms each) and a ligand of 3 atoms, shaped as the schema says."""
    n_token, n_atom = 15, 27
    lengths = {"N_token": n_token, "N_atom": n_atom, "N_msa": n_msa, "N_templ": n_templ}
    rng = np.random.default_rng(0)
    features = {
        feature.name: np.zeros([lengths[a] if a in lengths else int(a) for a in feature.axes], feature.dtype)
        for feature in schema.SAMPLE
    }
    for name, length in (("msa", n_msa), ("template_restype", n_templ)):
        features[name] = np.full((length, n_token), schema.GAP, np.int32)
        features[name][:, :12] = rng.integers(0, 20, (length, 12))
    count = np.array([2] * 12 + [1] * 3)
    start = np.cumsum(count) - count
    features.update(
        asym_id=np.array([1] * 12 + [2] * 3, np.int32),
        restype=np.array([*range(12), 20, 20, 20], np.int32),
        residue_index=np.array([*range(1, 13), 1, 1, 1], np.int32),
        is_protein=np.arange(n_token) < 12,
        is_ligand=np.arange(n_token) >= 12,
        atom_to_token=np.repeat(np.arange(n_token), count).astype(np.int32),
        center_atom=start.astype(np.int32),
        rep_atom=(start + count - 1).astype(np.int32),
        coords=rng.normal(0, 8, (n_atom, 3)).astype(np.float32),
        coords_mask=np.full(n_atom, resolved),
        deletion_mean=rng.uniform(0, 0.2, n_token).astype(np.float32),
    )
    features["token_bonds"][12, 13] = features["token_bonds"][13, 12] = True
    return features


META = {
    "entry": "1abc",
    "crop_method": "spatial_interface",
    "crop_center": 3,
    "n_token_uncropped": 40,
    "label_asym_ids": {1: "A", 2: "B-2"},
    "paired_rows": 3,
    "seed": 0,
    "epoch": 1,
    "index": 2,
}


@pytest.mark.parametrize(
    ("n_msa", "n_templ", "resolved"), [(7, 2, True), (0, 0, True), (7, 0, False), (900, 20, True)]
)
def test_draws_every_sort_of_crop(tmp_path, n_msa, n_templ, resolved):
    path = tmp_path / "crop.png"
    draw_sample(make_features(n_msa, n_templ, resolved=resolved), META, path)
    image = imread(path)
    assert image.shape[0] > 600
    assert image.shape[1] > 1000
    assert image[..., :3].std() > 0.05


def test_draws_without_meta(tmp_path):
    draw_sample(make_features(), {}, tmp_path / "crop.png")
    assert (tmp_path / "crop.png").stat().st_size > 10_000


def axes_of(drawing, *arguments) -> Any:
    axes = Figure().subplots()
    drawing(axes, *arguments)
    return axes


def test_title_says_what_is_drawn():
    title = title_of(make_features(), META)
    assert "1abc" in title
    assert "spatial interface crop around token 3" in title
    assert "15 of 40 tokens, 27 atoms (27 resolved), 2 chains" in title
    assert "7 MSA rows, 2 templates, 1 token bond" in title
    assert "seed 0, epoch 1, index 2" in title


def test_chains_have_the_names_and_kinds_of_the_file():
    styles = chain_styles(make_features(), META)
    assert [style.label for style in styles.values()] == ["A  protein, 12", "B-2  ligand, 3"]
    assert len({style.colour for style in styles.values()}) == 2


def test_contact_map_shows_distances_of_representative_atoms():
    features = make_features()
    features["coords_mask"][features["rep_atom"][4]] = False
    image = axes_of(space.draw_contacts, features).images[0].get_array()
    a, b = (features["coords"][features["rep_atom"][k]].astype(float) for k in (2, 9))
    assert image[2, 9] == pytest.approx(np.linalg.norm(a - b))
    assert np.ma.getmaskarray(image)[4].all()
    assert np.ma.getmaskarray(image).sum() == 2 * 15 - 1


def test_chain_boundaries_are_between_tokens():
    axes = axes_of(tracks.draw_msa, make_features())
    assert [line.get_xdata()[0] for line in axes.lines] == [11.5]


def test_a_line_divides_paired_rows_from_the_others():
    axes = axes_of(tracks.draw_msa, make_features(), 3)
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == [3.5]


def test_coverage_counts_rows_with_a_residue():
    features = make_features()
    features["msa"][2:5, 3] = schema.GAP
    axes = axes_of(tracks.draw_coverage, features)
    heights = axes.lines[0].get_ydata()
    assert heights[3] == 4
    assert heights[12] == 0


def test_every_token_bond_is_an_arc_between_its_tokens():
    features = make_features()
    features["token_bonds"][4, 12] = features["token_bonds"][12, 4] = True
    axes = axes_of(tracks.draw_bonds, features, chain_styles(features, META))
    arcs, colours = axes.collections[0].get_segments(), axes.collections[0].get_colors()
    ends = sorted((round(float(arc[0, 0])), round(float(arc[-1, 0]))) for arc in arcs)
    assert ends == [(4, 12), (12, 13)]
    assert [tuple(colour[:3]) == (0, 0, 0) for colour in colours] == [True, False]
    assert "2 token bonds, 1 of them between chains" in axes.get_title(loc="left")


def test_views_keep_distances_and_handedness():
    features = make_features()
    features["coords_mask"][5] = False
    frame = space.principal_frame(features)
    assert np.isnan(frame[5]).all()
    kept = np.delete(np.arange(27), 5)
    before, after = features["coords"][kept].astype(float), frame[kept]
    spread = np.var(after, axis=0)
    assert (np.diff(spread) <= 0).all()
    # A rotation and nothing else: its matrix, by least squares, has determinant 1.
    turn = np.linalg.lstsq(before - before.mean(axis=0), after, rcond=None)[0]
    assert np.linalg.det(turn) == pytest.approx(1)
    assert turn @ turn.T == pytest.approx(np.eye(3), abs=1e-9)


def test_views_show_resolved_atoms_traces_within_chains_and_bonds():
    features = make_features()
    features["coords_mask"][features["center_atom"][5]] = False
    front, side = Figure().subplots(1, 2)
    space.draw_views(front, side, features, chain_styles(features, META), center=3)
    for axes in (front, side):
        protein, ligand, lines = axes.collections
        assert (len(protein.get_offsets()), len(ligand.get_offsets())) == (23, 3)
        # Eleven peptide bonds, less the two of the residue without coordinates; the ligand's bond; each
        # with its rim.
        assert len(lines.get_segments()) == 2 * (9 + 1)
    heights = [np.sort(np.asarray(axes.collections[0].get_offsets())[:, 1]) for axes in (front, side)]
    assert heights[0] == pytest.approx(heights[1])
    star = front.lines[-1].get_xydata()[0]
    assert star == pytest.approx(space.principal_frame(features)[features["center_atom"][3], :2])


def test_every_class_has_a_colour():
    assert tracks.class_lookup().shape == (schema.N_RESTYPE,)
    assert tracks.CLASSES[tracks.class_lookup()[schema.GAP]][0] == "gap"
