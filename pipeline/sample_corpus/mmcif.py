"""Entries as PDBx/mmCIF, with the categories that files of the PDB have."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import gemmi
import numpy as np

from megafold.pipeline.chemistry.elements import SYMBOLS
from megafold.pipeline.sample_corpus.model import Chain, Connection, Entity, Entry, Residue
from megafold.pipeline.sample_corpus.monomers import LETTER, monomer

_STANDARD: Final = {code for code in LETTER if code not in ("MSE", "SEP", "TPO", "PTR")} | {
    "A", "C", "G", "U", "DA", "DC", "DG", "DT"
}  # fmt: skip

_ATOM_SITE: Final = (
    "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
    "label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv pdbx_formal_charge "
    "auth_seq_id auth_comp_id auth_asym_id auth_atom_id pdbx_PDB_model_num"
).split()


def to_mmcif(entry: Entry) -> str:
    """The entry as the text of one mmCIF file."""
    document = gemmi.cif.Document()
    block = document.add_new_block(entry.id.upper())
    _describe(block, entry)
    _entities(block, entry)
    _schemes(block, entry)
    _connections(block, entry)
    _assembly(block, entry)
    _atoms(block, entry)
    options = gemmi.cif.WriteOptions()
    options.align_loops = 0
    return str(document.as_string(options))


def _pairs(block: gemmi.cif.Block, category: str, values: dict[str, str]) -> None:
    for name, value in values.items():
        block.set_pair(f"_{category}.{name}", _quote(value))


def _loop(
    block: gemmi.cif.Block, category: str, names: str, rows: Iterable[Sequence[str | int | float]]
) -> None:
    """Write a category of rows; none at all is no category. Values '?' and '.' stay as they are."""
    rows = list(rows)
    if rows:
        loop = block.init_loop(f"_{category}.", names.split())
        loop.set_all_values([[_quote(str(row[k])) for row in rows] for k in range(len(rows[0]))])


def _quote(value: str) -> str:
    return value if value in ("?", ".") else str(gemmi.cif.quote(value))


def _describe(block: gemmi.cif.Block, entry: Entry) -> None:
    name = entry.id.upper()
    _pairs(block, "entry", {"id": name})
    _pairs(block, "struct", {"entry_id": name, "title": f"{entry.title} (synthetic)"})
    _pairs(block, "exptl", {"entry_id": name, "method": entry.method})
    if entry.resolution is not None and entry.method.startswith("X-RAY"):
        _pairs(block, "refine", {"entry_id": name, "pdbx_refine_id": entry.method} | {
            "ls_d_res_high": f"{entry.resolution:.2f}", "ls_d_res_low": "40.00"
        })  # fmt: skip
        _pairs(block, "reflns", {"entry_id": name, "d_resolution_high": f"{entry.resolution:.2f}"})
    elif entry.resolution is not None:
        _pairs(
            block,
            "em_3d_reconstruction",
            {"entry_id": name, "id": "1", "resolution": f"{entry.resolution:.2f}"},
        )
    _pairs(
        block,
        "pdbx_database_status",
        {
            "entry_id": name,
            "status_code": "REL",
            "recvd_initial_deposition_date": entry.deposited.isoformat(),
        },
    )
    _loop(
        block,
        "pdbx_audit_revision_history",
        "ordinal data_content_type major_revision minor_revision revision_date",
        [(1, "Structure model", 1, 0, entry.released.isoformat())],
    )


def _formula(code: str) -> str:
    counts = Counter(SYMBOLS[int(number)] for number in monomer(code).component.elements)
    first = [symbol for symbol in ("C", "H") if symbol in counts and "C" in counts]
    rest = sorted(symbol for symbol in counts if symbol not in first)
    return " ".join(symbol + (str(counts[symbol]) if counts[symbol] > 1 else "") for symbol in first + rest)


def _component_type(code: str) -> str:
    """The type in the spelling that entries use, such as ``L-peptide linking``."""
    words = monomer(code).component.type.split()
    return " ".join(
        word if word in ("DNA", "RNA") else word[0] + word[1:].lower() if word[1:2] == "-" else word.lower()
        for word in words
    )


def _printed(entity: Entity) -> str:
    """A polymer's sequence in one-letter code, others than standard residues in parentheses."""
    return "".join(
        LETTER[code] if code in LETTER and code in _STANDARD else code if len(code) == 1 else f"({code})"
        for code in entity.codes
    )


