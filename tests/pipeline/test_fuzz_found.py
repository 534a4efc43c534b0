"""What damaged files have brought to light, in files small enough to read."""

import pytest

from tests.pipeline.structure_files import TWO_FOLD, CifFile, make


def test_positions_of_a_break_are_consecutive(tmp_path):
    """A chain without a sequence, whose numbers jump: the unknown residues in between take their numbers."""
    file = CifFile()
    for position, number in enumerate((1, 2, 7, 8)):
        file.add("GLY", "A", number, at=(12.0 * position, 0, 0), entity="?")
    made = make(file.write(tmp_path))
    assert made.codes == ["GLY", "GLY", *4 * ["UNK"], "GLY", "GLY"]
    assert made.tables["residues"]["label_seq_id"].tolist() == list(range(1, 9))
    assert made.tables["residues"]["auth_seq_id"].tolist() == list(range(1, 9))


def with_operators(tmp_path, expression: str, *rows: str):
    file = CifFile().polymer("GLY GLY GLY GLY")
    for position in range(1, 5):
        file.add("GLY", "A", position, at=(3.8 * position, 9, 0))
    file.loop("_pdbx_struct_assembly_gen", "assembly_id oper_expression asym_id_list", f"1 {expression} A")
    file.loop(*TWO_FOLD[:2], *(rows or TWO_FOLD[2:]))
    return make(file.write(tmp_path))


@pytest.mark.parametrize("expression", ["(1-99999999999)", "(1-2)(1-9999)(1-9999)"])
def test_slip_in_an_operator_expression_takes_no_memory(tmp_path, expression):
    made = with_operators(tmp_path, expression)
    assert made.labels == ["A"]
    assert any("means more than" in warning for warning in made.attributes["warnings"])


@pytest.mark.parametrize(
    "row",
    [
        "2 1 0 0 0 0 2 0 0 0 0 1 0", "2 1 0 0 0 0 1 0 0 0 0 -1 0", "2 1 1 0 0 0 1 0 0 0 0 1 0",
        "2 0 0 0 0 0 0 0 0 0 0 0 0",
    ],
    ids=["stretched", "mirrored", "sheared", "nothing"],
)  # fmt: skip
def test_operator_that_is_no_rotation_is_not_applied(tmp_path, row):
    made = with_operators(tmp_path, "1,2", TWO_FOLD[2], row)
    assert made.labels == ["A"]
    assert any("no rotations (2)" in warning for warning in made.attributes["warnings"])
