"""``megafold sample show``: the picture and the counts, against a hand-made cache."""

import errno
import json
import os

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from megafold.cache_store import LocalStore
from megafold.cli.main import group, is_told
from megafold.pipeline.schema import MolType
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

SEQUENCE = ["ALA", "GLY", "LYS", "ALA", "GLY"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """1abc: a peptide with an alignment of 4 rows and a template, a ligand of 4 atoms bonded to it."""
    path = tmp_path_factory.mktemp("show") / "cache"
    store = LocalStore.create(path)
    msa = str(store.put(fake.msa("AGKAG", ["AGKA-", "--KAG", "AGKAG"])))
    hits = [{"entry": "9zzz", "release_date": "1990-01-01", "aligned": 10, "identity": 400}]
    chains = [
        Chain(SEQUENCE, msa=msa, template=str(store.put(fake.template("AGKAG", hits)))),
        Chain(["LGD"], MolType.LIGAND, entity=2, origin=(7.6, 0.8, 1)),
    ]
    bonds = [((0, 2, "NZ"), (1, 0, "C1"))]
    alone = [Chain(["ALA"] * 8)]
    fake.publish(
        path,
        [
            (fake.structure("1abc", chains, bonds, [(0, 1)]), chains, ""),
            (fake.structure("1abd", alone), alone, ""),
            (fake.structure("7xyz", alone), alone, ""),
        ],
    )
    return path


def show(*arguments):
    return CliRunner().invoke(group, ["sample", "show", *map(str, arguments)])


def blocks_with_ink(path):
    """[2, 2] how many colours each quarter of the picture has."""
    image = (imread(path)[..., :3] * 255).round().astype(int)
    codes = image @ [65536, 256, 1]
    halves = [np.array_split(half, 2, axis=1) for half in np.array_split(codes, 2)]
    return np.array([[len(np.unique(quarter)) for quarter in row] for row in halves])


def test_the_picture_is_written_and_the_counts_are_the_entrys(cache, tmp_path):
    picture = tmp_path / "crop.png"
    result = show(cache, "1ABC", "--json", "-o", picture)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    # ALA 5 atoms, GLY 4, LYS 9, ALA 5, GLY 4 and its OXT; the ligand's 4.
    expected = {"entry": "1abc", "tokens": 5 + 4, "atoms": 5 + 4 + 9 + 5 + 5 + 4, "chains": 2}
    # The ligand's three bonds of its own, and the one to the peptide.
    expected |= {"msa_rows": 4, "token_bonds": 4, "picture": str(picture)}
    assert {name: facts[name] for name in expected} == expected
    assert facts["resolved_atoms"] == facts["atoms"]
    # The template's single hit may be left out by chance.
    assert facts["templates"] in (0, 1)
    assert (blocks_with_ink(picture) > 30).all()


def test_crops_are_of_the_method_asked_for_and_of_the_size(cache, tmp_path):
    for method in ("contiguous", "spatial", "interface"):
        result = show(cache, "1abc", "--json", "--crop", method, "--tokens", 4, "-o", tmp_path / "crop.png")
        facts = json.loads(result.output)
        assert (facts["crop_method"], facts["tokens"]) == (method, 4)


def test_a_method_that_is_not_possible_is_told(cache, tmp_path):
    result = show(cache, "7xyz", "--crop", "interface", "-o", tmp_path / "crop.png")
    assert result.exit_code == 0
    assert "No interface crop of it is possible; this one is spatial" in result.output
    assert "8 tokens, 41 atoms (41 resolved), 1 chain, 1 MSA row, 0 templates, 0 token bonds" in result.output


def test_an_unknown_entry_is_answered_with_the_nearest_names(cache):
    result = show(cache, "1abx")
    assert result.exit_code == 2
    assert "no entry 1abx" in result.output
    assert "1abc" in result.output
    assert "1abd" in result.output
    assert "7xyz" not in result.output
    assert "megafold cache ls" in result.output


@pytest.mark.parametrize(("name", "message"), [("absent/crop.png", "absent"), ("crop.pdf", ".png")])
def test_a_picture_that_could_not_be_written_is_refused(cache, tmp_path, name, message):
    result = show(cache, "1abc", "-o", tmp_path / name)
    assert result.exit_code == 2
    assert message in result.output.partition("Error:")[2]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_with_the_picture(cache, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megafold.pipeline.drawing.draw_sample", full)
    result = show(cache, "1abc", "-o", tmp_path / "crop.png")
    assert isinstance(result.exception, OSError)
    assert is_told(result.exception)
    assert str(tmp_path / "crop.png") in str(result.exception)