def _copies(entry: Entry, number: int) -> list[Chain]:
    return [chain for chain in entry.chains if chain.entity == number]


def _entities(block: gemmi.cif.Block, entry: Entry) -> None:
    numbered = list(enumerate(entry.entities))
    molecules = [
        sum(len(c.residues) if e.kind == "water" else 1 for c in _copies(entry, k)) for k, e in numbered
    ]
    _loop(
        block,
        "entity",
        "id type src_method pdbx_description pdbx_number_of_molecules",
        [
            (k + 1, e.kind, "nat" if e.kind == "water" else "syn", e.description, molecules[k])
            for k, e in numbered
        ],
    )
    polymers = [(k, e) for k, e in numbered if e.kind == "polymer"]
    _loop(
        block,
        "entity_poly",
        "entity_id type nstd_linkage nstd_monomer pdbx_seq_one_letter_code pdbx_seq_one_letter_code_can "
        "pdbx_strand_id",
        [
            (
                k + 1,
                e.polymer_type or "?",
                "no",
                "no" if set(e.codes) <= _STANDARD else "yes",
                _printed(e),
                e.letters,
                ",".join(chain.auth for chain in _copies(entry, k)),
            )
            for k, e in polymers
        ],
    )
    _loop(
        block,
        "entity_poly_seq",
        "entity_id num mon_id hetero",
        [(k + 1, i + 1, code, "n") for k, e in polymers for i, code in enumerate(e.codes)],
    )
    _loop(
        block,
        "pdbx_entity_nonpoly",
        "entity_id name comp_id",
        [(k + 1, e.description, e.codes[0]) for k, e in numbered if e.kind in ("non-polymer", "water")],
    )
    _branched(block, [(k, e) for k, e in numbered if e.kind == "branched"])
    codes = sorted({code for e in entry.entities for code in e.codes})
    _loop(
        block,
        "chem_comp",
        "id type mon_nstd_flag name formula",
        [
            (
                code,
                _component_type(code),
                "y" if code in _STANDARD else "n" if code in LETTER else ".",
                monomer(code).component.name or "?",
                _formula(code),
            )
            for code in codes
        ],
    )


def _branched(block: gemmi.cif.Block, branched: list[tuple[int, Entity]]) -> None:
    _loop(block, "pdbx_entity_branch", "entity_id type", [(k + 1, "oligosaccharide") for k, _ in branched])
    _loop(
        block,
        "pdbx_entity_branch_list",
        "entity_id comp_id num hetero",
        [(k + 1, code, i + 1, "n") for k, e in branched for i, code in enumerate(e.codes)],
    )
    links = [(k, e, link) for k, e in branched for link in e.links]
    _loop(
        block,
        "pdbx_entity_branch_link",
        "link_id entity_id entity_branch_list_num_1 comp_id_1 atom_id_1 leaving_atom_id_1 "
        "entity_branch_list_num_2 comp_id_2 atom_id_2 leaving_atom_id_2 value_order",
        [
            (n + 1, k + 1, link.child + 1, e.codes[link.child], "C1", "O1")
            + (link.parent + 1, e.codes[link.parent], link.atom, f"H{link.atom}", "sing")
            for n, (k, e, link) in enumerate(links)
        ],
    )


