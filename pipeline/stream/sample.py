"""From a cache to samples: read what a crop needs, nothing more.

A sample is a function of the manifest, the settings and ``(seed, epoch, index)``. It takes three reads: the
entry's tables; then the crop's atoms, MSA columns, the pairing and the lists of template hits; then the
templates that were chosen. Everything that is kept between samples (open objects, tables of entries) only
saves time.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megafold.cache_store import Digest, LocalStore, ObjectReader, Store, read_many
from megafold.pipeline import schema
from megafold.pipeline.chemistry.library import ComponentLibrary
from megafold.pipeline.manifest import EntryRow
from megafold.pipeline.stream.bonds import token_bonds
from megafold.pipeline.stream.check import SampleError
from megafold.pipeline.stream.config import StreamConfig
from megafold.pipeline.stream.crop import Crop, crop_entry
from megafold.pipeline.stream.crop_view import CropView, crop_names, token_features
from megafold.pipeline.stream.entry import ENTRY_ARRAYS, EntryTables, present
from megafold.pipeline.stream.labels import label_features, label_frame
from megafold.pipeline.stream.msa import MsaBlock, msa_features, plan_rows
from megafold.pipeline.stream.random_streams import RandomStreams
from megafold.pipeline.stream.reference import reference_features
from megafold.pipeline.stream.sampling import Draw, TargetSampler
from megafold.pipeline.stream.symmetry import (
    Symmetry,
    candidate_chains,
    chain_atoms,
    chain_candidates,
    residue_automorphisms,
)
from megafold.pipeline.stream.template import (
    TemplateBlock,
    allowed_hits,
    choose_hits,
    template_features,
)

Arrays = dict[str, NDArray[Any]]
T = TypeVar("T")

_OPEN_OBJECTS = 64
_KEPT_ENTRIES = 32


@dataclass(frozen=True)
class Sample:
    """One crop: ``features`` are exactly those of ``schema.SAMPLE``, unpadded; ``meta`` says where from."""

    features: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class ResidueGroup:
    """Tokens of a crop whose chains share an object, and the residues of it that they need.

    ``residues`` is ascending without repeats; ``columns`` [n] gives each token's place in it.
    """

    digest: str
    tokens: NDArray[np.int64]
    residues: NDArray[np.int64]
    columns: NDArray[np.int64]


class Stream:
    """Samples from a cache.

    Args:
        cache: the cache's folder, or an open store.
        config: settings.
        manifest: which snapshot; None is what ``refs/main`` names now. A stream stays with its snapshot.

    Can be pickled and survives fork: what is open is opened again in each process. ``manifest`` is the
    digest to record with a training run.
    """

    def __init__(
        self,
        cache: Path | str | Store,
        config: StreamConfig | None = None,
        manifest: Digest | None = None,
    ) -> None:
        self.config = config or StreamConfig()
        self._cache = cache if isinstance(cache, Store) else Path(cache)
        self._state: _State | None = None
        self.manifest = manifest or current_manifest(self._open_store())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": None}

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._opened().sampler.epoch_size

    @property
    def sampler(self) -> TargetSampler:
        """What the samples are drawn from."""
        return self._opened().sampler

    def entry(self, row: int) -> EntryRow:
        """A row of the manifest."""
        return EntryRow.from_mapping(self._opened().table.slice(row, 1).to_pylist()[0])

    def forget(self) -> None:
        """Drop all open objects and tables of entries; the manifest and the component library stay."""
        if self._state is not None:
            self._state.readers.clear()
            self._state.entries.clear()

    def sample(self, index: int, *, epoch: int = 0, seed: int | None = None) -> Sample:
        """Sample ``index`` of ``epoch``; ``seed`` overrides the settings'.

        Raises:
            SampleError: objects of the cache do not fit each other.
            megafold.cache_store.CacheError: an object is missing or damaged.
        """
        seed = self.config.seed if seed is None else seed
        draw = self.sampler.draw(epoch, index, seed)
        streams = RandomStreams(seed, epoch, index)
        row = self.entry(draw.row)
        tables = self.read_entry(row)
        crop = crop_entry(tables, self.config.crop, streams, draw.interest)
        view = CropView.of(tables, crop.tokens)
        features, details = self.read_crop(row, view, streams)
        meta = self._meta(row, draw, crop, streams) | crop_names(view, row) | details
        return Sample({name: features[name] for name in schema.FEATURES}, meta)

    def symmetry(self, index: int, *, epoch: int = 0, seed: int | None = None) -> Symmetry:
        """The exchanges of atoms and chains that leave sample ``index`` as it is.

        Not part of a sample, as it reads whole chains; same arguments, errors and frame as :meth:`sample`.
        """
        seed = self.config.seed if seed is None else seed
        streams = RandomStreams(seed, epoch, index)
        draw = self.sampler.draw(epoch, index, seed)
        tables = self.read_entry(self.entry(draw.row))
        view = CropView.of(tables, crop_entry(tables, self.config.crop, streams, draw.interest).tokens)
        groups = candidate_chains(view)
        copies = np.unique(np.concatenate([np.empty(0, np.int64), *groups.values()]))
        atoms = np.union1d(view.atoms, chain_atoms(tables, copies))
        read = self.open(self.entry(draw.row).structure).read(
            {"atoms": (slice(0, 1), atoms), "atom_coords": (atoms,)}
        )
        component_atom, coords = read["atoms"][0], read["atom_coords"]
        own = np.searchsorted(atoms, view.atoms)
        frame = label_frame(
            coords[own], present(coords[own]), streams("label") if self.config.augment else None
        )
        return Symmetry(
            automorphisms=residue_automorphisms(view, self._opened().library, component_atom[own]),
            chains=chain_candidates(
                view, groups, atoms, component_atom, frame.apply(coords).astype(np.float32)
            ),
        )

    def read_entry(self, row: EntryRow) -> EntryTables:
        """An entry's tables."""

        def read() -> EntryTables:
            reader = self.open(row.structure)
            return EntryTables.from_arrays(reader.read(dict.fromkeys(ENTRY_ARRAYS)), reader.attributes)

        return self._opened().entries.get(row.structure, read)

    def open(self, digest: str) -> ObjectReader:
        """An object of the cache, opened once."""
        state = self._opened()
        return state.readers.get(digest, lambda: state.store.open(Digest.parse(digest)))

    def read_crop(
        self, row: EntryRow, view: CropView, streams: RandomStreams
    ) -> tuple[Arrays, dict[str, Any]]:
        """All features of a crop, and details for its ``meta``."""
        msas = residue_groups(view, [chain.msa for chain in row.chains])
        templates = (
            residue_groups(view, [chain.template for chain in row.chains], standard_only=True)
            if self.config.template.count
            else []
        )
        self._check_lengths(row, msas, "msa", axis=0)
        self._check_lengths(row, templates, "template_restype", axis=1)
        atoms, pairing, msa_arrays, hits = self._read(row, view, msas, templates)

        coords = atoms["atom_coords"]
        coords_mask = present(coords)
        library = self._opened().library
        library_atom = self._library_atoms(row, view, library, atoms["atoms"][0])
        features: Arrays = token_features(view, coords_mask)
        features["token_bonds"] = token_bonds(view, library, library_atom, coords)
        space = np.cumsum(np.diff(view.residue, prepend=view.residue[:1]) != 0)
        features |= reference_features(
            library,
            library_atom,
            space[view.atom_to_token].astype(np.int32),
            streams("reference") if self.config.augment else None,
        )
        blocks = [
            MsaBlock(tokens=group.tokens, columns=group.columns, **arrays)
            for group, arrays in zip(msas, msa_arrays, strict=True)
        ]
        plan = plan_rows(
            [block.msa.shape[1] for block in blocks], pairing, self.config.msa.rows, streams("msa")
        )
        features |= msa_features(features["restype"], blocks, plan)
        chosen, rejected = self._read_templates(row, templates, hits, streams)
        features |= template_features(len(view.tokens), chosen)
        features |= label_features(
            coords,
            atoms["atom_occupancy_b"][:, 1],
            coords_mask,
            streams("label") if self.config.augment else None,
        )
        return features, {"paired_rows": len(plan.paired), "templates_rejected": rejected}

    def _read(
        self, row: EntryRow, view: CropView, msas: list[ResidueGroup], templates: list[ResidueGroup]
    ) -> tuple[Arrays, NDArray[np.int32] | None, list[Arrays], list[Arrays]]:
        """The crop's atoms, its pairing (columns in the order of ``msas``), MSA columns and hit tables."""
        requests: list[tuple[ObjectReader, dict[str, Any]]] = [
            (
                self.open(row.structure),
                {
                    "atoms": (slice(0, 1), view.atoms),
                    "atom_coords": (view.atoms,),
                    "atom_occupancy_b": (view.atoms,),
                },
            )
        ]
        for group in msas:
            names = ("msa", "deletion", "profile", "deletion_mean")
            requests.append((self.open(group.digest), dict.fromkeys(names, (group.residues,))))
        requests += [(self.open(group.digest), {"hits": None}) for group in templates]
        is_paired = bool(row.pairing) and len(msas) > 1  # rows of one sequence alone pair with nothing
        if is_paired:
            requests.append((self.open(row.pairing), {"pairing": None}))
        results = read_many(requests)
        pairing = None
        if is_paired:
            stored = results.pop()["pairing"]
            digests: Any = self.open(row.pairing).attributes["msas"]
            known = {digest: place for place, digest in enumerate(digests)}
            pairing = np.full((len(stored), len(msas)), -1, np.int32)
            for block, group in enumerate(msas):
                if group.digest in known:
                    pairing[:, block] = stored[:, known[group.digest]]
        return results[0], pairing, results[1 : 1 + len(msas)], results[1 + len(msas) :]

    def _read_templates(
        self,
        row: EntryRow,
        groups: list[ResidueGroup],
        hit_tables: list[Arrays],
        streams: RandomStreams,
    ) -> tuple[list[TemplateBlock], dict[str, int]]:
        rejected: dict[str, int] = {}
        requests = []
        config = self.config.template
        for group, table in zip(groups, hit_tables, strict=True):
            reader = self.open(group.digest)
            names: Any = reader.attributes["hits"]
            hits = schema.TEMPLATE.table("hits").unpack(table["hits"])
            allowed, reasons = allowed_hits(hits, names, config, row.entry, row.release_date)
            for reason, count in reasons.items():
                rejected[reason] = rejected.get(reason, 0) + count
            chosen = choose_hits(allowed, config.count, streams(f"template {group.digest}"))
            if len(chosen):
                selection = {"template_restype": (chosen,), "template_atom_pos": (chosen,)}
                requests.append((group, (reader, selection)))
        results = read_many([request for _, request in requests])
        blocks = [
            TemplateBlock(
                tokens=group.tokens,
                columns=group.residues[group.columns],
                restype=arrays["template_restype"],
                atom_pos=arrays["template_atom_pos"],
            )
            for (group, _), arrays in zip(requests, results, strict=True)
        ]
        return blocks, rejected

    def _library_atoms(
        self,
        row: EntryRow,
        view: CropView,
        library: ComponentLibrary,
        component_atom: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """[N_atom] index of each atom in the component library's atoms."""
        component = view.entry.residues["component"][view.residue]
        used = np.unique(component)
        first = np.zeros(len(view.entry.components), np.int64)
        for place in used:
            key = view.entry.components[place]
            if key not in library.index:
                raise SampleError(
                    f"{row.entry}: component {key} is not in the library; build the cache again"
                )
            first[place] = library.first_atom[library.index[key]]
        found: NDArray[np.int64] = first[component][view.atom_to_token] + component_atom
        return found

    def _check_lengths(self, row: EntryRow, groups: list[ResidueGroup], array: str, axis: int) -> None:
        for group in groups:
            length = self.open(group.digest).shapes[array][axis]
            if group.residues[-1] >= length or group.residues[0] < 0:
                raise SampleError(
                    f"{row.entry}: {array} object {group.digest} has {length} residues, residue "
                    f"{int(group.residues[-1]) + 1} was needed; build the cache again"
                )

    def _meta(self, row: EntryRow, draw: Draw, crop: Crop, streams: RandomStreams) -> dict[str, Any]:
        return {
            "entry": row.entry,
            "assembly": row.assembly,
            "manifest": str(self.manifest),
            "chains_of_interest": draw.interest,
            "crop_method": crop.method,
            "crop_center": None if crop.center is None else crop.center + 1,
            "n_token_uncropped": row.n_token,
            "seed": streams.seed,
            "epoch": streams.epoch,
            "index": streams.index,
        }

    def _open_store(self) -> Store:
        return self._cache if isinstance(self._cache, Store) else LocalStore.at(self._cache)

    def _opened(self) -> "_State":
        if self._state is None:
            self._state = _State(self._open_store(), self.manifest, self.config)
        return self._state


class _State:
    """What one process has open."""

    def __init__(self, store: Store, manifest: Digest, config: StreamConfig) -> None:
        self.store = store
        snapshot = store.manifest(manifest)
        self.table = snapshot.table
        self.sampler = TargetSampler(snapshot, config.sampling)
        with store.open(Digest.parse(str(snapshot.attributes["components"]))) as reader:
            self.library = ComponentLibrary.from_content(reader.read_all())
        self.readers: Recent[ObjectReader] = Recent(_OPEN_OBJECTS, lambda reader: reader.close())
        self.entries: Recent[EntryTables] = Recent(_KEPT_ENTRIES, lambda _: None)


class Recent(Generic[T]):
    """The ``limit`` things used last; ``discard`` is told of those that have to go."""

    def __init__(self, limit: int, discard: Callable[[T], None]) -> None:
        self._limit = limit
        self._discard = discard
        self._items: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: str, make: Callable[[], T]) -> T:
        """What is known as ``key``, made if it has to be."""
        if key in self._items:
            self._items.move_to_end(key)
            return self._items[key]
        item = self._items[key] = make()
        if len(self._items) > self._limit:
            self._discard(self._items.popitem(last=False)[1])
        return item

    def clear(self) -> None:
        """Discard everything."""
        while self._items:
            self._discard(self._items.popitem()[1])


