"""Chemical components: definitions, reference conformers and the library the stream reads.

Importing this package imports neither RDKit nor biotite: conformers live in
:mod:`megafold.pipeline.chemistry.conformers`, which imports RDKit, and are asked for by their own name.
"""

from megafold.pipeline.chemistry.component import Component
from megafold.pipeline.chemistry.dictionary import ComponentDictionary, load_dictionary

__all__ = ["Component", "ComponentDictionary", "load_dictionary"]
