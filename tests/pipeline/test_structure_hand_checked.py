"""Entries by hand, and every tag of the corpus manifest by what it has to mean.

The first table was checked by hand against the entries' own pages and categories: chains of assembly 1 with
their tokens (one for each residue of the sequence, one an atom for the rest), dates, resolution, bonds. The
second test reads the file with gemmi's CIF parser and checks each of its tags
(:mod:`tests.pipeline.structure_traits`).
"""

import csv
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from megafold.pipeline.errors import StructureError
from megafold.pipeline.schema import BondKind, MolType
from megafold.pipeline.structure import StructureOptions
from tests.pipeline.structure_case import Case
from tests.pipeline.structure_files import Made, make
from tests.pipeline.structure_traits import CHECKS

LETTERS = {MolType.PROTEIN: "p", MolType.RNA: "r", MolType.DNA: "d", MolType.LIGAND: "l"}


@dataclass(frozen=True)
class Hand:
    """What an entry's features have to be, with the default options.

    ``chains``: name, type and tokens of each chain of assembly 1. ``sym_ids``: by chain. ``bonds``: by kind.
    ``starts``: beginning of a chain's one-letter sequence. ``resolved``: atoms with coordinates.
    """

    chains: str
    sym_ids: str
    release: str | None
    resolution: float | None
    resolved: int
    bonds: dict[str, int] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)
    filtered: dict[str, int] = field(default_factory=dict)


COPIES_OF_STREPTAVIDIN = " ".join(["A:p159 B:l16"] * 4)

