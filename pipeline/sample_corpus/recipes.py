"""What the entries are: one recipe for each kind, and the order in which kinds and families come."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.random import Generator

from megafold.pipeline.sample_corpus.assembling import BLOCK, Atom, EntryBuilder
from megafold.pipeline.sample_corpus.family import PLANS, Member, family, make_member
from megafold.pipeline.sample_corpus.model import AlignedChain, BranchLink, Entry, Residue
from megafold.pipeline.sample_corpus.nucleic import A_RNA, B_DNA, Hairpin, duplex, hairpin, random_sequence
from megafold.pipeline.sample_corpus.packing import ChainPacking
from megafold.pipeline.sample_corpus.placement import (
    Pose,
    attach_heme,
    component_residue,
    coordinate,
    dock,
    grow_glycan,
    sphere_around,
    two_fold,
    waters,
)
from megafold.pipeline.sample_corpus.seeds import generator
from megafold.pipeline.sample_corpus.sites import find_disulfide, find_zinc_site

XRAY, NMR, EM = "X-RAY DIFFRACTION", "SOLUTION NMR", "ELECTRON MICROSCOPY"
_AIDS: Final = ("GOL", "SO4", "EDO", "ACT")
_LIGANDS: Final = ("ATP", "NAD", "GDP", "FMN", "SAH", "BTN", "AMP", "PLP")
#: Residues that sites are made of: never in two places.
_FUNCTIONAL: Final = ("ASN", "CYS", "HIS")
#: Atoms at the end of long exposed side chains that are often not seen.
_LOOSE: Final = {
    "LYS": ("CE", "NZ"),
    "ARG": ("CZ", "NH1", "NH2"),
    "GLU": ("OE1", "OE2"),
    "GLN": ("OE1", "NE2"),
}
#: Kind and families of the entries of a block, in order.
SLOTS: Final[tuple[tuple[str, tuple[int, ...]], ...]] = (
    ("monomer", (0,)),
    ("heterodimer", (1, 2)),
    ("homodimer", (5,)),
    ("protein-dna", (3,)),
    ("dna", ()),
    ("rna-hairpin", ()),
    ("glycoprotein", (1,)),
    ("disulfide", (2,)),
    ("zinc", (0,)),
    ("modified", (5,)),
    ("ligand", (3,)),
    ("protein-rna", (4,)),
    ("monomer", (3,)),
    ("heterodimer", (1, 2)),
    ("homodimer", (0,)),
    ("protein-dna", (2,)),
    ("heme", (5,)),
    ("rna-duplex", ()),
    ("glycoprotein", (5,)),
    ("disulfide", (1,)),
    ("zinc", (3,)),
    ("modified", (0,)),
    ("ligand", (2,)),
    ("protein-rna", (4,)),
)
#: So many entries share the same families; folds are what takes longest to make.
FAMILY_SPAN: Final = 4 * BLOCK


class _Recipe:
    """One entry in the making: its generator, its families, and steps that several kinds share."""

    def __init__(self, seed: int, index: int) -> None:
        self.seed, self.index = seed, index
        self.kind, self.families = SLOTS[index % BLOCK]
        self.rng: Generator = generator(seed, "entry", index)
        self.builder = EntryBuilder(index, self.kind, self.rng)

    def member(self, which: int = 0, *, attempt: int = 0) -> Member:
        """A member of one of the entry's families; later attempts try other families too."""
        plan = (self.families[which] + attempt // 4) % len(PLANS)
        parent = family(self.seed, self.index // FAMILY_SPAN, plan)
        return make_member(self.rng, parent)

    def packed(self, which: int = 0) -> ChainPacking:
        """A chain of the family with all its side chains."""
        packing = ChainPacking(self.member(which))
        packing.pack()
        self.add_alternates(packing)
        return packing

    def add_alternates(self, packing: ChainPacking) -> None:
        """Give some exposed residues of most chains a second conformation: before others come near."""
        if self.rng.random() < 0.6:
            candidates = [i for i in self.exposed(packing) if packing.placed[i].code not in _FUNCTIONAL]
            if sum(packing.add_alternate(i) for i in candidates[:4]):
                self.builder.tags.add("altloc")

    def add_protein(self, packing: ChainPacking, pose: Pose | None = None) -> int:
        """Add the chain, some of its exposed side chains without their last atoms. Returns its handle."""
        residues = packing.residues()
        for i in self.exposed(packing)[:8]:
            code = residues[i].code
            if code in _LOOSE and i not in packing.alternates and self.rng.random() < 0.35:
                residues[i] = residues[i].without(*_LOOSE[code])
                self.builder.tags.add("missing-atoms")
        if not all(residue.resolved for residue in residues):
            self.builder.tags.add("missing-residues")
        member, letters = packing.member, "".join(packing.letters)
        aligned = AlignedChain(0, "", letters, member.family.name, member.columns, member.rates)
        if pose is not None:
            residues = pose.apply(residues)
        self.builder.tags.add("protein")
        name = f"Protein of {member.family.name}"
        return self.builder.add_polymer(name, "polypeptide(L)", residues, letters, aligned)

    def exposed(self, packing: ChainPacking) -> list[int]:
        """Resolved residues whose side chains are placed, the most exposed first."""
        return sorted(packing.placed, key=lambda i: (packing.burial[i], i))

    def add_nucleic(self, strand: list[Residue], *, pairs: tuple[tuple[int, int], ...] = ()) -> int:
        """Add a DNA or RNA strand. Returns its handle."""
        is_dna = strand[0].code.startswith("D")
        letters = "".join(residue.code[-1] for residue in strand)
        self.builder.tags.add("dna" if is_dna else "rna")
        if is_dna:
            return self.builder.add_polymer("DNA strand", "polydeoxyribonucleotide", strand, letters)
        columns, rates = tuple(range(len(letters))), np.ones(len(letters))
        aligned = AlignedChain(0, "", letters, f"rna {self.index}", columns, rates, pairs)
        return self.builder.add_polymer("RNA strand", "polyribonucleotide", strand, letters, aligned)

    def add_docked(self, code: str, *, trials: int = 24) -> int:
        """Add a small molecule in the best of several places on the surface. Returns its handle."""
        residue = component_residue(code)
        pose = dock(self.rng, self.builder.atoms(), residue.pos, trials=trials, distance=3.0)
        if len(residue.names) == 1:
            self.builder.tags.add("ion")
        else:
            self.builder.tags.add("ligand")
        return self.builder.add_ligand(pose.apply([residue])[0])

    def add_surroundings(self, count: int) -> None:
        """Add what crystals hold besides: sometimes a crystallisation aid or an ion, and waters."""
        if self.rng.random() < 0.4:
            self.add_docked(str(self.rng.choice(_AIDS)), trials=6)
        if self.rng.random() < 0.25:
            self.add_docked(str(self.rng.choice(["CL", "NA", "K"])), trials=4)
        self.builder.add_waters(waters(self.rng, self.builder.polar_atoms(), self.builder.atoms(), count))

    def finish(self, title: str, method: str = XRAY) -> Entry:
        """The entry; some of those from crystals are said to come from electron microscopy instead."""
        if method == XRAY and self.rng.random() < 0.3 and "altloc" not in self.builder.tags:
            method = EM
        resolution = round(float(self.rng.uniform(1.3, 3.4)), 2) if method != NMR else None
        return self.builder.finish(title, method, resolution)


def _monomer(recipe: _Recipe) -> Entry:
    recipe.add_protein(recipe.packed())
    recipe.add_docked("GOL", trials=8)
    recipe.add_surroundings(12)
    return recipe.finish("A single protein chain with glycerol")


def _heterodimer(recipe: _Recipe) -> Entry:
    first, second = recipe.packed(0), recipe.packed(1)
    recipe.add_protein(first)
    recipe.add_protein(second, dock(recipe.rng, first.atoms(), second.atoms()))
    recipe.builder.tags.add("multimer")
    recipe.add_surroundings(8)
    return recipe.finish("A complex of two different protein chains")


def _homodimer(recipe: _Recipe) -> Entry:
    packing = recipe.packed()
    pose, operator = two_fold(recipe.rng, packing.atoms())
    recipe.add_protein(packing, pose)
    recipe.builder.operators.append(operator)
    recipe.builder.tags.add("assembly-operator")
    return recipe.finish("A homodimer about a crystal's two-fold axis")


def _protein_dna(recipe: _Recipe) -> Entry:
    packing = recipe.packed()
    strands = duplex(
        B_DNA, [f"D{b}" for b in random_sequence(recipe.rng, "ACGT", int(recipe.rng.integers(10, 15)))]
    )
    recipe.add_protein(packing)
    helix = np.concatenate([residue.pos for strand in strands for residue in strand])
    pose = dock(recipe.rng, packing.atoms(), helix, trials=6)
    for strand in strands:
        recipe.add_nucleic(pose.apply(strand))
    recipe.builder.tags.add("multimer")
    recipe.builder.add_waters(waters(recipe.rng, recipe.builder.polar_atoms(), recipe.builder.atoms(), 6))
    return recipe.finish("A protein bound to a DNA duplex")


def _add_magnesium(recipe: _Recipe, strand: list[Residue], handle: int) -> None:
    """A magnesium ion with five waters on a phosphate of the strand."""
    everything = recipe.builder.atoms()
    for i in recipe.rng.permutation(np.arange(1, len(strand))):
        residue = strand[int(i)]
        if not residue.resolved:
            continue
        donor = residue.atom("OP1")
        others = everything[((everything - donor) ** 2).sum(-1) > 1e-6]
        place = coordinate(recipe.rng, donor, residue.atom("P"), others, 2.08)
        if place is None:
            continue
        ion = recipe.builder.add_ligand(Residue("MG", ("MG",), ("MG",), place[None]))
        recipe.builder.bond("metalc", Atom(handle, int(i), "OP1"), Atom(ion, 0, "MG"))
        recipe.builder.tags |= {"ion", "metalc"}
        around = sphere_around(recipe.rng, place, recipe.builder.atoms(), 4)
        shell = recipe.builder.add_waters(around)
        if shell is not None:
            for k in range(len(around)):
                recipe.builder.bond("metalc", Atom(ion, 0, "MG"), Atom(shell, k, "O"))
        return


def _dna(recipe: _Recipe) -> Entry:
    codes = [f"D{base}" for base in random_sequence(recipe.rng, "ACGT", int(recipe.rng.integers(10, 19)))]
    strands = duplex(B_DNA, codes)
    handles = [recipe.add_nucleic(strand) for strand in strands]
    _add_magnesium(recipe, strands[0], handles[0])
    return recipe.finish("A DNA double helix")


def _hairpin_parts(recipe: _Recipe) -> Hairpin:
    return hairpin(recipe.rng, random_sequence(recipe.rng, "ACGU", int(recipe.rng.integers(6, 10))))


def _rna_hairpin(recipe: _Recipe) -> Entry:
    parts = _hairpin_parts(recipe)
    handle = recipe.add_nucleic(list(parts.residues), pairs=parts.pairs)
    recipe.builder.tags.add("missing-residues")
    _add_magnesium(recipe, list(parts.residues), handle)
    return recipe.finish("An RNA hairpin with a disordered loop", NMR)


def _rna_duplex(recipe: _Recipe) -> Entry:
    strands = duplex(A_RNA, random_sequence(recipe.rng, "ACGU", int(recipe.rng.integers(20, 25))))
    for strand in strands:
        recipe.add_nucleic(strand)
    return recipe.finish("An RNA double helix")


def _protein_rna(recipe: _Recipe) -> Entry:
    packing = recipe.packed()
    parts = _hairpin_parts(recipe)
    recipe.add_protein(packing)
    helix = np.concatenate([residue.pos for residue in parts.residues])
    pose = dock(recipe.rng, packing.atoms(), helix, trials=6)
    recipe.add_nucleic(pose.apply(list(parts.residues)), pairs=parts.pairs)
    recipe.builder.tags.add("multimer")
    return recipe.finish("A protein bound to an RNA hairpin")


def _glycoprotein(recipe: _Recipe) -> Entry:
    for attempt in range(12):
        packing = ChainPacking(recipe.member(attempt=attempt))
        letters, resolved = packing.letters, set(packing.resolved)
        sites = [
            i
            for i in sorted(resolved, key=lambda i: (packing.burial[i], i))
            if {i + 1, i + 2} <= resolved and "G" not in letters[i : i + 3 : 2] and letters[i + 1] != "P"
        ]
        for i in sites[:6]:
            letters[i], letters[i + 2] = "N", "T" if recipe.rng.random() < 0.6 else "S"
        # A residue without room becomes a smaller one: only sites whose sequon survived packing are used.
        packing.pack()
        done = _glycosylate(
            recipe, packing, [i for i in sites[:6] if letters[i] == "N" and letters[i + 2] in "ST"]
        )
        if done is not None:
            return done
    raise RuntimeError(f"entry {recipe.index}: no room for a glycan on any chain that was tried")


def _glycosylate(recipe: _Recipe, packing: ChainPacking, sites: list[int]) -> Entry | None:
    sizes = [int(recipe.rng.choice([2, 3, 5])), 1]
    glycans: list[tuple[int, list[Residue], list[BranchLink]]] = []
    for i in sites:
        grown = grow_glycan(recipe.rng, packing, i, sizes[len(glycans)])
        if grown is not None:
            glycans.append((i, *grown))
            packing.add_obstacles(np.concatenate([sugar.pos for sugar in grown[0]]))
        if len(glycans) == 2:
            break
    if not glycans or len(glycans[0][1]) < 2:
        return None
    recipe.add_alternates(packing)
    protein = recipe.add_protein(packing)
    for i, sugars, links in glycans:
        glycan = recipe.builder.add_glycan(sugars, links)
        recipe.builder.bond("covale", Atom(protein, i, "ND2"), Atom(glycan, 0, "C1"), "one")
        for link in links:
            recipe.builder.bond(
                "covale", Atom(glycan, link.parent, link.atom), Atom(glycan, link.child, "C1"), "both"
            )
    recipe.builder.tags |= {"glycan", "covalent-link"}
    recipe.add_surroundings(6)
    return recipe.finish("A glycoprotein")


def _disulfide(recipe: _Recipe) -> Entry:
    for attempt in range(24):
        packing = ChainPacking(recipe.member(attempt=attempt))
        site = find_disulfide(packing)
        if site is None:
            continue
        for i, code, pos, _ in site.members:
            packing.fix(i, code, pos)
        packing.pack()
        recipe.add_alternates(packing)
        protein = recipe.add_protein(packing)
        (i, *_), (j, *_) = site.members
        recipe.builder.bond("disulf", Atom(protein, i, "SG"), Atom(protein, j, "SG"))
        recipe.builder.tags.add("disulfide")
        recipe.add_surroundings(8)
        return recipe.finish("A protein with a disulfide bond")
    raise RuntimeError(f"entry {recipe.index}: no pair of residues can form a disulfide")


def _zinc(recipe: _Recipe) -> Entry:
    for attempt in range(24):
        packing = ChainPacking(recipe.member(attempt=attempt))
        site = find_zinc_site(packing)
        if site is None or site.metal is None:
            continue
        for i, code, pos, _ in site.members:
            packing.fix(i, code, pos)
        packing.add_obstacles(site.metal[None])
        packing.pack()
        recipe.add_alternates(packing)
        protein = recipe.add_protein(packing)
        ion = recipe.builder.add_ligand(Residue("ZN", ("ZN",), ("ZN",), site.metal[None]))
        for i, _, _, donor in site.members:
            recipe.builder.bond("metalc", Atom(protein, i, donor), Atom(ion, 0, "ZN"))
        around = sphere_around(recipe.rng, site.metal, recipe.builder.atoms(), 4 - len(site.members))
        shell = recipe.builder.add_waters(around)
        if shell is not None:
            for k in range(len(around)):
                recipe.builder.bond("metalc", Atom(ion, 0, "ZN"), Atom(shell, k, "O"))
        recipe.builder.tags |= {"ion", "metalc"}
        return recipe.finish("A protein with a zinc site")
    raise RuntimeError(f"entry {recipe.index}: no residues can hold a zinc ion together")


def _modified(recipe: _Recipe) -> Entry:
    packing = ChainPacking(recipe.member())
    packing.pack()
    exposed = [i for i in recipe.exposed(packing) if packing.letters[i] not in "GP"]
    wanted = ["PTR", "SEP", "TPO", "MSE", "MSE"]
    for i in [k for k in exposed if packing.placed[k].code == "MET"]:
        packing.place(i, "MSE")
    for i in exposed:
        if wanted and packing.letters[i] != "M" and packing.place(i, wanted[0]):
            wanted.pop(0)
    recipe.add_alternates(packing)
    recipe.add_protein(packing)
    recipe.add_surroundings(8)
    return recipe.finish("A protein with selenomethionine and phosphorylated residues")


def _ligand(recipe: _Recipe) -> Entry:
    recipe.add_protein(recipe.packed())
    code = str(recipe.rng.choice(_LIGANDS))
    recipe.add_docked(code, trials=40)
    recipe.add_surroundings(8)
    return recipe.finish(f"A protein with a bound ligand, {code}")


def _heme(recipe: _Recipe) -> Entry:
    for attempt in range(12):
        packing = ChainPacking(recipe.member(attempt=attempt))
        packing.pack()
        exposed = [i for i in recipe.exposed(packing) if packing.letters[i] not in "GP"]
        attached = attach_heme(recipe.rng, packing, exposed[:20])
        if attached is None:
            continue
        site, heme = attached
        packing.add_obstacles(heme.pos)
        recipe.add_alternates(packing)
        protein = recipe.add_protein(packing)
        ligand = recipe.builder.add_ligand(heme)
        recipe.builder.bond("metalc", Atom(protein, site, "NE2"), Atom(ligand, 0, "FE"))
        recipe.builder.tags |= {"ligand", "metalc"}
        recipe.add_surroundings(8)
        return recipe.finish("A haem protein")
    raise RuntimeError(f"entry {recipe.index}: no room for a haem on any chain that was tried")


_RECIPES: Final[dict[str, Callable[[_Recipe], Entry]]] = {
    "monomer": _monomer,
    "heterodimer": _heterodimer,
    "homodimer": _homodimer,
    "protein-dna": _protein_dna,
    "dna": _dna,
    "rna-hairpin": _rna_hairpin,
    "rna-duplex": _rna_duplex,
    "protein-rna": _protein_rna,
    "glycoprotein": _glycoprotein,
    "disulfide": _disulfide,
    "zinc": _zinc,
    "modified": _modified,
    "ligand": _ligand,
    "heme": _heme,
}


@lru_cache(maxsize=2 * BLOCK)
def make_entry(seed: int, index: int) -> Entry:
    """Entry ``index`` of the corpus of ``seed``; depends on nothing else."""
    recipe = _Recipe(seed, index)
    return _RECIPES[recipe.kind](recipe)


def earlier_relatives(seed: int, index: int, family_name: str) -> list[tuple[Entry, AlignedChain]]:
    """Chains of the same family in earlier entries of the block, the latest first."""
    start = index - index % BLOCK
    return [
        (entry, chain)
        for entry in (
            make_entry(seed, other) for other in reversed(range(start, index)) if SLOTS[other % BLOCK][1]
        )
        for chain in entry.aligned
        if chain.family == family_name
    ]
