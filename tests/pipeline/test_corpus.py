import os
from pathlib import Path

import pytest

from megafold.pipeline.corpus import EntrySource, discover, entry_id
from megafold.pipeline.errors import InputError


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("1ABC.cif", "1abc"),
        ("1abc.cif.gz", "1abc"),
        ("209D-assembly1.cif.gz", "209d-assembly1"),
        ("model.v2.bcif.gz", "model.v2"),
        ("x.mmcif", "x"),
        ("pdb_00001abc.bcif", "pdb_00001abc"),
    ],
)
def test_entry_id_is_the_name_without_suffixes(name, entry):
    assert entry_id(Path(name)) == entry


def test_folder_with_loose_and_divided_files(tmp_path):
    wanted = [tmp_path / "2xyz.cif.gz", tmp_path / "ab" / "1abc.cif.gz", tmp_path / "ab" / "3abd.bcif"]
    touch(*wanted, tmp_path / "notes.txt", tmp_path / "longer" / "9zzz.cif", tmp_path / ".hidden.cif")
    assert discover(tmp_path) == [
        EntrySource("1abc", wanted[1]),
        EntrySource("2xyz", wanted[0]),
        EntrySource("3abd", wanted[2]),
    ]


def test_two_files_for_one_entry(tmp_path):
    touch(tmp_path / "1abc.cif", tmp_path / "1ABC.cif.gz")
    with pytest.raises(InputError, match=r"two files for entry 1abc.*1ABC\.cif\.gz.*1abc\.cif") as error:
        discover(tmp_path)
    assert error.value.reason == "repeated-entry"


@pytest.mark.parametrize("name", [b"1abc\xff.cif", b"1\nabc.cif"])
def test_a_name_that_is_no_text(tmp_path, name):
    touch(tmp_path / os.fsdecode(name), tmp_path / "2xyz.cif")
    with pytest.raises(InputError, match=r"b'.*1.*abc.*cif'.*rename it") as error:
        discover(tmp_path)
    assert error.value.reason == "bad-name"


def test_a_name_in_letters_of_other_languages(tmp_path):
    touch(tmp_path / "Größe 1\u00a0(neu).cif")
    assert [source.entry for source in discover(tmp_path)] == ["größe 1\u00a0(neu)"]


def test_empty_folder_says_what_was_looked_for(tmp_path):
    touch(tmp_path / "1abc.pdb")
    with pytest.raises(InputError, match=r"\.cif\.gz") as error:
        discover(tmp_path)
    assert error.value.reason == "empty-corpus"


def test_no_such_corpus(tmp_path):
    with pytest.raises(InputError) as error:
        discover(tmp_path / "nowhere")
    assert error.value.reason == "no-such-corpus"


def test_list_of_files(tmp_path):
    touch(tmp_path / "a" / "2xyz.cif", tmp_path / "1abc.cif.gz")
    listing = tmp_path / "corpus.txt"
    listing.write_text("# my entries\r\na/2xyz.cif\r\n\r\n1abc.cif.gz\r\n")
    assert [source.entry for source in discover(listing)] == ["1abc", "2xyz"]
    listing.write_text("1abc.cif.gz\nabsent.cif\n")
    with pytest.raises(InputError, match=r"line 2.*absent\.cif") as error:
        discover(listing)
    assert error.value.reason == "missing-file"


def test_table_with_alignments(tmp_path):
    files = [tmp_path / "s" / "1abc.cif", tmp_path / "s" / "2xyz.cif", tmp_path / "x.a3m"]
    folder = [tmp_path / "msa" / "b.sto", tmp_path / "msa" / "a.a3m"]
    touch(*files, *folder)
    table = tmp_path / "corpus.tsv"
    table.write_text(
        "entry\tstructure\tchain\talignments\n"
        "2XYZ\ts/2xyz.cif\tA\tmsa\n"
        "2xyz\ts/2xyz.cif\tB\tx.a3m; msa/b.sto\n"
        "other-name\ts/1abc.cif\t\t\n"
    )
    assert discover(table) == [
        EntrySource("2xyz", files[1], {"A": (folder[1], folder[0]), "B": (files[2], folder[0])}),
        EntrySource("other-name", files[0]),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("structure\tchain\n1abc.cif\tA\n", "bad-table"),
        ("1abc\t1abc.cif\n", "bad-table"),
        ("entry\tstructure\tcolour\n1abc\t1abc.cif\tred\n", "bad-table"),
        ("entry\tstructure\n1abc\t\n", "bad-table"),
        ("entry\tstructure\talignments\n1abc\t1abc.cif\t1abc.cif\n", "bad-table"),
        ("entry\tstructure\n1abc\t1abc.cif\n1abc\tother.cif\n", "repeated-entry"),
        ("entry\tstructure\n1abc\tnone.cif\n", "missing-file"),
        ("entry\tstructure\n", "empty-corpus"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path, text, reason):
    touch(tmp_path / "1abc.cif", tmp_path / "other.cif")
    table = tmp_path / "corpus.tsv"
    table.write_text(text)
    with pytest.raises(InputError) as error:
        discover(table)
    assert error.value.reason == reason


@pytest.mark.corpus
def test_the_real_corpus(corpus_dir):
    assert len(discover(corpus_dir / "structures")) == 81


def test_no_file_of_a_folder_is_asked_for_by_itself(tmp_path, monkeypatch):
    """On a network's file system each question takes a while, and a mirror of the PDB has 240 000 files."""
    touch(*(tmp_path / f"{number}abc.cif" for number in range(3)), tmp_path / "ab" / "9xyz.cif.gz")
    (tmp_path / "8lnk.cif").symlink_to(tmp_path / "0abc.cif")
    (tmp_path / "7gon.cif").symlink_to(tmp_path / "nowhere")
    asked = []
    honest = Path.stat

    def stat(path, **how):
        asked.append(path.name)
        return honest(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    found = [source.entry for source in discover(tmp_path)]
    assert found == ["0abc", "1abc", "2abc", "7gon", "8lnk", "9xyz"]  # links to nothing fail as entries
    assert {name for name in asked if name.endswith((".cif", ".gz"))} == {"8lnk.cif", "7gon.cif"}