HAND = {
    # Ubiquitin, one chain, waters alone.
    "1ubq": Hand(
        "A:p76", "1", "1987-04-16", 1.8, 602, starts={"A": "MQIFVKTLTGKTITLEVEPSD"}, filtered={"waters": 58}
    ),
    # Streptavidin and biotin (16 atoms), a tetramer by four operators of 121 modelled residues of 159.
    "1stp": Hand(
        COPIES_OF_STREPTAVIDIN,
        "1 1 2 2 3 3 4 4",
        "1992-10-15",
        2.6,
        4 * 917,
        starts={"A": "DPSKDSKAQVSAAEAGITGTWYNQ"},
    ),
    # Haemoglobin: two alpha, two beta, four haems (43 atoms), iron at the proximal histidine; phosphates go.
    "4hhb": Hand(
        "A:p141 B:p146 C:p141 D:p146 G:l43 H:l43 I:l43 J:l43",
        "1 1 2 2 1 2 3 4",
        "1984-07-17",
        1.74,
        4556,
        bonds={"METAL": 4},
        starts={"A": "VLSPADKTNVKAAWGKVGA", "B": "VHLTPEEKSAVTALWGKVN"},
        filtered={"crystallisation_aids": 2, "waters": 221},
    ),
    # tRNA(Phe): 76 nucleotides, 14 of them modified.
    "1ehz": Hand(
        "A:r385 B:l1 C:l1 D:l1 E:l1 F:l1 G:l1 H:l1 I:l1 J:l1",
        "1 1 1 2 2 3 4 5 6 3",
        "2000-10-02",
        1.93,
        1661,
        bonds={"METAL": 11},
        starts={"A": "GCGGAUUUAGCUCAGUUGGGAGAGC"},
    ),
    # GFP: 235 residues and the chromophore's 22 atoms, bonded to both neighbours; selenomethionine is MET.
    "1ema": Hand(
        "A:p257", "1", "1996-11-08", 1.9, 1771, bonds={"COVALENT": 2}, starts={"A": "MSKGEELFTGVVPILVEL"}
    ),
    # Adenylate kinase and AP5A (57 atoms): assembly 1 is the first of two.
    "1ake": Hand(
        "A:p214 C:l57",
        "1 1",
        "1994-01-31",
        2.0,
        1713,
        bonds={"COVALENT": 1},
        starts={"A": "MRIILLGAPGAGKGTQAQFIMEK"},
        filtered={"alternate_locations": 12, "chains_outside_assembly": 2, "waters": 378},
    ),
    # U2A' and U2B'' on a hairpin of 24 nucleotides; the second complex is assembly 2.
    "1a9n": Hand(
        "A:r24 C:p176 E:p96", "1 1 1", "1998-09-23", 2.38, 2556, filtered={"chains_outside_assembly": 3}
    ),
    # HCK: its sequence leaves out ten residues that are not modelled, 10.2 A wide, so that the chain goes.
    "1ad5": Hand(
        "C:l1 D:l1 E:l31",
        "1 2 1",
        None,
        2.6,
        33,
        bonds={"METAL": 2},
        filtered={"ca_gaps": 1, "chains_outside_assembly": 4, "hydrogens": 1536},
    ),
    # Cardosin A: two chains twice, four glycans.
    "1b5f": Hand(
        "A:p239 B:p87 C:p239 D:p87 E:l60 F:l49 G:l71 H:l49",
        "1 1 2 2 1 1 1 2",
        "1999-01-13",
        1.72,
        5229,
        bonds={"DISULFIDE": 6, "GLYCOSIDIC": 19},
        filtered={"alternate_locations": 85, "waters": 528},
    ),
    # Ramoplanin: a ring of D and L residues, a lipid, two mannoses; the first of six models.
    "1dsr": Hand(
        "A:p122 B:l22 C:l10",
        "1 1 1",
        "1997-02-12",
        None,
        181,
        bonds={"COVALENT": 2, "GLYCOSIDIC": 2},
        filtered={"hydrogens": 144},
    ),
    # CAP: four strands of DNA, two of protein, two cyclic AMP (22 atoms).
    "1j59": Hand(
        "A:d14 B:d17 C:d14 D:d17 E:p209 F:p209 G:l22 H:l22", "1 1 2 2 1 2 1 2", "2002-03-01", 2.5, 4432
    ),
    # A somatomedin-like NMR structure without an assembly: eight cysteines in four bonds.
    "1ssu": Hand("A:p51", "1", "2004-07-27", None, 399, bonds={"DISULFIDE": 4}, filtered={"hydrogens": 357}),
    # Carboxypeptidase M: zinc, two sugars on one asparagine, three disulfides, zero occupancies kept.
    "1uwy": Hand(
        "A:p426 B:l28 C:l1",
        "1 1 1",
        "2004-04-08",
        3.0,
        3205,
        bonds={"METAL": 4, "GLYCOSIDIC": 2, "DISULFIDE": 3},
    ),
    # A nitroreductase dimer by an operator, each with FMN (31 atoms); unknown ligands and aids go.
    "3ek3": Hand(
        "A:p190 B:l31 A:p190 B:l31",
        "1 1 2 2",
        "2008-10-14",
        1.7,
        2936,
        filtered={"alternate_locations": 45, "crystallisation_aids": 6, "unknown_ligands": 2, "waters": 206},
    ),
    # Hyaluronate: eight sugars in one chain, four sodium ions, no polymer.
    "3hya": Hand(
        "A:l105 B:l1 C:l1 D:l1 E:l1",
        "1 1 2 3 4",
        "1980-03-28",
        3.0,
        108,
        bonds={"GLYCOSIDIC": 7, "METAL": 4},
        filtered={"hydrogens": 64, "waters": 8},
    ),
    # RNA polymerase with CAP at 19.8 A: two alpha, beta, beta', omega, sigma, CAP twice, DNA, cyclic AMP.
    "3iyd": Hand(
        "A:p329 B:p329 C:p1342 D:p1413 E:p90 F:p613 G:p209 H:p209 I:d98 J:d98 K:l22 L:l22",
        "1 2 1 1 1 1 1 2 1 1 1 2",
        "2009-11-10",
        19.8,
        35254,
        starts={"G": "VLGKPQTDPTLEWFLSHCHIHKYPS"},
    ),
    # A peptidase inhibitor at the protease of SARS-CoV-2, a dimer by an operator; N3 is six residues.
    "6lu7": Hand(
        "A:p306 B:p32 A:p306 B:p32",
        "1 1 2 2",
        "2020-02-05",
        2.16,
        4832,
        bonds={"COVALENT": 4},
        starts={"A": "SGFRKMAFPSGKVEGCMVQ"},
        filtered={"waters": 84},
    ),
    # Eight copies in the asymmetric unit.
    "7vg9": Hand(
        " ".join(f"{name}:p321" for name in "ABCDEFGH"),
        "1 2 3 4 5 6 7 8",
        "2021-10-27",
        2.91,
        18035,
        filtered={"crystallisation_aids": 48, "waters": 157},
    ),
    # A Fab (light and heavy chain) with a peptide of CD20; the second one is another assembly.
    "2osl": Hand(
        "A:p213 B:p224 E:p25",
        "1 1 1",
        "2007-04-10",
        2.6,
        3445,
        bonds={"DISULFIDE": 6},
        filtered={"chains_outside_assembly": 3, "waters": 212},
    ),
    # Trypsin and the ring of SFTI-1; calcium; six disulfides and one of the ring's.
    "1sfi": Hand(
        "A:p223 B:p14 F:l1",
        "1 1 1",
        "1999-07-09",
        1.65,
        1735,
        bonds={"DISULFIDE": 7, "METAL": 4, "CYCLISATION": 1},
        starts={"A": "IVGGYTCGANTVPYQVSLNSG", "B": "GRCTKSIPPICFPD"},
        filtered={"crystallisation_aids": 3, "waters": 376},
    ),
    # Nipah virus attachment protein with four glycans.
    "3d11": Hand(
        "A:p428 B:l28 C:l28 D:l61 E:l14",
        "1 1 2 1 1",
        "2008-08-19",
        2.306,
        3492,
        bonds={"DISULFIDE": 7, "GLYCOSIDIC": 10},
        filtered={"crystallisation_aids": 19, "waters": 210},
    ),
}