def current_manifest(store: Store) -> Digest:
    """The snapshot that ``refs/main`` names.

    Raises:
        SampleError: the cache has none.
    """
    digest = store.ref("main")
    if digest is None:
        raise SampleError(f"{store} has no data set yet: run `megafold cache build` first")
    return digest


def residue_groups(view: CropView, digests: list[str], *, standard_only: bool = False) -> list[ResidueGroup]:
    """Group a crop's polymer tokens by the object of their chain, in order of first use.

    Args:
        view: the crop.
        digests: the object of each chain of the entry, ``""`` for none.
        standard_only: leave out atomised residues.
    """
    wanted = view.mol_type != schema.MolType.LIGAND
    if standard_only:
        wanted &= ~view.atomised
    tokens: dict[str, list[NDArray[np.int64]]] = {}
    for chain in np.unique(view.chain[wanted]):
        if digests[chain]:
            own = np.flatnonzero(wanted & (view.chain == chain))
            tokens.setdefault(digests[chain], []).append(own)
    groups = []
    for digest, parts in tokens.items():
        members = np.concatenate(parts)
        position = view.entry.residues["label_seq_id"][view.residue[members]].astype(np.int64) - 1
        residues, columns = np.unique(position, return_inverse=True)
        groups.append(ResidueGroup(digest, members, residues, columns))
    return groups
