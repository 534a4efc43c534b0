"""mmCIF files to ``structure`` objects: parsing, assemblies, tokens, bonds, filters (AF3 SI 2.1, 2.5, 2.6).

``featurize_structure`` is the whole stage. Its modules, in the order data passes them: ``cif`` (columns of
the file), ``parse`` with ``atom_sites`` and ``definitions`` (a :class:`~.entry.ParsedEntry`), ``components``
(which definition a code stands for), ``residues`` with ``altloc``, ``chains``, ``layout`` (all atoms of the
definitions), ``connections`` (bonds), ``leaving`` (atoms that bonds cost), ``tokens``, ``unit`` (the
deposited chains as tables), ``assembly``, ``filters``, ``expand`` and ``featurize`` (the tables of the
assembly).
"""

from megafold.pipeline.structure.featurize import STRUCTURE_VERSION, StructureResult, featurize_structure
from megafold.pipeline.structure.options import StructureOptions

__all__ = ["STRUCTURE_VERSION", "StructureOptions", "StructureResult", "featurize_structure"]
