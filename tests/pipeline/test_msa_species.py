"""Header styles, as found in files in the wild."""

import pytest

from megafold.pipeline.msa.species import species_of, species_of_rows

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


def test_rows_share_names():
    rows = species_of_rows([b"a TaxID=9606 b", b"q", b"c OX=9606"])
    assert rows == ["9606", "", "9606"]
    assert rows[0] is rows[2]
