"""The component benchmark goes on after crashes and interruptions, and its table says what its rows say."""

import json
from pathlib import Path

import pytest

from benchmarks import components
from tests.benchmarks.components_crash import killed_by_the_second, refused

CODES = [f"C{number}" for number in range(6)]


@pytest.fixture
def ccd(tmp_path) -> Path:
    """Propane under six codes, and a component without atoms."""
    text = "data_NIL\n_chem_comp.id NIL\n_chem_comp.name nothing\n_chem_comp.type NON-POLYMER\n"
    for code in CODES:
        atoms = "".join(f"{code} A{index} C 0\n" for index in range(3))
        text += f"""data_{code}
_chem_comp.id {code}
_chem_comp.name propane
_chem_comp.type NON-POLYMER
loop_
_chem_comp_atom.comp_id
_chem_comp_atom.atom_id
_chem_comp_atom.type_symbol
_chem_comp_atom.charge
{atoms}loop_
_chem_comp_bond.comp_id
_chem_comp_bond.atom_id_1
_chem_comp_bond.atom_id_2
_chem_comp_bond.value_order
{code} A0 A1 SING
{code} A1 A2 SING
"""
    path = tmp_path / "components.cif"
    path.write_text(text)
    return path


def run(ccd: Path, tmp_path: Path, work=components.outcome) -> dict:
    paths = {"--ccd": ccd, "--rows": tmp_path / "rows.jsonl", "--json": tmp_path / "figures.json"}
    options = [str(item) for pair in paths.items() for item in pair]
    components.main(["--workers", "2", *options], work)
    figures: dict = json.loads((tmp_path / "figures.json").read_text())
    return figures


def written(tmp_path: Path) -> list[str]:
    return [json.loads(line)["code"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_crash_costs_its_component_alone_and_nothing_is_made_twice(ccd, tmp_path):
    figures = run(ccd, tmp_path, killed_by_the_second)
    assert sorted(written(tmp_path)) == [*CODES, "NIL"]
    assert figures["failed_codes"] == {"C1": "crash", "NIL": "no-atoms"}
    assert figures["without_atoms"] == ["NIL"]
    assert figures["with_atoms"] == 6
    assert figures["origins"] == {"RDKIT": 5, "IDEAL": 0, "MODEL": 0, "NONE": 1}
    assert figures["share_with_coordinates"] == figures["share_from_rdkit"] == 83.333
    assert run(ccd, tmp_path, refused) == figures
    assert len(written(tmp_path)) == 7


def test_a_run_that_was_killed_within_a_line_goes_on_after_the_last_whole_one(ccd, tmp_path):
    figures = run(ccd, tmp_path)
    path = tmp_path / "rows.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    again = run(ccd, tmp_path)
    assert path.read_bytes().startswith(b"".join(lines[:4]))
    assert sorted(written(tmp_path)) == [*CODES, "NIL"]
    for name in ("components", "origins", "failures", "share_from_rdkit"):
        assert again[name] == figures[name]


def test_rows_of_another_version_are_made_again(ccd, tmp_path):
    run(ccd, tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace(components.made_by(), "chemistry 0, rdkit 2020.03.1"))
    run(ccd, tmp_path)
    assert len(written(tmp_path)) == 14


def test_shares_are_of_the_components_that_have_atoms():
    def row(code: str, origin: str, failure: str = "", time_s: float = 1.0) -> dict:
        return {
            "code": code,
            "origin": origin,
            "failure": failure,
            "time_s": time_s,
            "atoms": 0 if failure == "no-atoms" else 3,
            "automorphisms": 2,
            "capped": False,
            "bytes": 100,
        }

    figures = components.table(
        [
            row("A", "RDKIT", time_s=3.0),
            row("B", "RDKIT"),
            row("C", "IDEAL", "distorted"),
            row("D", "MODEL", "distorted"),
            row("E", "NONE", "embedding"),
            row("F", "NONE", "no-atoms"),
        ]
    )
    assert figures["share_with_coordinates"] == 80.0
    assert figures["share_from_rdkit"] == 40.0
    assert figures["origins"] == {"RDKIT": 2, "IDEAL": 1, "MODEL": 1, "NONE": 1}
    assert figures["failures_by_origin"] == {
        "distorted": {"IDEAL": 1, "MODEL": 1},
        "embedding": {"NONE": 1},
        "no-atoms": {"NONE": 1},
    }
    assert next(iter(figures["slowest"])) == "A"
    assert figures["time_s"]["max"] == 3.0
    document = components.markdown(figures)
    assert "| without atoms (F) | 1 |  |" in document
    assert "| carry reference coordinates | 4 | 80.00 % |" in document
    assert "| from RDKit | 2 | 40.00 % |" in document
    assert "| distorted | 1 | 1 | 0 | C, D |" in document
