"""What the stage makes of some files. Where it changes, raise ``STRUCTURE_VERSION`` and store new digests."""

import pytest

from megafold.pipeline.structure import STRUCTURE_VERSION, StructureOptions
from tests.pipeline.structure_files import CifFile, definition, make

VERSION = 3
SYNTHETIC = "7d041bff8a239e92d82c5c88c0a1b662ec7acdfb82a6344a7859968e8994d422"
#: With the default options: protein, DNA, RNA, glycans, alternates, assemblies, inferred bonds.
ENTRIES = {
    "structures/1crn": "a9bc572e25cc2bd8e4196aa68656255d2104ac49e2d4fca0495a7c35e0e3b8c6",
    "structures/1bna": "b1c4a64838a731c71df5b77ab2a4bf956d4c9ab4f3d7515771aba6939a7e81a3",
    "structures/2rtg": "ec6ae11cf94eaeb77b1559345f6da6a450c8c0d6c5aa58594763287142703e3b",
    "structures/1pfe": "1c67fc02f3b6a019dea424cd07f8b74471593a04976b09460842ed4a71f63e9f",
    "structures/7cfn": "54d067f5cae3c2438aeccd4e3edb6356bf4e2226337b527d241ffd12df1cda09",
    "structures/209d-assembly1": "3078485a00c944e018f6fa11d75ead7cb277a6f2b54ee0a94799658ceb87434c",
    "more/structures/1ehz": "29fb8ad2726a184c3c77c792091efc4262e572ddf4295de60e252d77c5587baa",
    "more/structures/1b5f": "6bd3e311f5c757ebe3de3b743fffcc06fc0672355631ba37ad73833ae5d2a47f",
    "more/structures/1sfi": "59725c4214af26985ec61c2529dc40bdd651d0100ad53350f3645733b2d94fca",
    "more/structures/6lu7": "b47597724c7c947eac427f354d64ae2be977f2f04d1ed32de1c04579c81fb5cd",
    "more/structures/3hya": "89e13e3b0bf5be459713615c893a37d42977026a54c56d03976c5c46a7e76aa4",
    "more/structures/1ema": "81b82fedcd40c1046b72591ee527edf2135d242c6e5cf188b497458fd0644f29",
    "more/variants/1fbl-pymol": "8a1f77ff3e081994b3219484249bf3a31b49e7b8cbc91502897d327a2b979169",
    "more/variants/penicillin-ts2-ncaa": "644d788fd0c0d05aae888e14a5455c45baa4bdaf4009c094b0f1755edcc6c4f3",
    "more/variants/8zz4-ihm": "6b322ba014f66eefb87029a5f55d5b285500d26404b265a479a769f38eb3c1d4",
}


def test_golden_digest(tmp_path):
    """A peptide with a modified residue, a gap, an alternate, a ligand and an arginine."""
    file = CifFile().polymer("GLY SEP MSE ARG ALA GLY")
    for seq, code in ((1, "GLY"), (2, "SEP"), (3, "MSE"), (4, "ARG"), (6, "GLY")):
        file.add(code, "A", seq, at=(4 * seq, 0, 0), auth=seq + 10)
    file.atom("CA", "ALA", "A", 5, (20, 1, 0), alt="A", occ=0.4)
    file.atom("CA", "ALA", "A", 5, (20, 2, 0), alt="B", occ=0.6)
    file.loop("_entity", "id type", "2 non-polymer")
    file.add("HEM", "B", at=-definition("HEM").ideal_pos[0] + (0, 40, 0), entity="2", auth=201)
    made = make(file.write(tmp_path), StructureOptions())
    assert STRUCTURE_VERSION == VERSION
    assert str(made.content.digest()) == SYNTHETIC


@pytest.mark.corpus
@pytest.mark.parametrize("name", ENTRIES)
def test_golden_digests_of_entries(corpus_dir, name):
    made = make(corpus_dir / f"{name}.cif.gz", StructureOptions(), name.split("/")[-1])
    assert STRUCTURE_VERSION == VERSION
    assert str(made.content.digest()) == ENTRIES[name]
