"""Recipes, spelled out: what is in one decides what is computed again, in every cache there is."""

import dataclasses
import hashlib
import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from megafold.pipeline.builder import recipes
from megafold.pipeline.builder.config import Sources
from megafold.pipeline.structure import StructureOptions


def spelled(stage: str, **inputs: object) -> str:
    return sha256({"stage": stage, "version": recipes.VERSIONS[stage], **inputs})


def sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def test_a_structure_is_told_by_entry_file_and_every_option():
    options = StructureOptions()
    values = {name: getattr(options, name) for name in (field.name for field in dataclasses.fields(options))}
    written = {name: sorted(v) if isinstance(v, frozenset) else v for name, v in values.items()}
    assert recipes.structure_recipe("1abc", "a" * 64, options) == spelled(
        "structure", entry="1abc", source="a" * 64, options=written
    )
    assert recipes.options_from_json(json.loads(json.dumps(written))) == options


def test_a_component_is_told_by_its_definition_and_rdkit():
    assert recipes.component_recipe("d") == spelled("component", definition="d", rdkit=version("rdkit"))


def test_an_msa_is_told_by_sequence_kind_and_names_and_digests_of_files_in_order():
    files = [("b.a3m", "1"), ("a.sto", "2")]
    assert recipes.msa_recipe("s", "rna", files) == spelled(
        "msa", sequence="s", mol_type="rna", files=[["b.a3m", "1"], ["a.sto", "2"]]
    )


def test_a_pairing_is_told_by_the_msas_in_order():
    assert recipes.pairing_recipe(iter(["2", "1"])) == spelled("pairing", msas=["2", "1"])


def test_a_template_object_is_told_by_sequence_files_structures_and_aligner():
    assert recipes.template_recipe("s", [("h.hhr", "1")], {"1abc": "2", "9zzz": ""}) == spelled(
        "template",
        sequence="s",
        files=[["h.hhr", "1"]],
        structures={"1abc": "2", "9zzz": ""},
        aligner=f"biotite {version('biotite')}",
    )


@pytest.mark.parametrize("stage", ["structure", "component", "msa", "pairing", "template"])
def test_another_version_of_a_stage_changes_its_recipes_alone(monkeypatch, stage: str):
    def all_recipes() -> dict[str, str]:
        return {
            "structure": recipes.structure_recipe("1abc", "a", StructureOptions()),
            "component": recipes.component_recipe("d"),
            "msa": recipes.msa_recipe("s", "rna", []),
            "pairing": recipes.pairing_recipe([]),
            "template": recipes.template_recipe("s", [], {}),
        }

    before = all_recipes()
    monkeypatch.setattr(recipes, "VERSIONS", {**recipes.VERSIONS, stage: "next"})
    assert {name for name, recipe in all_recipes().items() if recipe != before[name]} == {stage}


def test_a_dictionary_is_told_by_its_files_in_order(tmp_path):
    one, other = tmp_path / "one.cif", tmp_path / "other.cif"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    digests = [hashlib.sha256(text).hexdigest() for text in (b"1", b"2")]
    corpus = Sources(corpus=tmp_path)
    assert recipes.dictionary_identity(corpus) == sha256(
        {"base": f"biotite {version('biotite')}", "extra": []}
    )
    named = dataclasses.replace(corpus, ccd=other, ccd_extra=(one, other))
    assert recipes.dictionary_identity(named) == sha256({"base": digests[1], "extra": digests})


def test_namesakes_are_what_the_dictionary_has_under_the_codes_of_a_files_own_components():
    class Dictionary:
        def get(self, key: str) -> SimpleNamespace | None:
            return {"ALA": SimpleNamespace(digest="1"), "LIG": SimpleNamespace(digest="2")}.get(key)

    def found(*keys: str) -> str:
        return recipes.namesakes_recipe(Dictionary(), keys)  # type: ignore[arg-type]

    assert found("ALA") == ""
    assert found("ALA", "~NEW:0123456789ab", "~LIG:ba9876543210") == sha256({"LIG": "2", "NEW": ""})
