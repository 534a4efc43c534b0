"""Pictures: they are made for every sort of crop, and what they show is where it should be."""

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from megafold.pipeline import draw, schema
from megafold.pipeline.draw import draw_sample


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


def axes_of(drawing, features) -> Any:
    axes = Figure().subplots()
    drawing(axes, features)
    return axes


def test_title_says_what_is_drawn():
    title = draw._title(make_features(), META)
    assert "1abc" in title
    assert "spatial interface crop around token 3" in title
    assert "15 tokens, 27 atoms (27 resolved), 2 chains" in title
    assert "seed 0, epoch 1, index 2" in title


def test_contact_map_shows_distances_of_representative_atoms():
    features = make_features()
    features["coords_mask"][features["rep_atom"][4]] = False
    image = axes_of(draw._draw_contacts, features).images[0].get_array()
    a, b = (features["coords"][features["rep_atom"][k]].astype(float) for k in (2, 9))
    assert image[2, 9] == pytest.approx(np.linalg.norm(a - b))
    assert np.ma.getmaskarray(image)[4].all()
    assert np.ma.getmaskarray(image).sum() == 2 * 15 - 1


def test_chain_boundaries_are_between_tokens():
    axes = axes_of(draw._draw_msa, make_features())
    assert [line.get_xdata()[0] for line in axes.lines] == [11.5]


def test_coverage_counts_rows_with_a_residue():
    features = make_features()
    features["msa"][2:5, 3] = schema.GAP
    axes = axes_of(draw._draw_coverage, features)
    heights = axes.lines[0].get_ydata()
    assert heights[3] == 4
    assert heights[12] == 0


def test_projection_shows_resolved_atoms_and_traces_within_chains():
    features = make_features()
    features["coords_mask"][features["center_atom"][5]] = False
    axes = axes_of(draw._draw_projection, features)
    protein, ligand, lines = axes.collections
    assert (len(protein.get_offsets()), len(ligand.get_offsets())) == (23, 3)
    # Eleven peptide bonds, less the two of the residue without coordinates; none to the ligand.
    assert len(lines.get_segments()) == 9


def test_every_class_has_a_colour():
    assert draw._class_lookup().shape == (schema.N_RESTYPE,)
    assert draw._CLASSES[draw._class_lookup()[schema.GAP]][0] == "gap"
