"""Random alignments, written in every format: their MSA objects, and the pairing of two of them."""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megafold.cache_store import Content
from megafold.pipeline.msa import MsaRows, featurize_msa, pair_msas
from megafold.pipeline.schema import MSA, N_RESTYPE, MolType
from tests.pipeline import invariants
from tests.pipeline.random_alignments import (
    MAX_DELETION,
    AlignmentDraft,
    a2m,
    a3m,
    alignments,
    compressed,
    expected,
    stockholm,
)

PROFILE = settings(
    max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def featurized(draft: AlignmentDraft, name: str, data: bytes) -> Content:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        result = featurize_msa(draft.query, draft.mol_type, [path])
    assert result.failures == ()
    assert result.content is not None
    return result.content


def check(content: Content, draft: AlignmentDraft) -> None:
    wanted = expected(draft)
    n_row = len(wanted.classes)
    np.testing.assert_array_equal(content.arrays["msa"], wanted.classes.T)
    np.testing.assert_array_equal(content.arrays["deletion"], np.minimum(wanted.deletions, MAX_DELETION).T)
    np.testing.assert_allclose(content.arrays["deletion_mean"], wanted.deletions.mean(axis=0), rtol=1e-6)
    profile = (wanted.classes[:, :, None] == np.arange(N_RESTYPE)).sum(axis=0) / n_row
    np.testing.assert_allclose(content.arrays["profile"], profile, atol=5e-4)
    attributes: Any = content.attributes
    rows = MSA.table("rows").unpack(content.arrays["rows"])
    names = ["", *attributes["species"]]
    assert [names[index + 1] for index in rows["species"]] == wanted.species
    assert attributes["sources"][0]["rows"] == len(draft.rows)
    assert attributes["sources"][0]["kept"] == n_row - 1


@PROFILE
@given(alignments(), st.sampled_from(["", ".gz", ".zst"]), st.integers(1, 50))
def test_random_alignments(draft: AlignmentDraft, packed: str, block: int) -> None:
    written = {"a3m": a3m(draft), "a2m": a2m(draft), "sto": stockholm(draft, block)}
    objects = {
        suffix: featurized(draft, f"rows.{suffix}{packed}", compressed(text, packed))
        for suffix, text in written.items()
    }
    for content in objects.values():
        invariants.check(content)
        check(content, draft)


@PROFILE
@given(st.data())
def test_random_pairings(data: st.DataObject) -> None:
    """Within a species the k-th best rows of both chains: those with most residues of the query's."""
    drafts = [data.draw(alignments(mol_type=MolType.PROTEIN)) for _ in range(2)]
    contents = [featurized(draft, "uniprot_hits.a3m", a3m(draft).encode()) for draft in drafts]
    ranked = [rows_by_species(draft) for draft in drafts]
    wanted = {
        pair
        for species in ranked[0].keys() & ranked[1].keys()
        for pair in zip(ranked[0][species], ranked[1][species], strict=False)
    }
    paired = pair_msas([MsaRows.from_content(content) for content in contents])
    if not wanted:
        assert paired is None
        return
    assert paired is not None
    invariants.check(paired)
    found = [tuple(row) for row in paired.arrays["pairing"].tolist()]
    assert found[0] == (0, 0)
    assert set(found[1:]) == wanted
    assert len(found) == len(wanted) + 1


def rows_by_species(draft: AlignmentDraft) -> dict[str, list[int]]:
    rows = expected(draft)
    query = rows.classes[0]
    known = query != 20  # an unknown residue equals nothing
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, species in enumerate(rows.species):
        if species:
            classes = rows.classes[index]
            aligned = int((classes != 31).sum())
            equal = int(((classes == query) & known).sum())
            # As stored: both in whole thousandths.
            identity = (1000 * equal + aligned // 2) // aligned
            coverage = (1000 * aligned + len(query) // 2) // len(query)
            found[species].append((-identity * coverage, index))
    return {species: [index for _, index in sorted(items)] for species, items in found.items()}
