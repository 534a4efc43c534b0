"""Alignments and hit lists that broke others, each with the right outcome, from file to object."""

import gzip
from typing import Any

import numpy as np
import pytest
import zstandard

from megafold.pipeline.msa import MsaRows, featurize_msa, pair_msas
from megafold.pipeline.schema import RESTYPES, MolType
from megafold.pipeline.template import TemplateStructures, featurize_templates

GAP = RESTYPES.index("-")


def content_of(path, sequence, mol_type=MolType.PROTEIN):
    result = featurize_msa(sequence, mol_type, [path])
    assert result.failures == ()
    assert result.content is not None
    return result.content


def attributes_of(content) -> dict[str, Any]:
    return dict(content.attributes)


def names_of(row):
    return [RESTYPES[code] for code in row]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_an_untidy_a3m(tmp_path, pack):
    """Lower-case query, NUL separators, CRLF, empty lines, no last line end, tabs in headers."""
    text = (
        b"\r\n>101\ttab\r\nmkv\r\nl\r\n\r\n>a\tTaxID=9606\t1.5\r\nM-aaV\r\nL\0"
        b">102\r\nWWW\r\n\0\r\n>101\r\nMKVL\r\n>b\r\nMR--"
    )
    path = tmp_path / "a.a3m"
    path.write_bytes(pack(text))
    content = content_of(path, "MKVL")
    assert [names_of(row) for row in content.arrays["msa"].T] == [
        ["MET", "LYS", "VAL", "LEU"],
        ["MET", "-", "VAL", "LEU"],
        ["MET", "ARG", "-", "-"],
    ]
    assert content.arrays["deletion"].T.tolist() == [[0] * 4, [0, 0, 2, 0], [0] * 4]
    assert content.attributes["species"] == ["9606"]
    assert content_of(path, "WWW").arrays["msa"].shape == (3, 1)


def test_deep_pairing_files(tmp_path):
    """9 000 species in both chains: 8 191 pairs and the query; nothing is lost of the unpaired file."""
    rng = np.random.default_rng(0)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    contents = []
    for name, sequence in (("A", "M" * 12), ("B", "K" * 9)):
        rows = ["".join(row) for row in letters[rng.integers(0, 20, (9000, len(sequence)))]]
        folder = tmp_path / name
        folder.mkdir()
        paired = "".join(f">r{k} TaxID={k + 1}\n{row}\n" for k, row in enumerate(rows))
        unpaired = "".join(f">r{k}\n{row}\n" for k, row in enumerate(rows[:50] + rows[:7]))
        (folder / "pairing.a3m").write_text(f">q\n{sequence}\n{paired}")
        (folder / "unpaired.a3m").write_text(f">q\n{sequence}\n{unpaired}")
        result = featurize_msa(sequence, MolType.PROTEIN, [folder / "unpaired.a3m", folder / "pairing.a3m"])
        assert result.content is not None
        kept = {source["name"]: source["kept"] for source in attributes_of(result.content)["sources"]}
        # Duplicates go within a file; the unpaired file keeps rows that the other one has, too.
        assert kept == {"pairing.a3m": 9000, "unpaired.a3m": len(set(rows[:50]))}
        contents.append(result.content)
    pairing = pair_msas([MsaRows.from_content(content) for content in contents])
    assert pairing is not None
    pairs = pairing.arrays["pairing"]
    assert pairs.shape == (8192, 2)
    sources = [content.arrays["rows"][0] for content in contents]
    species = [content.arrays["rows"][1] for content in contents]
    names = [attributes_of(content)["species"] for content in contents]
    for first, second in pairs[1:].tolist():
        assert sources[0][first] == sources[1][second] == 0  # the file called pairing
        assert names[0][species[0][first]] == names[1][species[1][second]]
    for column in pairs.T:
        assert len(set(column.tolist())) == len(column)


def test_an_rna_chain_among_proteins(tmp_path):
    """The same letters mean nucleotides in one chain and amino acids in the other."""
    path = tmp_path / "hits.a3m"
    path.write_text(">q\nACGU\n>a\nACGT\n>b\nANG-\n")
    rna = content_of(path, "ACGU", MolType.RNA)
    assert [names_of(row) for row in rna.arrays["msa"].T] == [
        ["A", "C", "G", "U"],  # row a is the same in RNA: a duplicate
        ["A", "N", "G", "-"],
    ]
    protein = content_of(path, "ACGU", MolType.PROTEIN)
    assert [names_of(row) for row in protein.arrays["msa"].T] == [
        ["ALA", "CYS", "GLY", "CYS"],
        ["ALA", "CYS", "GLY", "THR"],
        ["ALA", "ASN", "GLY", "-"],
    ]
    dna = tmp_path / "dna.a3m"
    dna.write_text(">q\nACGT\n>a\nACGU\n>b\nACG-\n")
    assert [names_of(row) for row in content_of(dna, "ACGT", MolType.DNA).arrays["msa"].T] == [
        ["DA", "DC", "DG", "DT"],
        ["DA", "DC", "DG", "-"],
    ]


def test_a_query_one_residue_longer(tmp_path):
    """The file fails by name, nothing stands in for it."""
    path = tmp_path / "hits.a3m"
    path.write_text(">q\nMKVLA\n>a\nMKVLA\n")
    result = featurize_msa("MKVL", MolType.PROTEIN, [path])
    assert result.content is None
    (failure,) = result.failures
    assert failure.reason == "query-mismatch"
    assert str(path) in str(failure)
    assert "its query has 5 residues, the chain has 4" in str(failure)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hmmsearch.sto", "# STOCKHOLM 1.0\n1abc_A/1-2 GC--\n9zzz_A/1-4 GCMK\n#=GC RF xxxx\n//\n"),
        ("templates.a3m", ">101\nGCMK\n>1abc_A/1-2\nGC--\n>9zzz_A/1-4\nGCMK\n"),
        (
            "pdb70.m8",
            "101\t1abc_A\t1.0\t2\t0\t0\t1\t2\t1\t2\t1.0\t9\t2M\n101\t9zzz_A\t1.0\t4\t0\t0\t1\t4\t1\t4\t1.0\t9\t4M\n",
        ),
    ],
)
def test_useless_hits(tmp_path, name, text):
    """A hit of two residues, and one to an entry that is not here: counted by reason, in each format."""
    (tmp_path / "pdb").mkdir()
    path = tmp_path / name
    path.write_text(text)
    result = featurize_templates("GCMK", [path], TemplateStructures([tmp_path / "pdb"]))
    assert result.failures == ()
    assert result.content is not None
    assert result.content.arrays["hits"].shape == (5, 0)
    assert result.content.attributes["skipped"] == {"no-structure": 1, "too-short": 1}
