"""What the stage makes of some files. Where it changes, raise ``STRUCTURE_VERSION`` and store new digests."""

import pytest

from megafold.pipeline.structure import STRUCTURE_VERSION, StructureOptions
from tests.pipeline.structure_files import CifFile, definition, make

VERSION = 2
SYNTHETIC = "2e7b689b6e692ca8458eece5ece4799975ff7a8f28075d86bbff46a421c8fa03"
#: With the default options: protein, DNA, RNA, glycans, alternates, assemblies, inferred bonds.
ENTRIES = {
    "structures/1crn": "dfb275ccd37087b437a89d280be076e771e9947b77a424756f4da2bf64657b19",
    "structures/1bna": "f6b3f0623a8fadb8130ac50c44a19e0b1820606f3c7b419cbd4f3e4603d7aa71",
    "structures/2rtg": "45c9b3c3e0d8d3c33987b8dd6c7c5b3b80c3557ed1e18156cc62f7994c2487a7",
    "structures/1pfe": "80176b8f922a5613de448bd9f349269044158140f090050dfe3d377f47373123",
    "structures/7cfn": "8b1e22bc699b805ebd711906bc5b56571225e03040c0a7f49277c8b46a4d3f1c",
    "structures/209d-assembly1": "9465fac05d0c2574c411fbcddda6e53a14e7f4df5afbfeae1001853a717aa990",
    "more/structures/1ehz": "3385b62a2891c8ae748be5b441854c3aad4c513f07838590eeb6fa2e03fc84b1",
    "more/structures/1b5f": "4de774ae7e9e271fc634e60c311a76a1d00d491f0e247659abb957f235bb8a93",
    "more/structures/1sfi": "d94e4b87ce4346a1244632fb27ddcdac24942a38e2bc8ec431408e52cd57a2b9",
    "more/structures/6lu7": "ab2380c12bed0d13f703d7e55e8227f69bf0c42c04e323004b91f9839868799e",
    "more/structures/3hya": "c735fea964864c0a9939f23c113309a88a9e3c04adc840287efeacf5f5dd3b68",
    "more/structures/1ema": "2e252aec2fb7a4117a90b9d9e08f1a33198a769d6f058d3c71962bece9ffb5fb",
    "more/variants/1fbl-pymol": "daacc66c2a2036ad7237fcb42ced41116f14a2dd1b3e5d47cadc6582f865e8b0",
    "more/variants/penicillin-ts2-ncaa": "a43ded066d0bc06f9a94bb1641fd26f0b71cffc358466a1d29b271956079962f",
    "more/variants/8zz4-ihm": "9521b63bd8b9ce6bf92dfbc7fa289f15d705881df0c7091a63ea6e177183455c",
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