#: Entries beside those above whose tags are checked: together they have every tag.
FURTHER = (
    *(f"structures/{entry}" for entry in ("1u19", "1a4w", "3vfj", "4wvp", "1ej9", "7avw", "1fbl", "2hw3")),
    *(
        f"variants/{name}"
        for name in (
            "184d-stripped", "1ake-chimerax", "1cbs-pdbe-updated", "1fbl-pymol", "1fez-assembly1",
            "1hh0-4char-chains", "3en2-atomworks", "4ake-scipion", "4hhb-ligand-part", "5vht-atomworks",
            "6g90-part", "6nxr-assembly1", "6rs3-stripped", "6yl5-assembly1", "7l8o-assembly1",
            "8vkf-atomworks",
            "8zz4-ihm", "8zz9-ihm", "af-p01112-f1-model_v4", "ma-coffe-slac-c102465-g1-i2",
            "penicillin-ts2-ncaa", "phenix-output", "unl-ligand-with-bonds",
        )
    ),
)  # fmt: skip
CHECKED = (*(f"structures/{entry}" for entry in HAND), *FURTHER)

#: Tags of the files that are refused or broken, and what is said of them.
REFUSED = {
    "variants/nras-braf-gdp-model_0": "unknown-component",
    "broken/1ake-bad-loop": "invalid-cif",
}
BROKEN = ("broken/1en2-bad-atoms", "broken/5pti-noid", "broken/difficult-quoting")


def summary(made: Made) -> str:
    chains = made.tables["chains"]
    kinds = (LETTERS[MolType(kind)] for kind in chains["mol_type"].tolist())
    return " ".join(
        f"{label}:{kind}{count}"
        for label, kind, count in zip(made.labels, kinds, chains["token_count"].tolist(), strict=True)
    )


@pytest.mark.corpus
@pytest.mark.parametrize("entry", HAND)
def test_entry_by_hand(corpus_dir, entry):
    made, hand = make(corpus_dir / f"more/structures/{entry}.cif.gz", StructureOptions()), HAND[entry]
    assert summary(made) == hand.chains
    assert made.attributes["release_date"] == hand.release
    assert made.attributes["resolution"] == hand.resolution
    assert made.tables["atoms"]["resolved"].sum() == hand.resolved
    assert Counter(BondKind(kind).name for kind in made.tables["bonds"]["kind"].tolist()) == hand.bonds
    for label, start in hand.starts.items():
        entity = made.tables["chains"]["entity_id"][made.labels.index(label)]
        assert made.attributes["entities"][entity - 1]["sequence"].startswith(start)
    assert hand.filtered.items() <= made.attributes["filtered"].items()
    # Copies of one entity are numbered from 1 in the chains' order.
    assert " ".join(map(str, made.tables["chains"]["sym_id"].tolist())) == hand.sym_ids


def tags_of(corpus_dir):
    with (corpus_dir / "more/manifest.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {
        row["path"].removesuffix(".cif.gz"): row["tags"].split(",")
        for row in rows
        if row["path"].split("/")[0] in ("structures", "variants", "broken")
    }


@pytest.mark.corpus
@pytest.mark.parametrize("name", CHECKED)
def test_tags_mean_what_they_say(corpus_dir, name):
    case = Case(corpus_dir / f"more/{name}.cif.gz")
    for tag in tags_of(corpus_dir)[name]:
        CHECKS[tag](case)


@pytest.mark.corpus
def test_every_tag_is_covered(corpus_dir):
    """20 entries and more, and among them every tag that the manifest gives to a structure."""
    tags = tags_of(corpus_dir)
    covered = {tag for name in (*CHECKED, *REFUSED, *BROKEN) for tag in tags[name]}
    assert covered == {tag for of_file in tags.values() for tag in of_file}
    # Each tag of a file that builds has a check, which some entry runs.
    assert set(CHECKS) == {tag for name in CHECKED for tag in tags[name]}
    assert len(HAND) >= 20


@pytest.mark.corpus
@pytest.mark.parametrize("name", REFUSED)
def test_refused_files_say_why(corpus_dir, name):
    path = corpus_dir / f"more/{name}.cif.gz"
    with pytest.raises(StructureError, match=name.split("/")[1]) as error:
        make(path)
    assert error.value.reason == REFUSED[name]
    tags = tags_of(corpus_dir)[name]
    assert "user-component:LIG" in tags or "syntax-error" in tags


@pytest.mark.corpus
@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_give_what_they_have(corpus_dir, name):
    case = Case(corpus_dir / f"more/{name}.cif.gz")
    made = case.asym
    assert made.attributes["entry"] == name.split("/")[1]
    resolved = made.coords[np.isfinite(made.coords[:, 0])]
    file = {tuple(place) for place in np.round(case.coords(case.kept), 3).tolist()}
    assert len(resolved)
    assert {tuple(place) for place in np.round(resolved.astype(float), 3).tolist()} <= file
