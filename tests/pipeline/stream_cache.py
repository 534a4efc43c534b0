"""Small hand-made caches for the tests of the stream: every number in them is known to the test."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megafold.cache_store import LocalStore
from megafold.pipeline import schema
from megafold.pipeline.builder.recipes import VERSIONS
from megafold.pipeline.content import make_content
from megafold.pipeline.manifest import manifest_from_rows
from megafold.pipeline.schema import BondKind, MolType

BACKBONE = "N CA C O"
NUCLEOTIDE = "OP3 P OP1 OP2 O5' C5' C4' O4' C3' O3' C2' O2' C1' N1 C2 O2 N3 C4 O4 C5 C6"
_ATOM_NAMES = {
    "ALA": f"{BACKBONE} CB OXT H H2",
    "GLY": f"{BACKBONE} OXT H",
    "LYS": f"{BACKBONE} CB CG CD CE NZ OXT H",
    "MSE": f"{BACKBONE} CB CG SE CE OXT H",
    "U": f"{NUCLEOTIDE} H5'",
    "PSU": f"{NUCLEOTIDE} H5'",
    "LGD": "C1 C2 O1 C3 H1",
    "ZN": "ZN",
}
ATOMS: dict[str, list[str]] = {code: names.split() for code, names in _ATOM_NAMES.items()}
#: Bonds by name; those to hydrogens are there to be ignored.
BONDS = {
    "ALA": "N-CA CA-C C-O CA-CB C-OXT N-H N-H2",
    "GLY": "N-CA CA-C C-O C-OXT N-H",
    "LYS": "N-CA CA-C C-O CA-CB CB-CG CG-CD CD-CE CE-NZ C-OXT N-H",
    "MSE": "N-CA CA-C C-O CA-CB CB-CG CG-SE SE-CE C-OXT N-H",
    "U": "P-O5'",
    "PSU": "OP3-P P-OP1 P-O5' O5'-C5' C5'-C4' C3'-O3'",
    "LGD": "C1-C2 C2-O1 C2-C3 C1-H1",
    "ZN": "",
}
ELEMENTS = {"N": 7, "C": 6, "O": 8, "P": 15, "H": 1, "SE": 34, "ZN": 30}
LETTERS = {"ALA": "A", "GLY": "G", "LYS": "K", "MSE": "M", "U": "U", "PSU": "U"}
STANDARD = {"ALA", "GLY", "LYS", "U"}
RESTYPE = {"ALA": "ALA", "GLY": "GLY", "LYS": "LYS", "U": "U", "MSE": "MET", "PSU": "U"}
LEAVING = {"OXT", "OP3"}


def element(name: str) -> int:
    return ELEMENTS.get(name) or ELEMENTS.get(name[:2]) or ELEMENTS[name[0]]


def library():
    """The component library of :data:`ATOMS`; positions are numbered, so that each is recognisable."""
    keys = sorted(ATOMS)
    atoms: list[Any] = []
    bonds: list[Any] = []
    positions: list[Any] = []
    automorphisms: list[int] = []
    components: list[Any] = []
    for place, code in enumerate(keys):
        names = ATOMS[code]
        pairs = [pair.split("-") for pair in BONDS[code].split()]
        heavy = [index for index, name in enumerate(names) if element(name) > 1]
        components.append(
            (len(atoms), len(names), len(bonds), len(pairs), len(automorphisms), 1, len(heavy), 0)
        )
        bonds += [(*sorted((names.index(a), names.index(b))), 1, 0) for a, b in pairs]
        automorphisms += heavy
        for index, name in enumerate(names):
            chars = [ord(c) for c in name.ljust(4)]
            is_known = code != "ZN"
            atoms.append((*chars, element(name), 2 if code == "ZN" else 0, name in LEAVING, 0, 0, is_known))
            positions.append((place, index, 0.5 * index**2) if is_known else (np.nan,) * 3)
    arrays: dict[str, Any] = {
        "components": np.array(components, np.int32).T,
        "atoms": np.array(atoms, np.int32).T,
        "bonds": np.array(bonds, np.int32).T,
        "ref_pos": np.array(positions, np.float32),
        "automorphisms": np.array(automorphisms, np.int16),
    }
    attributes = {
        "kind": "component",
        "version": 1,
        "keys": keys,
        "digests": ["" for _ in keys],
        "automorphism_cap": 1000,
        "capped": [],
        "failures": {},
    }
    return make_content("component", arrays, attributes)


@dataclass
class Chain:
    """A chain: its components in order, where its first residue lies and which residues are unresolved."""

    codes: list
    mol_type: MolType = MolType.PROTEIN
    entity: int = 1
    sym: int = 1
    origin: tuple = (0.0, 0.0, 0.0)
    unresolved: set = field(default_factory=set)
    msa: str = ""
    template: str = ""
    cluster: str = ""

    @property
    def sequence(self):
        return "" if self.mol_type == MolType.LIGAND else "".join(LETTERS[code] for code in self.codes)


def structure(entry, chains, bonds=(), interfaces=(), release_date="2020-01-01"):
    """A structure object. Residues lie 3.8 Å apart along x, their atoms 0.1 Å apart along y.

    ``bonds`` are pairs of (chain, residue, atom name), behind which a BondKind may stand; ``interfaces``
    pairs of chains.
    """
    keys = sorted({code for chain in chains for code in chain.codes})
    tables: dict[str, list[Any]] = {name: [] for name in ("chains", "residues", "tokens", "atoms")}
    coords: Any = []
    centers: list[Any] = []
    where: dict[Any, int] = {}
    for c, chain in enumerate(chains):
        starts = [len(tables[name]) for name in ("residues", "tokens", "atoms")]
        for r, code in enumerate(chain.codes):
            is_last = r == len(chain.codes) - 1
            names = [
                name
                for name in ATOMS[code]
                if element(name) > 1 and not (name == "OXT" and not is_last) and not (name == "OP3" and r > 0)
            ]
            is_resolved = r not in chain.unresolved
            is_standard = code in STANDARD and chain.mol_type != MolType.LIGAND
            residue = len(tables["residues"])
            tables["residues"].append((keys.index(code), r + 1, r + 101, 0, c, is_resolved, is_standard))
            first = len(coords)
            for index, name in enumerate(names):
                where[c, r, name] = len(coords)
                tables["atoms"].append((ATOMS[code].index(name), element(name), is_resolved))
                position = np.array(chain.origin) + [3.8 * r, 0.1 * index, 0]
                coords.append(position if is_resolved else (np.nan,) * 3)
            restype = schema.RESTYPE_INDEX[RESTYPE.get(code, "UNK")]
            if is_standard:
                center = "C1'" if "C1'" in names else "CA"
                rep = next(name for name in ("C4", "CB", "CA") if name in names)
                frame = ("C1'", "C3'", "C4'") if "C1'" in names else ("N", "CA", "C")
                numbers = [first + names.index(name) for name in (center, rep, *frame)]
                tables["tokens"].append((residue, first, len(names), restype, *numbers, is_resolved))
                centers.append(coords[numbers[0]])
            else:
                for index in range(len(names)):
                    atom = first + index
                    has_frame = 0 < index < len(names) - 1
                    around = (atom - 1, atom, atom + 1) if has_frame else (-1, -1, -1)
                    tables["tokens"].append(
                        (residue, atom, 1, restype, atom, atom, *around, has_frame and is_resolved)
                    )
                    centers.append(coords[atom])
        now = [len(tables[name]) for name in ("residues", "tokens", "atoms")]
        spans = [value for start, end in zip(starts, now, strict=True) for value in (start, end - start)]
        tables["chains"].append((c + 1, chain.entity, chain.sym, chain.mol_type, *spans, 0))
    rows = [(*sorted((where[a], where[b])), 1, *(kind or [BondKind.COVALENT])) for a, b, *kind in bonds]
    coords = np.array(coords, np.float32)
    occupancy_b = np.stack([np.ones(len(coords)), 10 + np.arange(len(coords))], axis=1).astype(np.float32)
    occupancy_b[np.isnan(coords[:, 0])] = np.nan
    arrays: dict[str, Any] = {name: np.array(rows, np.int32).T.copy() for name, rows in tables.items()} | {
        "token_center": np.array(centers, np.float32),
        "atom_coords": coords,
        "atom_occupancy_b": occupancy_b,
        "bonds": np.array(rows, np.int32).reshape(-1, 4).T.copy(),
        "interfaces": np.array(interfaces, np.int32).reshape(-1, 2).T.copy(),
    }
    entities = {chain.entity: chain for chain in chains}
    labels = [chr(65 + index) if index < 26 else f"A{index}" for index in range(len(chains))]
    attributes = {
        "kind": "structure",
        "version": 1,
        "entry": entry,
        "assembly": "1",
        "title": None,
        "method": "X-RAY DIFFRACTION",
        "resolution": 2.0,
        "release_date": release_date,
        "deposition_date": None,
        "components": keys,
        "component_digests": ["" for _ in keys],
        "entities": [
            {
                "label_entity_ids": [str(number)],
                "mol_type": entities[number].mol_type.name.lower(),
                "sequence": entities[number].sequence,
                "components": [keys.index(code) for code in entities[number].codes],
            }
            for number in sorted(entities)
        ],
        "chains": {"label_asym_id": labels, "auth_asym_id": labels, "operator": ["1"] * len(chains)},
        "filtered": {},
        "changed": {},
        "warnings": [],
    }
    return make_content("structure", arrays, attributes)


def msa(sequence, rows, deletions=None, mol_type="protein"):
    """An MSA object of a query and aligned rows of one-letter codes, ``-`` for gaps."""
    classes = dict(zip(schema.AMINO_ACID_LETTERS, range(20), strict=True)) | {"-": schema.GAP}
    if mol_type == "rna":
        classes = dict(zip("AGCU", range(21, 25), strict=True)) | {"-": schema.GAP}
    array = np.array([[classes[letter] for letter in row] for row in (sequence, *rows)], np.int8).T.copy()
    deletion = (
        np.zeros(array.shape, np.uint8) if deletions is None else np.array(deletions, np.uint8).T.copy()
    )
    profile = (array[:, :, None] == np.arange(schema.N_RESTYPE)).mean(axis=1)
    arrays: dict[str, Any] = {
        "msa": array,
        "deletion": deletion,
        "profile": profile.astype(np.float16),
        "deletion_mean": deletion.mean(axis=1).astype(np.float32),
        "rows": np.zeros((4, array.shape[1]), np.int32),
    }
    attributes = {
        "kind": "msa",
        "version": 1,
        "mol_type": mol_type,
        "sequence": sequence,
        "sources": [],
        "species": [],
        "warnings": [],
    }
    return make_content("msa", arrays, attributes)


def pairing(msas, rows):
    return make_content(
        "pairing",
        {"pairing": np.array(rows, np.int32)},
        {"kind": "pairing", "version": 1, "msas": list(msas)},
    )


def template(sequence, hits):
    """A template object of hits ``{entry, release_date, identity, coverage, restype, pos}``; N = residues.

    ``pos`` [N_residue, 4, 3] defaults to the hit's number everywhere.
    """
    length = len(sequence)
    restype = np.full((len(hits), length), schema.GAP, np.int8)
    position = np.full((len(hits), length, 4, 3), np.nan, np.float32)
    rows = []
    for index, hit in enumerate(hits):
        rows.append(
            (hit.get("identity", 500), hit.get("coverage", 900), hit.get("aligned", length), 0, length - 1)
        )
        restype[index] = hit.get("restype", index % 20)
        position[index] = hit.get("pos", float(index + 1))
    arrays: dict[str, Any] = {
        "hits": np.array(rows, np.int32).reshape(-1, 5).T.copy(),
        "template_restype": restype,
        "template_atom_pos": position,
    }
    attributes = {
        "kind": "template",
        "version": 1,
        "sequence": sequence,
        "sources": [],
        "hits": {
            "entry": [hit["entry"] for hit in hits],
            "chain": ["A" for _ in hits],
            "release_date": [hit["release_date"] for hit in hits],
        },
        "skipped": {},
        "warnings": [],
    }
    return make_content("template", arrays, attributes)


def row_of(content, digest, chains, pairing_digest=""):
    """The manifest row of a structure."""
    attributes, arrays = content.attributes, content.arrays
    counts = [sum(chain.mol_type == kind for chain in chains) for kind in MolType]
    chain_rows = []
    for index, chain in enumerate(chains):
        table = dict(
            zip(schema.STRUCTURE.table("chains").column_names, arrays["chains"][:, index], strict=True)
        )
        text = chain.sequence
        chain_rows.append(
            {
                "label_asym_id": attributes["chains"]["label_asym_id"][index],
                "auth_asym_id": attributes["chains"]["auth_asym_id"][index],
                **{name: int(table[name]) for name in ("asym_id", "entity_id", "sym_id")},
                "mol_type": chain.mol_type.name.lower(),
                "n_residue": len(chain.codes),
                "n_token": int(table["token_count"]),
                "n_resolved": len(chain.codes) - len(chain.unresolved),
                "sequence_digest": hashlib.sha256(text.encode()).hexdigest() if text else "",
                "msa": chain.msa,
                "msa_depth": 0,
                "msa_status": "ok" if chain.msa else "none",
                "template": chain.template,
                "n_template": 0,
                "cluster": chain.cluster,
            }
        )
    return {
        "entry": attributes["entry"],
        "assembly": "1",
        "structure": str(digest),
        "pairing": pairing_digest,
        "recipes": {},
        "components": list(attributes["components"]),
        "source": f"{attributes['entry']}.cif",
        "source_digest": "",
        **{name: attributes[name] for name in ("release_date", "resolution", "method", "title")},
        "n_token": arrays["tokens"].shape[1],
        "n_atom": arrays["atoms"].shape[1],
        "n_residue": arrays["residues"].shape[1],
        **{f"n_chain_{kind.name.lower()}": counts[kind] for kind in MolType},
        "chains": chain_rows,
        "interfaces": [{"chain_i": int(i), "chain_j": int(j)} for i, j in arrays["interfaces"].T],
        "warnings": [],
    }


def publish(path, entries):
    """A cache of ``(structure content, chains, pairing digest)``; returns its store."""
    store = LocalStore.create(path)
    rows = [row_of(content, store.put(content), chains, pair) for content, chains, pair in entries]
    attributes = {"components": str(store.put(library())), "config": {}, "versions": dict(VERSIONS)}
    digest = store.put_manifest(manifest_from_rows(rows, attributes))
    store.move_ref("main", None, digest)
    return store
