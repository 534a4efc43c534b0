"""Real HHR hits written again as A3M and M8, from the formats' definitions: the same residues come out."""

import gzip
import re
from itertools import groupby

import numpy as np
import pytest

from megafold.pipeline.schema import RESTYPES
from megafold.pipeline.template import TemplateStructures, featurize_templates

pytestmark = pytest.mark.corpus
GAP = RESTYPES.index("-")
#: HHR files of the corpus whose hits have structures there.
FILES = ("of_pdb70_hits.hhr.gz", "1a02_F_pdb70_hits.hhr.gz")


def read_hhr(path):
    """Query length, its letters (X where no hit shows them), [(name, q start, q row, t start, t row)]."""
    raw = gzip.decompress(path.read_bytes()).decode()
    length = int(re.findall(r"^Match_columns\s+(\d+)", raw, re.M)[0])
    letters, hits = ["X"] * length, []
    for part in re.split(r"^No \d+ *$", raw, flags=re.M)[1:]:
        rows: dict[str, list] = {"Q": [], "T": []}
        for side, start, row in re.findall(r"^([QT]) (?!Consensus|ss_)\S+ +(\d+) (\S+) +\d+ \(", part, re.M):
            rows[side].append((int(start), row))
        (q, q_row), (t, t_row) = ((side[0][0], "".join(row for _, row in side)) for side in rows.values())
        residues = q_row.replace("-", "")
        letters[q - 1 : q - 1 + len(residues)] = residues
        hits.append((part.strip().split("\n")[0][1:].split()[0], q, q_row, t, t_row))
    return length, "".join(letters), hits


def as_a3m(length, hits):
    text = ""
    for name, q, q_row, t, t_row in hits:
        pairs = zip(q_row, t_row, strict=True)
        row = "".join(b.lower() if a == "-" else b.upper() for a, b in pairs)
        last_q, last_t = q - 1 + len(q_row.replace("-", "")), t - 1 + len(t_row.replace("-", ""))
        text += f">{name}/{t}-{last_t} some protein\n{'-' * (q - 1)}{row}{'-' * (length - last_q)}\n"
    return text


def as_m8(hits, *, cigar, percent=False):
    lines = []
    for name, q, q_row, t, t_row in hits:
        pairs = list(zip(q_row.upper(), t_row.upper(), strict=True))
        kinds = "".join("I" if b == "-" else "D" if a == "-" else "M" for a, b in pairs)
        runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
        n_equal = sum(a == b for a, b in pairs)
        n_pair = kinds.count("M")
        last_q, last_t = q - 1 + len(q_row.replace("-", "")), t - 1 + len(t_row.replace("-", ""))
        columns = [
            "101", name, f"{n_equal / len(pairs) * (100 if percent else 1):.3f}", len(pairs),
            n_pair - n_equal, len(runs) // 2, q, last_q, t, last_t, "1.0e-20", "90",
        ]  # fmt: skip
        if cigar:
            columns.append("".join(f"{length}{kind}" for kind, length in runs))
        lines.append("\t".join(map(str, columns)) + "\n")
    return "".join(lines)


@pytest.fixture(scope="module")
def structures(corpus_dir):
    return TemplateStructures([corpus_dir / "structures", corpus_dir / "more" / "structures"])


def make(sequence, path, structures):
    result = featurize_templates(sequence, [path], structures)
    assert result.failures == ()
    assert result.content is not None
    return result.content


@pytest.mark.parametrize("name", FILES)
def test_same_residues_in_each_format(corpus_dir, tmp_path, structures, name):
    path = corpus_dir / "more" / "spare_templates" / name
    length, sequence, hits = read_hhr(path)
    expected = make(sequence, path, structures)
    n_hit = expected.arrays["hits"].shape[1]
    assert n_hit >= 2
    texts = {
        "templates.a3m": as_a3m(length, hits),
        "queried.a3m": f">101\n{sequence}\n" + as_a3m(length, hits),
        "pdb70.m8": as_m8(hits, cigar=True),
        "percent.m8": "# comment\n" + as_m8(hits, cigar=True, percent=True),
    }
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
        found = make(sequence, tmp_path / file, structures)
        assert found.attributes["hits"] == expected.attributes["hits"], file
        assert found.attributes["skipped"] == expected.attributes["skipped"], file
        for array in ("hits", "template_restype", "template_atom_pos"):
            np.testing.assert_array_equal(found.arrays[array], expected.arrays[array])


def names(content):
    hits = content.attributes["hits"]
    return [f"{entry}_{chain}" for entry, chain in zip(hits["entry"], hits["chain"], strict=True)]


@pytest.mark.parametrize("name", FILES)
def test_realigned_where_the_file_has_no_alignment(corpus_dir, tmp_path, structures, name):
    """Without a CIGAR string, hits without gaps come out the same; the others about as long."""
    path = corpus_dir / "more" / "spare_templates" / name
    _, sequence, hits = read_hhr(path)
    expected = make(sequence, path, structures)
    (tmp_path / "pdb70.m8").write_text(as_m8(hits, cigar=False))
    found = make(sequence, tmp_path / "pdb70.m8", structures)
    gapless = {hit[0].lower() for hit in hits if "-" not in hit[2] + hit[4]}
    theirs, ours = names(expected), names(found)
    assert set(ours) == set(theirs)
    n_same = 0
    for pair in (pair for pair in ours if theirs.count(pair) == 1):
        mine, stated = (
            item.arrays["template_restype"][of.index(pair)]
            for item, of in ((found, ours), (expected, theirs))
        )
        if pair.lower() in gapless:
            np.testing.assert_array_equal(mine, stated)
            n_same += 1
        assert abs((mine != GAP).sum() - (stated != GAP).sum()) <= 0.2 * (stated != GAP).sum()
    assert n_same >= 1
    (warning,) = (text for text in found.attributes["warnings"] if "aligned" in text)
    assert f"{found.arrays['hits'].shape[1]} hits" in warning