def _schemes(block: gemmi.cif.Block, entry: Entry) -> None:
    _loop(
        block,
        "struct_asym",
        "id pdbx_blank_PDB_chainid_flag pdbx_modified entity_id",
        [(chain.label, "N", "N", chain.entity + 1) for chain in entry.chains],
    )
    polymer, branched, other = [], [], []
    for chain in entry.chains:
        entity = entry.entities[chain.entity]
        for i, (residue, number) in enumerate(zip(chain.residues, chain.numbers, strict=True)):
            seen = (number, residue.code) if residue.resolved else ("?", "?")
            if entity.kind == "polymer":
                polymer.append(
                    (
                        chain.label,
                        chain.entity + 1,
                        i + 1,
                        residue.code,
                        i + 1,
                        number,
                        *seen,
                        chain.auth,
                        ".",
                        "n",
                    )
                )
            elif entity.kind == "branched":
                branched.append(
                    (chain.label, chain.entity + 1, residue.code, i + 1, chain.auth, residue.code, number)
                    + (chain.auth, residue.code, number, "n")
                )
            else:
                other.append(
                    (
                        chain.label,
                        chain.entity + 1,
                        residue.code,
                        i + 1,
                        number,
                        number,
                        residue.code,
                        residue.code,
                    )
                    + (chain.auth, ".")
                )
    _loop(
        block,
        "pdbx_poly_seq_scheme",
        "asym_id entity_id seq_id mon_id ndb_seq_num pdb_seq_num auth_seq_num pdb_mon_id pdb_strand_id "
        "pdb_ins_code hetero",
        polymer,
    )
    _loop(
        block,
        "pdbx_branch_scheme",
        "asym_id entity_id mon_id num pdb_asym_id pdb_mon_id pdb_seq_num auth_asym_id auth_mon_id "
        "auth_seq_num hetero",
        branched,
    )
    _loop(
        block,
        "pdbx_nonpoly_scheme",
        "asym_id entity_id mon_id ndb_seq_num pdb_seq_num auth_seq_num pdb_mon_id auth_mon_id pdb_strand_id "
        "pdb_ins_code",
        other,
    )


def _partner(entry: Entry, atom: tuple[str, int, str]) -> tuple[Chain, Residue, str, int]:
    label, index, _ = atom
    chain = next(chain for chain in entry.chains if chain.label == label)
    is_polymer = entry.entities[chain.entity].kind == "polymer"
    return chain, chain.residues[index], str(index + 1) if is_polymer else ".", chain.numbers[index]


def _connections(block: gemmi.cif.Block, entry: Entry) -> None:
    counts: Counter[str] = Counter()
    rows = []
    for connection in entry.connections:
        counts[connection.kind] += 1
        rows.append(_connection_row(entry, connection, counts[connection.kind]))
    _loop(
        block,
        "struct_conn",
        "id conn_type_id pdbx_leaving_atom_flag ptnr1_label_asym_id ptnr1_label_comp_id ptnr1_label_seq_id "
        "ptnr1_label_atom_id pdbx_ptnr1_label_alt_id pdbx_ptnr1_PDB_ins_code ptnr1_symmetry "
        "ptnr2_label_asym_id ptnr2_label_comp_id ptnr2_label_seq_id ptnr2_label_atom_id "
        "pdbx_ptnr2_label_alt_id pdbx_ptnr2_PDB_ins_code ptnr1_auth_asym_id ptnr1_auth_comp_id "
        "ptnr1_auth_seq_id ptnr2_auth_asym_id ptnr2_auth_comp_id ptnr2_auth_seq_id ptnr2_symmetry "
        "pdbx_dist_value pdbx_value_order",
        rows,
    )
    _loop(block, "struct_conn_type", "id criteria reference", [(kind, "?", "?") for kind in sorted(counts)])


def _connection_row(entry: Entry, connection: Connection, number: int) -> tuple[str | int, ...]:
    chain_1, residue_1, seq_1, auth_1 = _partner(entry, connection.first)
    chain_2, residue_2, seq_2, auth_2 = _partner(entry, connection.second)
    atom_1, atom_2 = connection.first[2], connection.second[2]
    distance = float(np.linalg.norm(residue_1.atom(atom_1) - residue_2.atom(atom_2)))
    leaving = connection.leaving if connection.kind == "covale" else "?"
    order = "sing" if connection.kind == "covale" else "?"
    return (
        *(f"{connection.kind}{number}", connection.kind, leaving),
        *(chain_1.label, residue_1.code, seq_1, atom_1, "?", "?", "1_555"),
        *(chain_2.label, residue_2.code, seq_2, atom_2, "?", "?"),
        *(chain_1.auth, residue_1.code, auth_1, chain_2.auth, residue_2.code, auth_2, "1_555"),
        *(f"{distance:.3f}", order),
    )


