"""From a cache to samples: read what a crop needs, nothing more.

A sample is a function of the manifest, the settings and ``(seed, epoch, index)``. It takes three reads: the
entry's tables; then the crop's atoms, MSA columns, the pairing and the lists of template hits; then the
templates that were chosen. Everything that is kept between samples (open objects, tables of entries) only
saves time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megafold.cache_store import Digest, ObjectReader, Store, open_store, read_many
from megafold.pipeline import schema
from megafold.pipeline.chemistry.library import ComponentLibrary
from megafold.pipeline.manifest import EntryRow
from megafold.pipeline.stream.bonds import token_bonds
from megafold.pipeline.stream.check import SampleError
from megafold.pipeline.stream.config import FailureConfig, StreamConfig
from megafold.pipeline.stream.crop import Crop, crop_entry
from megafold.pipeline.stream.crop_view import (
    CropView,
    ResidueGroup,
    crop_names,
    residue_groups,
    token_features,
)
from megafold.pipeline.stream.entry import ENTRY_ARRAYS, EntryTables, present
from megafold.pipeline.stream.labels import label_features, label_frame
from megafold.pipeline.stream.memory import MemoryStats, Recent
from megafold.pipeline.stream.msa import RESAMPLED, MsaBlock, msa_features, plan_rows
from megafold.pipeline.stream.random_streams import RandomStreams
from megafold.pipeline.stream.reference import reference_features
from megafold.pipeline.stream.sampling import Draw, Selection, TargetSampler
from megafold.pipeline.stream.symmetry import (
    KnownOrders,
    Symmetry,
    candidate_chains,
    chain_atoms,
    chain_bonds,
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
_OPEN_OBJECTS = 64
_KEPT_ENTRIES = 256
_KEPT_ORDERS = 4096
_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class Sample:
    """One crop: ``features`` are exactly those of ``schema.SAMPLE``, unpadded; ``meta`` says where from.

    ``recycles``: with ``msa.recycles`` above 1, the MSA features of the second and each later pass through
    the trunk, with rows of its own; those of the first are in ``features``. ``symmetry``: with the setting
    of this name, what :meth:`Stream.symmetry` gives.
    """

    features: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]
    recycles: tuple[Mapping[str, NDArray[Any]], ...] = ()
    symmetry: Symmetry | None = None


class Stream:
    """Samples from a cache.

    Args:
        cache: the cache's folder or URL, or an open store.
        config: settings.
        manifest: which snapshot; None is what ``refs/main`` names now. A stream stays with its snapshot.
        memory_bytes: most that a process keeps of entries' tables between samples.

    Can be pickled and survives fork: what is open is opened again in each process. ``manifest`` is the
    digest to record with a training run.
    """

    def __init__(
        self,
        cache: Path | str | Store,
        config: StreamConfig | None = None,
        manifest: Digest | None = None,
        *,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        self.config = config or StreamConfig()
        self._cache = cache
        self._memory_bytes = memory_bytes
        self._state: _State | None = None
        self._selection: Selection | None = None
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

    def identity(self) -> dict[str, Any]:
        """What decides the samples, as plain values: for checkpoints."""
        settings = asdict(self.config)
        del settings["failures"], settings["symmetry"]
        return {"manifest": str(self.manifest), "stream": settings}

    def entry_name(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> str:
        """The entry that a sample is of; arguments as for :meth:`sample`."""
        seed = self.config.seed if seed is None else seed
        return self.entry(self.sampler.draw(epoch, index, seed, attempt).row).entry

    @property
    def configs(self) -> tuple[StreamConfig, ...]:
        """The settings, as a mixture has several."""
        return (self.config,)

    @property
    def failures(self) -> FailureConfig:
        """What becomes of samples that fail."""
        return self.config.failures

    @property
    def memory(self) -> dict[str, MemoryStats]:
        """What this process keeps between samples: ``objects`` open, ``entries``' tables."""
        state = self._opened()
        return {"objects": state.readers.stats, "entries": state.entries.stats}

    def prepare(self) -> None:
        """Read what all samples need: the manifest, its filters, the component library.

        Raises:
            InputError: the settings do not fit the manifest.
            megafold.cache_store.CacheError: these are missing or damaged.
        """
        self._opened()

    def forget(self) -> None:
        """Drop all open objects and tables of entries; the manifest and the component library stay."""
        if self._state is not None:
            self._state.readers.clear()
            self._state.entries.clear()

    def sample(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> Sample:
        """Sample ``index`` of ``epoch``; ``seed`` overrides the settings'.

        ``attempt`` above 0 is the sample that takes the place of one that failed (``failures.py``).

        Raises:
            SampleError: objects of the cache do not fit each other.
            megafold.cache_store.CacheError: an object is missing or damaged.
        """
        seed = self.config.seed if seed is None else seed
        draw = self.sampler.draw(epoch, index, seed, attempt)
        streams = RandomStreams(seed, epoch, index, attempt)
        row = self.entry(draw.row)
        tables = self.read_entry(row)
        crop = crop_entry(tables, self.config.crop, streams, draw.interest)
        view = CropView.of(tables, crop.tokens)
        features, recycles, details = self.read_crop(row, view, streams)
        meta = self._meta(row, draw, crop, streams) | crop_names(view, row) | details
        symmetry = self._symmetry(row, view, streams) if self.config.symmetry else None
        return Sample({name: features[name] for name in schema.FEATURES}, meta, recycles, symmetry)

    def symmetry(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> Symmetry:
        """The exchanges of atoms and chains that leave sample ``index`` as it is.

        Part of a sample if so set only, as it reads whole chains; same arguments, errors and frame as
        :meth:`sample`.
        """
        seed = self.config.seed if seed is None else seed
        streams = RandomStreams(seed, epoch, index, attempt)
        draw = self.sampler.draw(epoch, index, seed, attempt)
        row = self.entry(draw.row)
        tables = self.read_entry(row)
        crop = crop_entry(tables, self.config.crop, streams, draw.interest)
        return self._symmetry(row, CropView.of(tables, crop.tokens), streams)

    def _symmetry(self, row: EntryRow, view: CropView, streams: RandomStreams) -> Symmetry:
        state = self._opened()
        groups = candidate_chains(view)
        copies = np.unique(np.concatenate([np.empty(0, np.int64), *groups.values()]))
        alone = view.atoms[~np.isin(view.chain, copies)[view.atom_to_token]]
        # Stable: two ascending runs are merged, which a million atoms of a capsid need not be sorted for.
        atoms = np.sort(np.concatenate([alone, chain_atoms(view.entry, copies)]), kind="stable")
        read = self.open(row.structure).read({"atoms": (slice(0, 1), atoms), "atom_coords": (atoms,)})
        component_atom, coords = read["atoms"][0], read["atom_coords"]
        own = np.searchsorted(atoms, view.atoms)
        frame = label_frame(
            coords[own], present(coords[own]), streams("label") if self.config.augment else None
        )
        return Symmetry(
            automorphisms=residue_automorphisms(view, state.library, component_atom[own], state.orders),
            chains=chain_candidates(view, groups, atoms, component_atom, coords, frame),
            bonds=chain_bonds(view.entry),
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
    ) -> tuple[Arrays, tuple[Arrays, ...], dict[str, Any]]:
        """All features of a crop, the MSA features of later recycles, and details for its ``meta``."""
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
        depths = [block.msa.shape[1] for block in blocks]
        plans = [
            plan_rows(
                depths,
                pairing,
                self.config.msa.rows,
                streams(f"msa {recycle}" if recycle else "msa"),
                random_size=self.config.msa.random_size,
            )
            for recycle in range(self.config.msa.recycles)
        ]
        first, *later = (msa_features(features["restype"], blocks, plan) for plan in plans)
        features |= first
        chosen, rejected = self._read_templates(row, templates, hits, streams)
        features |= template_features(len(view.tokens), chosen)
        features |= label_features(
            coords,
            atoms["atom_occupancy_b"][:, 1],
            coords_mask,
            streams("label") if self.config.augment else None,
        )
        recycles = tuple({name: msa[name] for name in RESAMPLED} for msa in later)
        return features, recycles, {"paired_rows": len(plans[0].paired), "templates_rejected": rejected}

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
            "resolution": row.resolution,
            "manifest": str(self.manifest),
            "chains_of_interest": draw.interest,
            "crop_method": crop.method,
            "crop_center": None if crop.center is None else crop.center + 1,
            "n_token_uncropped": row.n_token,
            "seed": streams.seed,
            "epoch": streams.epoch,
            "index": streams.index,
            "attempt": streams.attempt,
        }

    def _open_store(self) -> Store:
        return open_store(self._cache)

    def _opened(self) -> "_State":
        if self._state is None:
            self._state = _State(
                self._open_store(), self.manifest, self.config, self._selection, self._memory_bytes
            )
            self._selection = self._state.selection
        return self._state


class _State:
    """What one process has open."""

    def __init__(
        self,
        store: Store,
        manifest: Digest,
        config: StreamConfig,
        selection: Selection | None,
        memory_bytes: int,
    ) -> None:
        self.store = store
        snapshot = store.manifest(manifest)
        self.table = snapshot.table
        # Found once and handed to workers, which need not evaluate filters again.
        self.selection = selection or Selection.of(self.table, config.sampling)
        self.sampler = TargetSampler(snapshot, config.sampling, self.selection)
        with store.open(Digest.parse(str(snapshot.attributes["components"]))) as reader:
            self.library = ComponentLibrary.from_content(reader.read_all())
        # What reading the manifest and weighing its chains took, every worker would keep for nothing.
        pa.default_memory_pool().release_unused()
        self.readers: Recent[ObjectReader] = Recent(_OPEN_OBJECTS, discard=lambda reader: reader.close())
        self.orders: KnownOrders = Recent(_KEPT_ORDERS)
        self.entries: Recent[EntryTables] = Recent(
            _KEPT_ENTRIES, limit_bytes=memory_bytes, size=lambda entry: entry.nbytes
        )


def current_manifest(store: Store) -> Digest:
    """The snapshot that ``refs/main`` names.

    Raises:
        SampleError: the cache has none.
    """
    digest = store.ref("main")
    if digest is None:
        raise SampleError(f"{store} has no data set yet: run `megafold cache build` first")
    return digest
