"""The layout that imports and wheels rest on."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("pipeline", "cache_store", "trainer")


@pytest.mark.parametrize("name", LINKED)
def test_packages_are_relative_links_to_the_top_level_folders(name):
    link = ROOT / "megafold" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("folder", ["megafold", *LINKED])
def test_every_folder_of_code_is_a_package(folder):
    # A folder without __init__.py is left out of a wheel without a word.
    for path in (ROOT / folder).rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path.parent


@pytest.mark.slow
def test_wheel_holds_every_module_under_megafold_alone(tmp_path):
    # From a copy: setuptools would leave a build folder here, and take stale modules from it next time.
    copy = tmp_path / "checkout"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "demo", "runs", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, copy],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"megafold"}
    expected = {
        "megafold/" + path.relative_to(ROOT).as_posix()
        for folder in LINKED
        for path in (ROOT / folder).rglob("*.py")
    } | {path.relative_to(ROOT).as_posix() for path in (ROOT / "megafold").glob("**/*.py") if path.is_file()}
    assert expected <= set(names)


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in ``sys.modules`` after a statement, in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    return set(shown.split())


HEAVY = {"torch", "triton", "numpy", "zarr", "gemmi", "rdkit", "biotite", "dask", "distributed", "pyarrow"}


def test_importing_megafold_imports_nothing_heavy():
    assert not loaded_after("import megafold, megafold.pipeline, megafold.cli.main") & HEAVY


def test_the_stream_is_torch_free_up_to_its_adapter():
    assert "torch" not in loaded_after("import megafold.pipeline.stream")


def test_workers_do_not_pay_for_torch():
    assert "torch" not in loaded_after("import megafold.pipeline.builder.tasks")


def test_documented_features_are_those_of_the_schema():
    from megafold.pipeline.schema_docs import render

    assert (ROOT / "docs" / "features.md").read_text() == render(), "run `make docs`"
