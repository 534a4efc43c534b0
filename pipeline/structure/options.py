"""What a structure is to be made of: the assembly, and the filters of AF3 SI 2.5.4."""

from dataclasses import dataclass
from typing import Final

from megafold.pipeline.errors import InputError

#: AF3 SI table 9: buffer, cryoprotectant and precipitant molecules that are there because of the crystal.
CRYSTALLISATION_AIDS: Final = frozenset(
    "SO4 GOL EDO PO4 ACT PEG DMS TRS PGE PG4 FMT EPE MPD MES CD IOD".split()
)

#: The assembly id that takes the coordinates as the file has them.
AS_DEPOSITED: Final = "asym"


@dataclass(frozen=True, kw_only=True)
class StructureOptions:
    """Options of :func:`megafold.pipeline.structure.featurize_structure`.

    The defaults are the values of the AF3 supplement (section 2.5.4). Waters and hydrogens are always left
    out.

    Attributes:
        assembly: id of the assembly to build, ``asym`` for the coordinates as they are in the file. Where a
            file has no such assembly, the default ``1`` falls back (with a warning) to its first assembly or
            to the coordinates as they are; any other id is an error.
        crystallisation_aids: component codes removed where the method is crystallography; empty for none.
        remove_unknown_ligands: remove ligands whose chemistry nobody knows (UNX, and UNL without bonds).
        remove_unknown_chains: remove polymer chains whose resolved residues are all unknown (UNK, N, DN).
        min_resolved_residues: remove polymer chains with fewer resolved residues; 0 keeps all.
        max_ca_gap: Å; remove protein chains in which the CA atoms of neighbours in sequence are further
            apart; 0 keeps all.
        clash_distance: Å; atoms of different chains that are closer clash.
        clash_fraction: remove chains of whose atoms more than this fraction clash with another chain; 1 keeps
            all.
        max_polymer_chains: refuse entries with more polymer chains in the deposited coordinates; 0 for no
            limit.
        interface_distance: Å; chains with heavy atoms within this distance form an interface (AF3 SI 2.5.1).
        convert_selenomethionine: MSE is MET, as in AF3 SI 2.1; else it is one token an atom.
        order_arginine: NH1 of an arginine is the nitrogen closer to CD, as in AF3 SI 2.1.
        infer_bonds: covalent bonds between residues that geometry shows are bonds though no row says so;
            metal coordination too where the file has no ``struct_conn`` rows at all.

    Raises:
        InputError: an option is out of its range (``structure-option``).
    """

    assembly: str = "1"
    crystallisation_aids: frozenset[str] = CRYSTALLISATION_AIDS
    remove_unknown_ligands: bool = True
    remove_unknown_chains: bool = True
    min_resolved_residues: int = 4
    max_ca_gap: float = 10.0
    clash_distance: float = 1.7
    clash_fraction: float = 0.3
    max_polymer_chains: int = 300
    interface_distance: float = 5.0
    convert_selenomethionine: bool = True
    order_arginine: bool = True
    infer_bonds: bool = True

    def __post_init__(self) -> None:
        if not self.assembly:
            raise InputError("assembly: give an assembly id, or 'asym'", reason="structure-option")
        if not 0 < self.clash_fraction <= 1:
            raise InputError(
                f"clash_fraction must lie in (0, 1], not {self.clash_fraction}", reason="structure-option"
            )
        lengths = {
            "min_resolved_residues": self.min_resolved_residues,
            "max_ca_gap": self.max_ca_gap,
            "clash_distance": self.clash_distance,
            "max_polymer_chains": self.max_polymer_chains,
            "interface_distance": self.interface_distance,
        }
        for name, value in lengths.items():
            if not value >= 0:
                raise InputError(f"{name} must not be negative, it is {value}", reason="structure-option")
