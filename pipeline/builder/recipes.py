"""Recipes: the digest of what would be computed, from what, and how.

A recipe is known before the work is done. Two builds that find the same recipe reuse the same result. It
holds the digests of the input bytes, the options and the version of the stage, and the versions of
libraries whose output can differ; never a path or a time. Names are in it only where the output holds them:
the entry id, and the base name of an alignment file, which says what database its rows come from.

Each stage has a version, a constant of its package. Whoever changes a stage's output raises it;
the golden-digest test fails otherwise.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from megafold.cache_store import Digest, mapping_digest
from megafold.pipeline.builder.config import Sources
from megafold.pipeline.chemistry import ComponentDictionary
from megafold.pipeline.chemistry.component import is_own_key, own_code
from megafold.pipeline.chemistry.reference import stage_versions
from megafold.pipeline.errors import InputError
from megafold.pipeline.msa import PAIRING_VERSION
from megafold.pipeline.msa import VERSION as MSA_VERSION
from megafold.pipeline.structure import STRUCTURE_VERSION, StructureOptions
from megafold.pipeline.template import VERSION as TEMPLATE_VERSION

#: Of every stage, and of the libraries whose output can differ. The manifest keeps them.
VERSIONS: Final[Mapping[str, str]] = {
    "structure": str(STRUCTURE_VERSION),
    "component": stage_versions()["chemistry"],
    "rdkit": stage_versions()["rdkit"],
    "msa": str(MSA_VERSION),
    "pairing": str(PAIRING_VERSION),
    "template": str(TEMPLATE_VERSION),
}
#: Those of them that are no stages.
LIBRARIES: Final = frozenset({"rdkit"})


def dictionary_identity(sources: Sources) -> str:
    """Digest of the component dictionary as a whole: what a component's absence was found in.

    Which definitions a structure used is told by their own digests; that one was missing can only be told
    of the whole dictionary.
    """
    base = str(Digest.of_file(sources.ccd)) if sources.ccd else f"biotite {version('biotite')}"
    extra = [str(Digest.of_file(path)) for path in sources.ccd_extra]
    return str(mapping_digest({"base": base, "extra": extra}))


def file_digest(path: Path) -> str:
    """Digest of an input file, ``""`` where it cannot be read: the task that needs it says so."""
    try:
        return str(Digest.of_file(path))
    except OSError:
        return ""


def options_to_json(options: StructureOptions) -> dict[str, Any]:
    """Options as recipes and manifests hold them; :func:`options_from_json` reads them back."""
    values = dataclasses.asdict(options)
    return {key: sorted(v) if isinstance(v, frozenset) else v for key, v in values.items()}


def options_from_json(values: Mapping[str, Any]) -> StructureOptions:
    """Options that :func:`options_to_json` wrote.

    Raises:
        InputError: another version wrote them, whose options differ.
    """
    known: dict[str, Any] = {k: frozenset(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        return StructureOptions(**known)
    except TypeError as error:
        raise InputError(
            f"the cache was built by another version, whose options differ ({error}); build again",
            reason="other-version",
        ) from error


def _recipe(stage: str, **inputs: Any) -> str:
    return str(mapping_digest({"stage": stage, "version": VERSIONS[stage], **inputs}))


def structure_recipe(entry: str, source_digest: str, options: StructureOptions) -> str:
    """Recipe of a structure object.

    The definitions of the components it uses are inputs too, but which ones is known only afterwards: the
    manifest names them, and :mod:`megafold.pipeline.builder.planner` compares their digests.
    """
    return _recipe("structure", entry=entry, source=source_digest, options=_options(options))


@cache  # of every entry the same
def _options(options: StructureOptions) -> dict[str, Any]:
    return options_to_json(options)


def namesakes_recipe(dictionary: ComponentDictionary, keys: Iterable[str]) -> str:
    """What the dictionary has under the codes of components that a structure file brought along.

    Whether the file's own definition or the dictionary's is taken depends on it. ``keys`` are those of the
    components that the structure uses; ``""`` where none is the file's own.
    """
    codes = sorted({own_code(key) for key in keys if is_own_key(key)})
    if not codes:
        return ""
    found = {code: dictionary.get(code) for code in codes}
    return str(mapping_digest({code: known.digest if known else "" for code, known in found.items()}))


def component_recipe(definition: str) -> str:
    """Recipe of a reference component; ``definition`` is the digest of its definition."""
    return _recipe("component", definition=definition, rdkit=VERSIONS["rdkit"])


def msa_recipe(sequence_digest: str, mol_type: str, files: Sequence[tuple[str, str]]) -> str:
    """Recipe of an MSA object; ``files`` are (base name, digest), in the order they are read."""
    return _recipe("msa", sequence=sequence_digest, mol_type=mol_type, files=[list(file) for file in files])


def pairing_recipe(msas: Iterable[str]) -> str:
    """Recipe of an entry's pairing; ``msas`` are the digests of its distinct MSA objects, in column order."""
    return _recipe("pairing", msas=list(msas))


def template_recipe(
    sequence_digest: str, files: Sequence[tuple[str, str]], structures: Mapping[str, str]
) -> str:
    """Recipe of a template object.

    Args:
        sequence_digest: digest of the query.
        files: (base name, digest) of the hit files.
        structures: digest of the structure by entry that a hit names (its file's, or its object's in a
            cache), ``""`` where there is none.
    """
    return _recipe(
        "template",
        sequence=sequence_digest,
        files=[list(file) for file in files],
        structures=dict(structures),
        aligner=f"biotite {version('biotite')}",
    )