def _assembly(block: gemmi.cif.Block, entry: Entry) -> None:
    polymers = sum(entry.entities[chain.entity].kind == "polymer" for chain in entry.chains)
    count = polymers * len(entry.operators)
    names = {1: "monomeric", 2: "dimeric", 3: "trimeric", 4: "tetrameric"}
    _loop(
        block,
        "pdbx_struct_assembly",
        "id details method_details oligomeric_details oligomeric_count",
        [(1, "author_defined_assembly", "?", names.get(count, f"{count}-meric"), count)],
    )
    operators = range(1, len(entry.operators) + 1)
    _loop(
        block,
        "pdbx_struct_assembly_gen",
        "assembly_id oper_expression asym_id_list",
        [(1, ",".join(map(str, operators)), ",".join(chain.label for chain in entry.chains))],
    )
    elements = [f"matrix[{i}][{j}]" for i in (1, 2, 3) for j in (1, 2, 3)] + [
        f"vector[{i}]" for i in (1, 2, 3)
    ]
    kinds = ["identity operation"] + ["point symmetry operation"] * (len(entry.operators) - 1)
    _loop(
        block,
        "pdbx_struct_oper_list",
        " ".join(["id", "type", "name", *elements]),
        [
            (n, kind, "1_555" if n == 1 else "2_555")
            + (*_fixed(operator[:, :3].ravel(), 10), *_fixed(operator[:, 3], 10))
            for n, kind, operator in zip(operators, kinds, entry.operators, strict=True)
        ],
    )


def _atoms(block: gemmi.cif.Block, entry: Entry) -> None:
    pos = np.concatenate([chain.pos for chain in entry.chains])
    # Atoms far from the middle move more; structures from NMR have no B factors.
    spread = np.linalg.norm(pos - pos.mean(axis=0), axis=1)
    b_factors = np.zeros(len(pos)) if entry.method.endswith("NMR") else np.clip(10 + 1.6 * spread, 5, 95)
    columns: dict[str, list[str]] = {name: [] for name in _ATOM_SITE}
    for chain in entry.chains:
        is_polymer = entry.entities[chain.entity].kind == "polymer"
        for i, (residue, number) in enumerate(zip(chain.residues, chain.numbers, strict=True)):
            shared = {
                "group_PDB": "ATOM" if is_polymer and residue.code in _STANDARD else "HETATM",
                "label_comp_id": residue.code,
                "label_asym_id": chain.label,
                "label_entity_id": str(chain.entity + 1),
                "label_seq_id": str(i + 1) if is_polymer else ".",
                "auth_seq_id": str(number),
                "auth_comp_id": residue.code,
                "auth_asym_id": chain.auth,
            }
            for name, value in shared.items():
                columns[name] += [value] * len(residue.names)
            names = [_quote(name) for name in residue.names]
            columns["label_atom_id"] += names
            columns["auth_atom_id"] += names
            columns["type_symbol"] += residue.elements
            columns["label_alt_id"] += [alternate or "." for alternate in residue.alternates]
            columns["occupancy"] += _fixed(residue.occupancies, 2)
            columns["pdbx_formal_charge"] += _charges(residue)
    columns["id"] = [str(n + 1) for n in range(len(pos))]
    for axis, name in enumerate(("Cartn_x", "Cartn_y", "Cartn_z")):
        columns[name] = _fixed(np.round(pos[:, axis], 3) + 0.0, 3)
    columns["B_iso_or_equiv"] = _fixed(b_factors, 2)
    columns["pdbx_PDB_ins_code"] = ["?"] * len(pos)
    columns["pdbx_PDB_model_num"] = ["1"] * len(pos)
    block.init_loop("_atom_site.", list(columns)).set_all_values(list(columns.values()))


def _fixed(values: Iterable[float], digits: int) -> list[str]:
    return [f"{value:.{digits}f}" for value in values]


def _charges(residue: Residue) -> list[str]:
    """Formal charges, given for ions alone, as most files do."""
    if len(residue.names) != 1 or residue.code in LETTER or residue.code == "HOH":
        return ["?"] * len(residue.names)
    return [str(int(charge)) if charge else "?" for charge in monomer(residue.code).component.charges]
