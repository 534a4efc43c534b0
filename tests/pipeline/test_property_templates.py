"""Random template hits, as HHR and as hmmsearch's Stockholm, of random structures that gemmi reads."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gemmi
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megafold.cache_store import Content
from megafold.pipeline.schema import GAP, TEMPLATE, MolType
from megafold.pipeline.template import TemplateStructures, featurize_templates
from tests.pipeline import invariants
from tests.pipeline.random_alignments import CLASSES
from tests.pipeline.random_structures import (
    AMINO,
    ChainDraft,
    ResidueDraft,
    StructureDraft,
    chain_name,
    write,
)

ENTRY: Final = "1abc"
CHAIN: Final = chain_name(0)
LETTERS: Final = "ACDEFGHIKLMNPQRSTVWY"
FEWEST_ALIGNED: Final = 4
ATOMS: Final = ("N", "CA", "C", "CB")
CLASS: Final = CLASSES[MolType.PROTEIN]


@dataclass(frozen=True)
class HitDraft:
    """A structure and a hit. ``pairs``: each column's residue of the query and of the chain, -1 for a gap."""

    structure: StructureDraft
    query: str
    pairs: tuple[tuple[int, int], ...]

    @property
    def template(self) -> str:
        residues = self.structure.chains[0].residues
        return "".join(gemmi.find_tabulated_residue(residue.code).one_letter_code for residue in residues)


@st.composite
def hits(draw: DrawFn) -> HitDraft:
    codes = draw(st.lists(st.sampled_from(AMINO), min_size=5, max_size=14))
    residues = tuple(
        ResidueDraft(
            code=code,
            resolved=place == 0 or draw(st.integers(0, 4)) > 0,
            missing=draw(st.sampled_from([0, 0, 2, 5])),
            has_alternates=draw(st.integers(0, 4)) == 0,
            number=place + 3,
            ins_code="",
        )
        for place, code in enumerate(codes)
    )
    first = draw(st.sampled_from([0.3, 0.7]))
    chain = ChainDraft(0, "protein", residues, (first, round(1 - first, 2)), (0.0, 0.0, 0.0))
    structure = StructureDraft((chain,), (), (), 1, draw(st.booleans()), False)
    own = "".join(gemmi.find_tabulated_residue(code).one_letter_code for code in codes)

    before = draw(st.integers(0, 3))
    query_at, template_at = before, draw(st.integers(0, 2))
    query = draw(st.text(LETTERS, min_size=before, max_size=before))
    pairs: list[tuple[int, int]] = []
    while template_at < len(own):
        kind = "both" if not pairs else draw(st.sampled_from(["both"] * 6 + ["query", "template", "end"]))
        if kind == "end":
            break
        pairs.append((query_at if kind != "template" else -1, template_at if kind != "query" else -1))
        if kind != "template":
            same = kind == "both" and draw(st.booleans())
            query += own[template_at] if same else draw(st.sampled_from(LETTERS))
            query_at += 1
        template_at += kind != "query"
    while pairs[-1][0] < 0 or pairs[-1][1] < 0:  # a hit ends with an aligned pair
        pairs.pop()
    query += draw(st.text(LETTERS, max_size=3))
    return HitDraft(structure, query, tuple(pairs))


def columns(draft: HitDraft) -> tuple[str, str]:
    query = "".join(draft.query[i] if i >= 0 else "-" for i, _ in draft.pairs)
    template = "".join(draft.template[j] if j >= 0 else "-" for _, j in draft.pairs)
    return query, template


def hhr(draft: HitDraft, width: int) -> str:
    """As hhsearch writes it, ``width`` columns a block."""
    query, template = columns(draft)
    name = f"{ENTRY}_{CHAIN}"
    at_query, at_template = draft.pairs[0][0] + 1, draft.pairs[0][1] + 1
    lines = [
        "Query         query", f"Match_columns {len(draft.query)}", "No_of_seqs    1 out of 1", "",
        " No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM",
        f"  1 {name} a chain                 99.9", "", "No 1", f">{name} a chain",
        "Probab=99.90  E-value=1e-20  Score=100.00  Aligned_cols=10  Identities=50%", "",
    ]  # fmt: skip
    for start in range(0, len(query), width):
        for mark, label, at, total, text in (
            ("Q", "query", at_query, len(draft.query), query[start : start + width]),
            ("T", name, at_template, len(draft.template), template[start : start + width]),
        ):
            count = len(text.replace("-", ""))
            lines.append(f"{mark} {label:16s} {at:4d} {text} {max(at, at + count - 1):4d} ({total})")
            if mark == "Q":
                at_query += count
            else:
                at_template += count
        lines.append("")
    return "\n".join([*lines, "Done!", ""])


