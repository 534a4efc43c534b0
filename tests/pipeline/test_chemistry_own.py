"""Components of the input's own and of --ccd-extra, from the files to the library that a stream reads."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megafold.cache_store import Digest, LocalStore
from megafold.pipeline.builder.config import BuildConfig, Resources, Sources
from megafold.pipeline.builder.engine import Build, BuildReport
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.chemistry import load_dictionary
from megafold.pipeline.chemistry.library import ComponentLibrary
from megafold.pipeline.manifest import entry_rows
from megafold.pipeline.schema import RefOrigin
from tests.pipeline.structure_files import CifFile

ROOT = Path(__file__).resolve().parents[2]

#: Propene: no dictionary has these codes.
PROPENE_ATOMS = "".join(f"{{code}} C{index} C 0\n" for index in range(3))
PROPENE = f"""data_{{code}}
_chem_comp.id {{code}}
_chem_comp.name propene
_chem_comp.type NON-POLYMER
loop_
_chem_comp_atom.comp_id
_chem_comp_atom.atom_id
_chem_comp_atom.type_symbol
_chem_comp_atom.charge
{PROPENE_ATOMS}loop_
_chem_comp_bond.comp_id
_chem_comp_bond.atom_id_1
_chem_comp_bond.atom_id_2
_chem_comp_bond.value_order
{{code}} C0 C1 SING
{{code}} C1 C2 DOUB
"""


def peptide_with(code: str) -> CifFile:
    file = CifFile().polymer("GLY GLY GLY GLY")
    for position in range(1, 5):
        file.add("GLY", "A", position, at=(3.8 * position, 0, 0))
    for index in range(3):
        file.atom(f"C{index}", code, "B", ".", (9 + 1.4 * index, 8, 0), entity="2")
    return file


@pytest.fixture
def corpus(tmp_path) -> Path:
    """One entry that defines its ligand, one whose ligand the user has to define."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    own = peptide_with("~QS")
    bonds = "_chem_comp_bond", "comp_id atom_id_1 atom_id_2 value_order", "~QS C0 C1 sing", "~QS C1 C2 doub"
    own.loop(*bonds).write(folder, "1own.cif")
    peptide_with("~Q9").write(folder, "2ext.cif")
    return folder


def build(corpus: Path, cache: Path, *extra: Path) -> BuildReport:
    sources = Sources(corpus=corpus, ccd_extra=extra)
    config = BuildConfig(sources=sources, cache=cache, resources=Resources(workers=0))
    return Build(config, BuildProgress(quiet=True)).run()


def library(cache: Path) -> ComponentLibrary:
    store = LocalStore.at(cache)
    with store.open(Digest.parse(str(store.manifest().attributes["components"]))) as reader:
        return ComponentLibrary.from_content(reader.read_all())


def test_both_have_conformers_in_the_library(corpus, tmp_path):
    extra, cache = tmp_path / "extra.cif", tmp_path / "cache"
    extra.write_text(PROPENE.format(code="~Q9"))
    assert build(corpus, cache, extra).failures == []
    rows = {row.entry: row for row in entry_rows(LocalStore.at(cache).manifest())}
    (own,) = (key for key in rows["1own"].components if key.startswith("~~QS:"))
    assert "~Q9" in rows["2ext"].components
    for key in (own, "~Q9"):
        component = library(cache)[key]
        assert component.atom_names == ("C0", "C1", "C2")
        assert component.origin == RefOrigin.RDKIT
        assert component.ref_mask.all()
        lengths = np.linalg.norm(np.diff(component.ref_pos, axis=0), axis=1)
        # the user's file names no hydrogens, the input leaves them out: a bond of propene, or of bare carbon
        np.testing.assert_allclose(lengths, [1.50, 1.34], atol=0.08)
        assert component.bond_orders.tolist() == [1, 2]
        assert len(component.automorphisms) == 1


def test_a_changed_definition_makes_its_users_anew_and_no_others(corpus, tmp_path):
    extra, cache = tmp_path / "extra.cif", tmp_path / "cache"
    extra.write_text(PROPENE.format(code="~Q9"))
    build(corpus, cache, extra)
    before = {row.entry: row.structure for row in entry_rows(LocalStore.at(cache).manifest())}
    extra.write_text(PROPENE.format(code="~Q9").replace("C1 C2 DOUB", "C1 C2 TRIP"))
    report = build(corpus, cache, extra)
    assert report.computed == {"structure": 1, "component": 1}
    after = {row.entry: row.structure for row in entry_rows(LocalStore.at(cache).manifest())}
    assert before["1own"] == after["1own"]
    assert before["2ext"] != after["2ext"]
    component = library(cache)["~Q9"]
    assert component.bond_orders.tolist() == [1, 3]
    assert np.linalg.norm(component.ref_pos[2] - component.ref_pos[1]) < 1.28  # a triple bond


def test_the_command_takes_several_files_and_the_last_wins(corpus, tmp_path):
    first, second, cache = tmp_path / "first.cif", tmp_path / "second.cif", tmp_path / "cache"
    first.write_text(PROPENE.format(code="~Q9") + PROPENE.format(code="~Q8"))
    second.write_text(PROPENE.format(code="~Q9").replace("DOUB", "TRIP"))
    command = [sys.executable, "-m", "megafold", "cache", "build", corpus, cache, "--workers", "0", "--json"]
    shown = subprocess.run(
        [*command, "--ccd-extra", first, "--ccd-extra", second],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["failures"] == []
    assert library(cache)["~Q9"].bond_orders.tolist() == [1, 3]
    assert load_dictionary(extra=(first, second)).digest("~Q9") == load_dictionary(extra=(second,)).digest(
        "~Q9"
    )
