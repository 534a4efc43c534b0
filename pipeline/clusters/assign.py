"""Cluster ids of the manifest's chains, whatever says which proteins are alike. AF3 SI 2.5.3.

========================  =======================================================  ====================
chain                     cluster                                                  id
========================  =======================================================  ====================
protein                   what the clustering says: 40 % identity                  ``protein:<name>``
protein it cannot place   chains of the same sequence                              ``protein:<digest>``
protein of < 10 residues  chains of the same sequence                              ``peptide:<digest>``
RNA, DNA                  chains of the same sequence and kind                     ``rna:<digest>``
ligand, ion, glycan       the same components in the same order (the structure's)  ``ligand:HEM``
========================  =======================================================  ====================

``digest`` are the first 16 hex digits of the SHA-256 of the canonical sequence. An interface's cluster is
the pair of its chains' clusters; the stream makes it, the manifest need not hold it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Protocol

import pyarrow as pa

from megafold.cache_store import Digest, LocalStore, Manifest
from megafold.pipeline.manifest import chain_column

#: A protein of fewer residues is a peptide, and clustered by identity. AF3 SI 2.5.3.
PROTEIN_RESIDUES: Final = 10
DIGEST_DIGITS: Final = 16
_PROTEIN: Final = "protein:"


@dataclass(frozen=True, eq=False)
class Proteins:
    """The proteins of a data set that are to be clustered, and how others may call them.

    ``rows``: manifest rows, in a fixed order; ``store``: where their structure objects are.
    """

    rows: Sequence[Mapping[str, Any]]
    store: LocalStore

    @cached_property
    def digests(self) -> list[str]:
        """SHA-256 of each distinct sequence, sorted."""
        return sorted({chain["sequence_digest"] for _, chain in self._chains()})

    def sequences(self) -> dict[str, str]:
        """Sequence by digest, in the order of :attr:`digests`: read from the structure objects."""
        places: dict[str, tuple[str, int]] = {}
        for row, chain in self._chains():
            places.setdefault(chain["sequence_digest"], (row["structure"], chain["entity_id"]))
        wanted: dict[str, list[tuple[int, str]]] = {}
        for digest, (structure, entity) in places.items():
            wanted.setdefault(structure, []).append((entity, digest))
        found = {
            digest: str(entities[entity - 1]["sequence"])
            for structure, pairs in wanted.items()
            for entities in [self._entities(structure)]
            for entity, digest in pairs
        }
        return {digest: found[digest] for digest in self.digests}

    def chain_names(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(``entry_chain``, polymer chain): by the author's chain ids, as the PDB's FASTA files have them.

        By the file's own too, where no chain of the entry has such an author id.
        """
        for row in self.rows:
            authors = {chain["auth_asym_id"] for chain in row["chains"]}
            for chain in _polymers(row):
                yield f"{row['entry']}_{chain['auth_asym_id']}", chain
                if chain["label_asym_id"] not in authors:
                    yield f"{row['entry']}_{chain['label_asym_id']}", chain

    def entity_names(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(``entry_entity``, polymer chain), by the file's entity ids: read from the structure objects."""
        for row in self.rows:
            chains = {chain["entity_id"]: chain for chain in _polymers(row)}
            records = self._entities(row["structure"]) if chains else []
            for entity, chain in chains.items():
                for label in records[entity - 1]["label_entity_ids"]:
                    yield f"{row['entry']}_{label}", chain

    def _chains(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        for row in self.rows:
            for chain in filter(is_clustered, row["chains"]):
                yield row, chain

    def _entities(self, structure: str) -> list[Any]:
        with self.store.open(Digest.parse(structure)) as reader:
            entities: Any = reader.attributes["entities"]
            return list(entities)


class Clustering(Protocol):
    """A way to tell which proteins are alike.

    ``by_sequence_alone``: the clusters depend on its identity and the set of sequences, on no names.
    """

    by_sequence_alone: ClassVar[bool]

    @property
    def identity(self) -> dict[str, Any]:
        """What the clusters depend on beside the proteins: the manifest keeps it. No path is in it."""
        ...

    def clusters(self, proteins: Proteins) -> tuple[Mapping[str, str], dict[str, int]]:
        """Cluster name by sequence digest, for those it can place; and numbers that are worth telling.

        Raises:
            InputError: the clusters cannot be made.
        """
        ...


class IdenticalSequences:
    """No clustering: proteins are alike if their sequences are equal."""

    by_sequence_alone: ClassVar[bool] = True

    @property
    def identity(self) -> dict[str, Any]:
        """See :class:`Clustering`."""
        return {"method": "identical-sequences"}

    def clusters(self, proteins: Proteins) -> tuple[Mapping[str, str], dict[str, int]]:
        """See :class:`Clustering`."""
        return {digest: digest[:DIGEST_DIGITS] for digest in proteins.digests}, {}


def assign_clusters(
    rows: Sequence[dict[str, Any]],
    clustering: Clustering,
    store: LocalStore,
    before: Manifest | None = None,
) -> dict[str, Any]:
    """Fill in ``cluster`` of the polymer chains of manifest rows; the manifest's attribute ``clusters``.

    The attribute is the clustering's identity with the number of distinct proteins (``proteins``), of their
    clusters (``clusters``), of those the clustering could not place (``unplaced``), and its own numbers.
    Where the snapshot ``before`` has the same proteins (for a clustering that asks for names, the same
    entries and structures), clustered in the same way, its clusters are taken.

    Raises:
        InputError: the clusters cannot be made.
    """
    proteins = Proteins(rows, store)
    found = _remembered(before, clustering, proteins) if before is not None else None
    placed, attribute = found or _made(clustering, proteins)
    for row in rows:
        for chain in _polymers(row):
            chain["cluster"] = _cluster(chain, placed)
    return attribute


def _made(clustering: Clustering, proteins: Proteins) -> tuple[dict[str, str], dict[str, Any]]:
    names, numbers = clustering.clusters(proteins)
    placed = {digest: names.get(digest, digest[:DIGEST_DIGITS]) for digest in proteins.digests}
    return placed, {
        **clustering.identity,
        "proteins": len(placed),
        "clusters": len(set(placed.values())),
        "unplaced": len(placed.keys() - names.keys()),
        **numbers,
    }


def _remembered(
    before: Manifest, clustering: Clustering, proteins: Proteins
) -> tuple[dict[str, str], dict[str, Any]] | None:
    attribute: Any = before.attributes.get("clusters", {})
    if any(attribute.get(name) != value for name, value in clustering.identity.items()):
        return None
    if not clustering.by_sequence_alone and not _same_structures(before, proteins.rows):
        return None
    names = ("mol_type", "n_residue", "sequence_digest", "cluster")
    chains = pa.table({name: chain_column(before.table, name) for name in names})
    distinct = chains.group_by([*names], use_threads=False).aggregate([])
    placed = {
        chain["sequence_digest"]: chain["cluster"].removeprefix(_PROTEIN)
        for chain in filter(is_clustered, distinct.to_pylist())
    }
    return (placed, dict(attribute)) if sorted(placed) == proteins.digests else None


def _same_structures(before: Manifest, rows: Iterable[Mapping[str, Any]]) -> bool:
    columns = (before.table[name].to_pylist() for name in ("entry", "structure"))
    return sorted(zip(*columns, strict=True)) == sorted((row["entry"], row["structure"]) for row in rows)


def _cluster(chain: Mapping[str, Any], placed: Mapping[str, str]) -> str:
    if is_clustered(chain):
        return f"{_PROTEIN}{placed[chain['sequence_digest']]}"
    kind = "peptide" if chain["mol_type"] == "protein" else chain["mol_type"]
    return f"{kind}:{chain['sequence_digest'][:DIGEST_DIGITS]}"


def is_clustered(chain: Mapping[str, Any]) -> bool:
    """Whether a chain is a protein that is clustered by similarity and not by identity."""
    return bool(chain["mol_type"] == "protein" and chain["n_residue"] >= PROTEIN_RESIDUES)


def _polymers(row: Mapping[str, Any]) -> Iterable[Any]:
    return (chain for chain in row["chains"] if chain["mol_type"] != "ligand")
