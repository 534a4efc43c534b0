"""The schema: name, dtype, axes, unit, padding and source of everything MegaFold stores or hands over.

This module is the one place that lists them. Objects are checked against it before they are stored,
the stream and the adapters read names from it, and ``docs/features.md`` is generated from it.

Two kinds of things are described:

- *objects* (left of the cache, deterministic): ``structure``, ``component``, ``msa``, ``pairing`` and
  ``template``. An object is a few arrays and a JSON mapping of attributes. Integer columns of one table
  share one array ``[column, row]``, so that an object holds few arrays (each costs a read its own
  overhead, whatever its size) and every Zarr reader can open it. :class:`Table` names the columns.
- *samples* (right of the cache): the features of one crop, as plain arrays.

Missing coordinates are NaN with a mask, never zeros. Masks are boolean, True means present.
Sources "AF3 SI" are sections of the supplement of Abramson et al. 2024 (AlphaFold 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import InputError

# --------------------------------------------------------------------------------------------------
# Vocabularies


class MolType(IntEnum):
    """Type of a chain. Modified residues count with their polymer."""

    PROTEIN = 0
    RNA = 1
    DNA = 2
    LIGAND = 3


AMINO_ACIDS: Final = tuple(
    "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL".split()
)
AMINO_ACID_LETTERS: Final = "ARNDCQEGHILKMFPSTWYV"
RNA_BASES: Final = tuple("AGCU")
DNA_BASES: Final = ("DA", "DG", "DC", "DT")

#: The 32 classes of ``restype`` (AF3 SI table 5): component codes, in class order. ``N`` and ``DN`` stand
#: for unknown nucleotides, ``-`` for the gap. Ligand atoms count as ``UNK``.
RESTYPES: Final = (*AMINO_ACIDS, "UNK", *RNA_BASES, "N", *DNA_BASES, "DN", "-")
RESTYPE_INDEX: Final = {code: index for index, code in enumerate(RESTYPES)}
UNKNOWN_RESTYPE: Final = {
    MolType.PROTEIN: RESTYPE_INDEX["UNK"],
    MolType.RNA: RESTYPE_INDEX["N"],
    MolType.DNA: RESTYPE_INDEX["DN"],
    MolType.LIGAND: RESTYPE_INDEX["UNK"],
}
GAP: Final = RESTYPE_INDEX["-"]
N_RESTYPE: Final = len(RESTYPES)


class BondKind(IntEnum):
    """What a bond of the ``bonds`` table is: bonds that no single component's definition holds."""

    COVALENT = 0
    DISULFIDE = 1
    METAL = 2
    GLYCOSIDIC = 3
    CYCLISATION = 4


class RefOrigin(IntEnum):
    """Where a component's reference coordinates come from, in the order they are tried."""

    RDKIT = 0
    IDEAL = 1
    MODEL = 2
    NONE = 3


# --------------------------------------------------------------------------------------------------
# Specifications


@dataclass(frozen=True, kw_only=True)
class Column:
    """One integer column of a :class:`Table`."""

    name: str
    doc: str


