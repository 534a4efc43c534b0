"""Header styles, as found in files in the wild."""

import re
from collections import Counter

import numpy as np
import pytest

from megafold.pipeline.alignments import file_kind
from megafold.pipeline.msa.alignment import TextSlices
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.source import parse_alignment
from megafold.pipeline.msa.species import species_of, species_of_rows
from megafold.pipeline.msa.text import read_text
from megafold.pipeline.schema import MolType

HEADERS = {
    "UniRef90_A0A4U1FNC5/3-139 [subseq from] Hemoglobin n=1 Tax=Monodon monoceros TaxID=40151 "
    "RepID=A0A4U1FNC5_MONMO": "40151",
    "UniRef90_P63111/2-142 [subseq from] Hemoglobin n=8 Tax=Catarrhini TaxID=9526 RepID=HBA_PAPAN": "9526",
    "UniRef100_A0A2H1A674_498019/\t268\t0.985\t6.443E-78\t0\t203\t204\t0\t203\t204": "498019",
    "UniRef100_UPI00186459A6_118141/": "118141",
    "UniRef100_A0A0M5M6Q1\t257\t0.978": "",
    "tr|A0A2W3M096|A0A2W3M096_STAAU Plasmid segregation protein ParR OS=Staphylococcus aureus OX=1280 "
    "GN=C7Q70_14145 PE=4 SV=1": "1280",
    "tr|A0A1K0GGD5|A0A1K0GGD5_RAT Globin d1 OS=Rattus norvegicus GN=Glnd1 PE=3 SV=1": "RAT",
    "tr|A0A0Q9XW80|A0A0Q9XW80_9STAP Uncharacterized OS=Staphylococcus sp. NAM3COL9 PE=4 SV=1": "9STAP",
    "sp|P0C2N4|YSCX_YEREN/64-85": "YEREN",
    "tr|A0A146SKV9|A0A146SKV9_FUNHE/3-50": "FUNHE",
    "UniRef50_Q1 Something n=1 RepID=HBA_PAPAN": "PAPAN",
    "UniRef50_Q1 Something n=1 Tax=Homo sapiens": "Homo sapiens",
    "X1 protein OS=Escherichia coli (strain K12) GN=abc PE=1": "Escherichia coli (strain K12)",
    "01|UniRef100_UPI0019543253_47969//5-72 [subseq from] 41 0.169 7.498E-01 6 114": "47969",
    "PIM1_HUMAN/38-290/1-253 [subseq from] P11309": "HUMAN",
    "03|Q9XW80_9STAP/3-20": "9STAP",
    "36|ERR1711973_13243/55-79 [subseq from] ERR1711973_13243": "",
    "ERR1719259_35195/4-242": "",
    "PIM1_HUMAN": "",
    "01|A0A8D0H058/4-41 [subseq from] 85": "",
    "query": "",
    "": "",
    "SRR5579864_7281666\t267\t0.331": "",
    "16061|Ga0209224_1019984_1|-2|01\t267\t0.331": "",
    "MGYP000836687451/14-154 [subseq from] PL=01 UP=0 BIOMES=0000000011000": "",
    "1011999_1 # 1 # 207 # -1 # ID=1011999_1;partial=11;start_type=Edge;rbs_motif=None": "",
    "K01553.1/1-73/1-73 [subseq from] K01553.1/1-73": "",
    "UniRef90_X n=1 Tax=unknown TaxID= RepID=Q1_HUMAN": "HUMAN",
}


@pytest.mark.parametrize(("header", "species"), HEADERS.items())
def test_styles(header, species):
    assert species_of(header.encode()) == species


def names_of(species):
    """One name a row, '' for none."""
    return [species.names[index] if index >= 0 else "" for index in species.index]


def test_rows_share_names():
    rows = species_of_rows([b"a TaxID=9606 b", b"q", b"c OX=9606", b"d RepID=X_HUMAN"])
    assert rows.names == ("9606", "HUMAN")
    assert rows.index.tolist() == [0, -1, 0, 1]


@pytest.mark.parametrize(
    "odd",
    [
        "x TaxID=9606",  # at the end
        "x TaxID=007 y",
        "x TaxID=0 y",
        "x TaxID=12345678901 y",
        "x TaxID=9606; y",
        "x TaxID=\t9606 y",
        "x TaxID= OX=10",
        "TaxID=1 TaxID=2",
        "xTaxID=5",
        "x taxid=5",
        "TaxID=",
        "",
    ],
)
def test_all_headers_at_once_as_one_by_one(odd):
    """Headers of one text are read together; neighbours and what lies between must not leak in."""
    headers = ["a n=1 Tax=Homo TaxID=9606 RepID=A_HUMAN", odd, *HEADERS, odd]
    text = "".join(f">{header}\nMKV TaxID=77\n" for header in headers).encode()
    starts = np.array([m.end() for m in re.finditer(b"^>", text, re.M)])
    stops = np.array([text.index(b"\n", start) for start in starts.tolist()])
    found = species_of_rows(TextSlices(text, starts, stops))
    assert names_of(found) == [species_of(header.encode()) for header in headers]
    # The last header may end the text.
    cut = species_of_rows(TextSlices(text[: int(stops[-1])], starts, stops))
    assert names_of(cut) == names_of(found)


#: Header styles in the corpus, by expressions that are not the parser's.
STYLES = (
    r"\bTaxID=\s*(\d+)\s",
    r"\bOX=\s*(\d+)\s",
    r"^(?:\d+\|)?UniRef\d+_[^_\s]+_(\d+)[/\s]",
    r"^(?:[^\s|]+\|)*(?:sp|tr)\|[^|\s]+\|\w+?_([A-Z0-9]+)",
    r"^(?:\d+\|)?[^\W_]{1,11}_(?!\d+/)([A-Z0-9]{3,5})/\d",
)


@pytest.mark.corpus
def test_every_header_of_the_corpus(corpus_dir):
    """Each header whose style an independent expression knows gives that species; others give none."""
    counts: Counter[str] = Counter()
    for folder in ("alignments", "spare_alignments", "more/alignments", "more/spare_alignments"):
        for path in sorted((corpus_dir / folder).rglob("*.gz")):
            if file_kind(path) != "msa":
                continue
            alphabet = Alphabet.of(MolType.RNA if "rna" in path.name.lower() else MolType.PROTEIN)
            for alignment in parse_alignment(read_text(path), alphabet):
                headers = [header.decode("utf-8", "replace") for header in alignment.headers]
                found = names_of(species_of_rows(alignment.headers))
                for header, species in zip(headers, found, strict=True):
                    for pattern in STYLES:
                        match = re.search(pattern, header + " ")
                        if match:
                            assert species == match[1], header
                            counts[pattern] += 1
                            break
                    else:
                        assert species == "" or "RepID=" in header or "Tax=" in header or "OS=" in header, (
                            header
                        )
                        counts["named" if species else "none"] += 1
    # As counted in the raw text with the same expressions.
    assert [counts[style] for style in STYLES] == [87_595, 1_320, 49_253, 1_302, 206]
