"""Reads files that say which proteins are alike. Two formats, told apart by the first line:

- *pairs*: two columns with a tab between, cluster and member, a pair a line, as ``mmseqs easy-cluster``
  writes them. A member is called by the SHA-256 of its sequence (64 hex digits or the first 16) or
  ``<entry>_<chain>``, with the author's chain id or, where no chain of the entry has that, the file's own.
  The cluster's name, if it is such a name, is a member too. A first line that begins with ``cluster`` or
  ``representative`` is a heading.
- *entities*: one cluster a line, members ``<entry>_<entity>`` with white space between, as in RCSB's
  ``clusters-by-entity-40.txt``. The cluster is called after its first member.

Entry ids may be in capitals or not. Blank lines and lines that begin with ``#`` do not count. Plain text,
gzip or Zstandard.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from megafold.pipeline.clusters.assign import DIGEST_DIGITS, Proteins, is_clustered
from megafold.pipeline.errors import InputError
from megafold.pipeline.msa.text import read_text

Format = Literal["pairs", "entities"]

_DIGEST: Final = re.compile(rf"[0-9a-f]{{64}}|[0-9a-f]{{{DIGEST_DIGITS}}}", re.IGNORECASE)
_ENTITY: Final = re.compile(r"\S+_\d+")
_HEADINGS: Final = ("cluster", "representative")


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterFile:
    """Clusters from a file.

    Attributes:
        name: name of the file, for messages.
        format: which of the two formats it has.
        digest: SHA-256 of its decompressed text.
        members: cluster name by member, as :func:`member_name` writes it.
    """

    by_sequence_alone: ClassVar[bool] = False

    name: str
    format: Format
    digest: str
    members: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> "ClusterFile":
        """Read a file of either format.

        Raises:
            InputError: it cannot be read, or a line cannot be understood.
        """
        data = read_text(path).data
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not text: {error}", reason="bad-clusters") from error
        lines = [
            (number, line.rstrip())
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.startswith("#")
        ]
        if not lines:
            raise InputError(f"{path} has no clusters: all its lines are empty", reason="bad-clusters")
        is_pairs = "\t" in lines[0][1]
        members: dict[str, str] = {}
        first: dict[str, int] = {}
        for number, cluster, member in _pairs(path, lines) if is_pairs else _entities(path, lines):
            if members.setdefault(member, cluster) != cluster:
                raise InputError(
                    f"{path}, line {number}: {member} is in cluster {cluster} here and in {members[member]} "
                    f"on line {first[member]}; leave one of them",
                    reason="bad-clusters",
                )
            first.setdefault(member, number)
        if is_pairs:
            for cluster in list(dict.fromkeys(members.values())):
                members.setdefault(cluster, cluster)
        return cls(
            name=path.name,
            format="pairs" if is_pairs else "entities",
            digest=hashlib.sha256(data).hexdigest(),
            members=members,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """See :class:`~megafold.pipeline.clusters.assign.Clustering`."""
        return {"method": "file", "format": self.format, "digest": self.digest}

    def clusters(self, proteins: Proteins) -> tuple[Mapping[str, str], dict[str, int]]:
        """See :class:`~megafold.pipeline.clusters.assign.Clustering`.

        Chains of one sequence are in one cluster: the first that the file names decides. ``contradicted``
        counts the sequences of which it names chains in different clusters, ``by_identity`` the names of
        peptides and nucleic acids in it, whose clusters are those of their sequences.
        """
        found: dict[str, str] = {}
        if self.format == "pairs":
            known = ((digest, self.members.get(digest[:DIGEST_DIGITS])) for digest in proteins.digests)
            found = {digest: cluster for digest, cluster in known if cluster is not None}
        contradicted: set[str] = set()
        by_identity: set[str] = set()
        for name, chain in proteins.chain_names() if self.format == "pairs" else proteins.entity_names():
            cluster = self.members.get(member_name(name))
            if cluster is None:
                continue
            if not is_clustered(chain):
                by_identity.add(name)
            elif found.setdefault(chain["sequence_digest"], cluster) != cluster:
                contradicted.add(chain["sequence_digest"])
        return found, {"contradicted": len(contradicted), "by_identity": len(by_identity)}


def member_name(text: str) -> str:
    """A member's name in one form: 16 digits of a digest, or the entry in lower case.

    >>> member_name("4HHB_A")
    '4hhb_A'
    """
    if _DIGEST.fullmatch(text):
        return text[:DIGEST_DIGITS].lower()
    entry, underscore, rest = text.rpartition("_")
    return f"{entry.lower()}{underscore}{rest}"


def _pairs(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    heading = lines[0][1].split("\t")[0].strip().lower() in _HEADINGS
    for number, line in lines[heading:]:
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2 or not all(columns):
            raise InputError(
                f"{path}, line {number}: {len(columns)} columns with tabs between, where the first line says "
                "two: cluster and member; give the file that `mmseqs easy-cluster` calls *_cluster.tsv",
                reason="bad-clusters",
            )
        yield number, member_name(columns[0]), member_name(columns[1])


def _entities(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    for number, line in lines:
        names = line.split()
        for name in names:
            if not _ENTITY.fullmatch(name):
                raise InputError(
                    f"{path}, line {number}: {name!r} is no <entry>_<entity> such as 4HHB_1; clusters are a "
                    "line of these each, or two columns with a tab between, cluster and member",
                    reason="bad-clusters",
                )
            yield number, member_name(names[0]), member_name(name)