@dataclass(frozen=True, kw_only=True)
class Array:
    """One stored array: its dtype, axes and what it means.

    ``axes`` are names of lengths; a literal number is a fixed length. Arrays of one object that name the
    same axis have the same length there. ``chunk`` gives the chunk length by axis; axes that it does not
    name are not split.
    """

    name: str
    dtype: str
    axes: tuple[str, ...]
    doc: str
    unit: str = ""
    source: str = ""
    chunk: Mapping[str, int] = field(default_factory=dict)

    def chunks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Chunk shape for an array of ``shape``; every length is at least 1."""
        return tuple(
            max(1, min(length, self.chunk.get(axis, length)))
            for axis, length in zip(self.axes, shape, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Table(Array):
    """An array ``[column, row]`` whose rows are records and whose first axis has names."""

    columns: tuple[Column, ...]

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns, in stored order."""
        return tuple(column.name for column in self.columns)

    def pack(self, values: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Stack named columns into the stored array.

        Raises:
            SchemaError: a column is missing, unknown, of another length, or does not fit the dtype.
        """
        if set(values) != set(self.column_names):
            missing, extra = set(self.column_names) - set(values), set(values) - set(self.column_names)
            raise SchemaError(
                f"table {self.name}: missing columns {sorted(missing)}, unknown {sorted(extra)}"
            )
        columns = [np.asarray(values[name]) for name in self.column_names]
        if len({len(column) for column in columns}) > 1:
            lengths = {name: len(values[name]) for name in self.column_names}
            raise SchemaError(f"table {self.name}: columns of different lengths {lengths}")
        packed = np.stack([column.astype(np.int64) for column in columns]) if len(columns[0]) else None
        if packed is None:
            return np.empty((len(columns), 0), self.dtype)
        limits = np.iinfo(self.dtype)
        if packed.min() < limits.min or packed.max() > limits.max:
            raise SchemaError(f"table {self.name}: a value does not fit {self.dtype}")
        return packed.astype(self.dtype)

    def unpack(self, array: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Name the rows of the stored array: views, no copies.

        Raises:
            InputError: another version stored it, with other columns (``other-version``).
        """
        if len(array) != len(self.columns):
            raise InputError(
                f"table {self.name} was stored with {len(array)} columns and has {len(self.columns)} in this "
                "version of megafold: build the cache again with it, or read it with the version that wrote it",
                reason="other-version",
            )
        return dict(zip(self.column_names, array, strict=True))


def table(name: str, row_axis: str, doc: str, columns: Mapping[str, str], chunk: int | None = None) -> Table:
    """A table of int32 columns; ``columns`` maps names to what they mean."""
    return Table(
        name=name,
        dtype="int32",
        axes=(f"{len(columns)}", row_axis),
        doc=doc,
        columns=tuple(Column(name=key, doc=text) for key, text in columns.items()),
        chunk={row_axis: chunk} if chunk else {},
    )


@dataclass(frozen=True, kw_only=True)
class ObjectSpec:
    """One kind of stored object: its arrays, and its attributes with what they mean."""

    kind: str
    doc: str
    arrays: tuple[Array, ...]
    attributes: Mapping[str, str]

    def __getitem__(self, name: str) -> Array:
        for array in self.arrays:
            if array.name == name:
                return array
        raise KeyError(name)

    def table(self, name: str) -> Table:
        """The table called ``name``."""
        spec = self[name]
        if not isinstance(spec, Table):
            raise KeyError(f"{self.kind}.{name} is not a table")
        return spec


#: Dtype and shape of each array, by name.
Layout = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


class SchemaError(ValueError):
    """Arrays or attributes that do not fit the schema: a defect of the featurizer, never of the input."""


# --------------------------------------------------------------------------------------------------
# Objects

ATOM_CHUNK: Final = 8192
TOKEN_CHUNK: Final = 64

STRUCTURE: Final = ObjectSpec(
    kind="structure",
    doc="One entry and assembly: chains, residues, tokens, atoms, bonds beyond the components' own, interfaces.",
    attributes={
        "kind": "`structure`",
        "version": "version of the featurizer stage that wrote it",
        "entry": "entry id, lower case",
        "assembly": "assembly id, or `asym` where the deposited coordinates were taken as they are",
        "title": "title of the entry, or null",
        "method": "experimental method as in the file, or null",
        "resolution": "Å, or null",
        "release_date": "ISO date, or null",
        "deposition_date": "ISO date, or null",
        "components": "component keys, in the order the `component` columns index them",
        "component_digests": "digest of each component's definition, in the same order",
        "entities": "list, by entity_id - 1: {label_entity_ids, mol_type, sequence, components}: `sequence` "
        "canonical one-letter over the full SEQRES ('' for ligands), `components` its component indices",
        "chains": "columns of strings, one item a chain: {label_asym_id, auth_asym_id, operator}",
        "filtered": "what the filters removed: {reason: count}",
        "changed": "what was corrected or added: {reason: count}",
        "warnings": "list of strings",
    },
    arrays=(
        table(
            "chains",
            "N_chain",
            "Chains of the assembly in the order of the file's label scheme, copies after originals.",
            {
                "asym_id": "1-based, unique for each chain (AF3)",
                "entity_id": "1-based, unique for each distinct sequence (AF3)",
                "sym_id": "1-based, unique within the chains of one entity (AF3)",
                "mol_type": "MolType",
                "first_residue": "index into residues",
                "residue_count": "residues of the chain, unresolved ones included",
                "first_token": "index into tokens",
                "token_count": "tokens of the chain",
                "first_atom": "index into atoms",
                "atom_count": "atoms of the chain",
                "is_branched": "1: a branched entity (glycan)",
            },
        ),
        table(
            "residues",
            "N_residue",
            "Residues, unresolved ones of polymers included.",
            {
                "component": "index into attributes.components",
                "label_seq_id": "1-based position in the entity's sequence; for ligands the 1-based position in the chain",
                "auth_seq_id": "author's number",
                "ins_code": "insertion code as ord(), 0 for none",
                "chain": "index into chains",
                "resolved": "1: at least one heavy atom has coordinates",
                "is_standard": "1: tokenised whole: the 20 amino acids, 8 nucleotides, and UNK, N, DN of polymers",
            },
        ),
        table(
            "tokens",
            "N_token",
            "Tokens (AF3 SI 2.6): one per standard residue, one per heavy atom of everything else.",
            {
                "residue": "index into residues",
                "first_atom": "index into atoms",
                "atom_count": "atoms of the token",
                "restype": "class in RESTYPES",
                "center_atom": "atom index of CA, C1' or the atom itself",
                "rep_atom": "atom index of CB (CA for GLY), C4 (purine), C2 (pyrimidine) or the atom itself",
                "frame_atom_0": "atom index of the frame's first atom (N, C1'), -1 where there is no frame",
                "frame_atom_1": "the frame's origin (CA, C3')",
                "frame_atom_2": "the frame's third atom (C, C4')",
                "frame_mask": "1: the frame's atoms exist, are resolved and not collinear (AF3 SI 4.3.2)",
            },
        ),
        Array(
            name="token_center",
            dtype="float32",
            axes=("N_token", "3"),
            unit="Å",
            doc="Coordinates of the centre atom, NaN where unresolved: what crops are chosen by.",
        ),
        table(
            "atoms",
            "N_atom",
            "Heavy atoms by token; the component's order. Leaving atoms of bonded groups are gone.",
            {
                "component_atom": "index into the component's atoms (all atoms of its definition, hydrogens too)",
                "element": "atomic number",
                "resolved": "1: the atom has coordinates",
            },
            chunk=ATOM_CHUNK,
        ),
        Array(
            name="atom_coords",
            dtype="float32",
            axes=("N_atom", "3"),
            unit="Å",
            doc="Coordinates, rounded to 1e-3; NaN where unresolved.",
            chunk={"N_atom": ATOM_CHUNK},
        ),
        Array(
            name="atom_occupancy_b",
            dtype="float32",
            axes=("N_atom", "2"),
            unit="1, Å²",
            doc="Occupancy and isotropic B factor; NaN where unresolved.",
            chunk={"N_atom": ATOM_CHUNK},
        ),
        table(
            "bonds",
            "N_bond",
            "Bonds between residues that no component's definition holds (the polymer's backbone bonds are implied).",
            {
                "atom_i": "atom index, lower",
                "atom_j": "atom index, higher",
                "order": "1, 2, 3; 0 where unknown",
                "kind": "BondKind",
            },
        ),
        table(
            "interfaces",
            "N_interface",
            "Chain pairs with heavy atoms within 5 Å (AF3 SI 2.5.1).",
            {"chain_i": "chain index, lower", "chain_j": "chain index, higher"},
        ),
    ),
)

COMPONENT: Final = ObjectSpec(
    kind="component",
    doc="The component library: every chemical component that a snapshot's structures use.",
    attributes={
        "kind": "`component`",
        "version": "version of the chemistry stage that wrote it",
        "keys": "component keys in code-point order: the CCD code, or `~CODE:digest12` for an input's own definition",
        "digests": "digest of each component's definition (what the conformer was made from)",
        "automorphism_cap": "most automorphisms kept for a component",
        "capped": "keys whose automorphisms were cut at the cap",
        "failures": "why RDKit made no conformer: {key: class}",
    },
    arrays=(
        table(
            "components",
            "N_component",
            "Where each component's atoms, bonds and automorphisms lie.",
            {
                "first_atom": "index into atoms",
                "atom_count": "all atoms of the definition, hydrogens too",
                "first_bond": "index into bonds",
                "bond_count": "bonds",
                "first_automorphism": "index into automorphisms",
                "automorphism_count": "rows; each has `heavy_count` items",
                "heavy_count": "heavy atoms",
                "ref_origin": "RefOrigin",
            },
        ),
        table(
            "atoms",
            "N_component_atom",
            "Atoms in the definition's order.",
            {
                "name_0": "ord of the name's first character, 32 where there is none",
                "name_1": "second character",
                "name_2": "third character",
                "name_3": "fourth character",
                "element": "atomic number",
                "charge": "formal charge",
                "leaving": "1: leaves when the component is linked",
                "aromatic": "1: aromatic",
                "chirality": "0 none, 1 R, 2 S",
                "ref_mask": "1: ref_pos is real",
            },
        ),
        Array(
            name="ref_pos",
            dtype="float32",
            axes=("N_component_atom", "3"),
            unit="Å",
            doc="Reference conformer, centred on its heavy atoms, rounded to 1e-3; NaN where masked.",
            source="AF3 SI 2.8",
        ),
        table(
            "bonds",
            "N_component_bond",
            "Bonds of the definitions.",
            {
                "atom_i": "index within the component, lower",
                "atom_j": "index within the component, higher",
                "order": "1, 2, 3; 0 where unknown",
                "aromatic": "1: aromatic",
            },
        ),
        Array(
            name="automorphisms",
            dtype="int16",
            axes=("N_automorphism",),
            doc="Automorphisms of the heavy-atom graph, flattened: rows of indices within the component; identity first.",
            source="AF3 SI 4.2",
        ),
    ),
)

MSA: Final = ObjectSpec(
    kind="msa",
    doc="The alignments of one sequence: one object per distinct (sequence, set of alignment files).",
    attributes={
        "kind": "`msa`",
        "version": "version of the MSA stage that wrote it",
        "mol_type": "`protein`, `rna` or `dna`",
        "sequence": "the query",
        "sources": "list of {name, digest, rows, kept}: the files, in the order their rows are stored",
        "species": "species ids (mnemonics or taxonomy ids) in the order the `species` column indexes them",
        "warnings": "list of strings",
    },
    arrays=(
        Array(
            name="msa",
            dtype="int8",
            axes=("N_residue", "N_row"),
            doc="Class in RESTYPES; row 0 is the query. Residue-major: a crop decodes its residues alone.",
            source="AF3 SI 2.2",
            chunk={"N_residue": TOKEN_CHUNK},
        ),
        Array(
            name="deletion",
            dtype="uint8",
            axes=("N_residue", "N_row"),
            doc="Inserted residues to the left of this one, at most 255.",
            chunk={"N_residue": TOKEN_CHUNK},
        ),
        Array(
            name="profile",
            dtype="float16",
            axes=("N_residue", "32"),
            doc="Distribution of the classes over all rows.",
            source="AF3 SI table 5",
        ),
        Array(
            name="deletion_mean",
            dtype="float32",
            axes=("N_residue",),
            doc="Mean deletion count over all rows, as counted (not squashed).",
            source="AF3 SI table 5",
        ),
        table(
            "rows",
            "N_row",
            "One item a row.",
            {
                "source": "index into attributes.sources, -1 for the query",
                "species": "index into attributes.species, -1 for none",
                "identity": "sequence identity to the query over aligned columns, per mille",
                "coverage": "aligned columns over the query's length, per mille",
            },
        ),
    ),
)

PAIRING: Final = ObjectSpec(
    kind="pairing",
    doc="Which rows of an entry's MSAs are paired across its chains, by species (AF3 SI 2.3).",
    attributes={
        "kind": "`pairing`",
        "version": "version of the pairing stage that wrote it",
        "msas": "digest of the MSA object of each column",
    },
    arrays=(
        Array(
            name="pairing",
            dtype="int32",
            axes=("N_paired_row", "N_sequence"),
            doc="Row indices into each distinct sequence's MSA, -1 for none. The query row is row 0.",
        ),
    ),
)

TEMPLATE: Final = ObjectSpec(
    kind="template",
    doc="The template hits of one sequence: one object per distinct (sequence, set of hit files, template structures).",
    attributes={
        "kind": "`template`",
        "version": "version of the template stage that wrote it",
        "sequence": "the query",
        "sources": "list of {name, digest, hits, kept}",
        "hits": "columns, one item a hit: {entry, chain, release_date}",
        "skipped": "hits that were not used: {reason: count}",
        "warnings": "list of strings",
    },
    arrays=(
        table(
            "hits",
            "N_hit",
            "One item a hit, in the order of the files.",
            {
                "identity": "identical over aligned residues, per mille",
                "coverage": "aligned residues over the query's length, per mille",
                "aligned": "aligned residues",
                "first": "first aligned residue of the query, 0-based",
                "last": "last aligned residue of the query, 0-based",
            },
        ),
        Array(
            name="template_restype",
            dtype="int8",
            axes=("N_hit", "N_residue"),
            doc="Class in RESTYPES, the gap where the hit is not aligned.",
            source="AF3 SI table 5",
            chunk={"N_hit": 1},
        ),
        Array(
            name="template_atom_pos",
            dtype="float32",
            axes=("N_hit", "N_residue", "4", "3"),
            unit="Å",
            doc="N, CA, C and pseudo-beta (CB, CA for GLY); NaN where missing.",
            source="AF3 SI table 5",
            chunk={"N_hit": 1},
        ),
    ),
)

OBJECTS: Final = {spec.kind: spec for spec in (STRUCTURE, COMPONENT, MSA, PAIRING, TEMPLATE)}


def validate(kind: str, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> None:
    """Check an object against the schema.

    Raises:
        SchemaError: an array or attribute is missing, unknown, or of another dtype, rank or length.
    """
    validate_layout(kind, {name: (value.dtype, value.shape) for name, value in arrays.items()}, attributes)


def validate_layout(kind: str, layout: Layout, attributes: Mapping[str, Any]) -> None:
    """As :func:`validate`, from dtypes and shapes alone: a stored object need not be decoded."""
    spec = OBJECTS[kind]
    if set(attributes) != set(spec.attributes):
        missing, extra = set(spec.attributes) - set(attributes), set(attributes) - set(spec.attributes)
        raise SchemaError(f"{kind}: missing attributes {sorted(missing)}, unknown {sorted(extra)}")
    check_layout(kind, spec.arrays, layout)


def check_layout(where: str, specs: Sequence["Array | Feature"], layout: Layout) -> dict[str, int]:
    """Check dtypes and shapes by name; the length of each named axis.

    Raises:
        SchemaError: an array is missing, unknown, or of another dtype, rank or length.
    """
    expected = {spec.name for spec in specs}
    if set(layout) != expected:
        missing, extra = sorted(expected - set(layout)), sorted(set(layout) - expected)
        raise SchemaError(f"{where}: missing {missing}, unknown {extra}")
    lengths: dict[str, int] = {}
    for spec in specs:
        dtype, shape = layout[spec.name]
        if dtype != np.dtype(spec.dtype):
            raise SchemaError(f"{where}.{spec.name}: dtype {dtype}, expected {spec.dtype}")
        if len(shape) != len(spec.axes):
            raise SchemaError(f"{where}.{spec.name}: shape {shape}, expected axes {spec.axes}")
        for axis, length in zip(spec.axes, shape, strict=True):
            wanted = int(axis) if axis.isdigit() else lengths.setdefault(axis, length)
            if length != wanted:
                raise SchemaError(f"{where}.{spec.name}: axis {axis} has length {length}, expected {wanted}")
    return lengths


def chunks(kind: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    """Chunk shapes of an object's arrays, by name."""
    return {array.name: array.chunks(arrays[array.name].shape) for array in OBJECTS[kind].arrays}


# --------------------------------------------------------------------------------------------------
# Samples


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One array of a sample. ``pad`` is the value that padding along its axes holds."""

    name: str
    group: str
    dtype: str
    axes: tuple[str, ...]
    doc: str
    unit: str = ""
    pad: float | bool = 0
    source: str = "AF3 SI table 5"


def _features(group: str, axes: tuple[str, ...], rows: Mapping[str, tuple[str, str]]) -> list[Feature]:
    return [
        Feature(name=name, group=group, dtype=dtype, axes=axes, doc=doc)
        for name, (dtype, doc) in rows.items()
    ]


SAMPLE: Final[tuple[Feature, ...]] = (
    *_features(
        "token",
        ("N_token",),
        {
            "token_mask": ("bool", "True: a token, False: padding"),
            "residue_index": ("int32", "label_seq_id of the token's residue"),
            "token_index": ("int32", "1-based position in the uncropped entry"),
            "asym_id": ("int32", "chain, 1-based"),
            "entity_id": ("int32", "distinct sequence, 1-based"),
            "sym_id": ("int32", "copy within the entity, 1-based"),
            "restype": ("int32", "class in RESTYPES; the model makes it one-hot"),
            "is_protein": ("bool", "token of a protein chain"),
            "is_rna": ("bool", "token of an RNA chain"),
            "is_dna": ("bool", "token of a DNA chain"),
            "is_ligand": ("bool", "token of a ligand chain"),
            "deletion_mean": (
                "float32",
                "mean number of deletions to the left over the whole MSA, not squashed",
            ),
            "token_atom_start": ("int32", "first atom of the token"),
            "token_atom_count": ("int32", "atoms of the token"),
            "center_atom": ("int32", "atom index of CA, C1' or the atom"),
            "rep_atom": ("int32", "atom index of CB, C4, C2 or the atom"),
            "frame_mask": ("bool", "the frame's atoms are in the crop, resolved, not collinear"),
        },
    ),
    Feature(
        name="profile",
        group="token",
        dtype="float32",
        axes=("N_token", "32"),
        doc="distribution of the classes over the whole MSA; one-hot restype where there is none",
    ),
    Feature(
        name="frame_atoms",
        group="token",
        dtype="int32",
        axes=("N_token", "3"),
        doc="atom indices of the frame, 0 where masked",
        source="AF3 SI 4.3.2",
    ),
    Feature(
        name="token_bonds",
        group="token",
        dtype="bool",
        axes=("N_token", "N_token"),
        doc="covalent bonds within and to ligands and modified residues; symmetric",
    ),
    *_features(
        "reference",
        ("N_atom",),
        {
            "atom_mask": ("bool", "True: an atom, False: padding"),
            "atom_to_token": ("int32", "token of the atom"),
            "ref_mask": ("bool", "ref_pos is real"),
            "ref_element": ("int32", "atomic number; the model makes it one-hot (128)"),
            "ref_charge": ("float32", "formal charge"),
            "ref_space_uid": ("int32", "one number for each (chain, residue)"),
        },
    ),
    Feature(
        name="ref_pos",
        group="reference",
        dtype="float32",
        axes=("N_atom", "3"),
        unit="Å",
        doc="reference conformer, rotated and translated at random for each ref_space_uid; 0 where masked",
    ),
    Feature(
        name="ref_atom_name_chars",
        group="reference",
        dtype="int32",
        axes=("N_atom", "4"),
        doc="ord(c) - 32 of the name's characters; the model makes it one-hot (64)",
    ),
    *_features(
        "msa",
        ("N_msa", "N_token"),
        {
            "msa": ("int32", "class in RESTYPES, the gap where a chain has no such row"),
            "has_deletion": ("float32", "1: deletions to the left"),
            "deletion_value": ("float32", "2/π·arctan(d/3) of the deletions to the left"),
            "msa_mask": ("bool", "True: a row, False: padding"),
        },
    ),
    *_features(
        "template",
        ("N_templ", "N_token"),
        {
            "template_restype": ("int32", "class in RESTYPES, the gap where not aligned"),
            "template_pseudo_beta_mask": ("bool", "pseudo-beta is present"),
            "template_backbone_frame_mask": ("bool", "N, CA and C are present"),
        },
    ),
    Feature(
        name="template_pseudo_beta",
        group="template",
        dtype="float32",
        axes=("N_templ", "N_token", "3"),
        unit="Å",
        doc="CB (CA for GLY) of the template; 0 where masked",
    ),
    Feature(
        name="template_backbone_frame",
        group="template",
        dtype="float32",
        axes=("N_templ", "N_token", "3", "3"),
        unit="Å",
        doc="N, CA and C of the template; 0 where masked. The model makes frames and unit vectors of them",
    ),
    Feature(
        name="coords",
        group="label",
        dtype="float32",
        axes=("N_atom", "3"),
        unit="Å",
        doc="ground truth, centred, rotated and translated at random; 0 where masked",
        source="AF3 SI 3.7.1",
    ),
    *_features(
        "label",
        ("N_atom",),
        {
            "coords_mask": ("bool", "coords are resolved"),
            "b_factor": ("float32", "isotropic B factor, Å²; 0 where masked"),
        },
    ),
)
FEATURES: Final = {feature.name: feature for feature in SAMPLE}