def stockholm(draft: HitDraft) -> str:
    """As hmmsearch writes it: a column for each residue of the query, insertions in lower case."""
    letters = dict.fromkeys(range(len(draft.query)), "-")
    inserted = dict.fromkeys(range(len(draft.query)), "")
    last = -1
    for query, place in draft.pairs:
        last = max(last, query)
        if place >= 0 and query >= 0:
            letters[query] = draft.template[place]
        elif place >= 0:
            inserted[last] += draft.template[place].lower()
    row = "".join(letters[position] + inserted[position] for position in letters)
    reference = "".join("x" + "." * len(inserted[position]) for position in letters)
    name = f"{ENTRY}_{CHAIN}/{draft.pairs[0][1] + 1}-{draft.pairs[-1][1] + 1}"
    head = "# STOCKHOLM 1.0\n#=GF AU hmmsearch (HMMER 3.3.2)\n\n"
    return f"{head}{name} {row}\n#=GC RF {reference}\n//\n"


def backbone(path: Path, place: int, code: str) -> np.ndarray:
    """[4, 3] N, CA, C and CB (CA for GLY) as gemmi reads them, of the alternate that is occupied most."""
    found = np.full((len(ATOMS), 3), np.nan)
    for residue in gemmi.read_structure(str(path))[0][CHAIN]:
        if residue.label_seq != place + 1:
            continue
        letters = {atom.altloc: -atom.occ for atom in residue}
        letter = min(letters, key=lambda name: (letters[name], name))
        for atom in residue:
            if atom.altloc == letter and atom.name in ATOMS:
                found[ATOMS.index(atom.name)] = atom.pos.tolist()
        if code == "GLY":
            found[3] = found[1]
    return found


def check(content: Content, draft: HitDraft, path: Path) -> None:
    aligned = [(i, j) for i, j in draft.pairs if i >= 0 and j >= 0]
    attributes: Any = content.attributes
    if len(aligned) < FEWEST_ALIGNED:
        assert attributes["skipped"] == {"too-short": 1}
        return
    assert attributes["skipped"] == {}
    assert list(attributes["hits"]["entry"]) == [ENTRY]
    assert list(attributes["hits"]["chain"]) == [CHAIN]
    restype, pos = content.arrays["template_restype"][0], content.arrays["template_atom_pos"][0]
    wanted = np.full(len(draft.query), GAP)
    for i, j in aligned:
        wanted[i] = CLASS[draft.template[j]]
        code = draft.structure.chains[0].residues[j].code
        np.testing.assert_allclose(pos[i], backbone(path, j, code), atol=2e-3)
    assert restype.tolist() == wanted.tolist()
    table = TEMPLATE.table("hits").unpack(content.arrays["hits"])
    rows = {name: int(values[0]) for name, values in table.items()}
    equal = sum(draft.query[i] == draft.template[j] for i, j in aligned)
    assert rows["aligned"] == len(aligned)
    assert abs(rows["identity"] - 1000 * equal / len(aligned)) <= 0.5
    assert abs(rows["coverage"] - 1000 * len(aligned) / len(draft.query)) <= 0.5
    assert (rows["first"], rows["last"]) == (aligned[0][0], aligned[-1][0])


@settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(hits(), st.integers(1, 20))
def test_random_hits(draft: HitDraft, width: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{ENTRY}.cif"
        write(draft.structure, path)
        for name, text in (("hits.hhr", hhr(draft, width)), ("hmmsearch_hits.sto", stockholm(draft))):
            file = Path(folder) / name
            file.write_text(text)
            result = featurize_templates(draft.query, [file], TemplateStructures((path,)))
            assert result.failures == ()
            assert result.content is not None
            invariants.check(result.content)
            check(result.content, draft, path)
