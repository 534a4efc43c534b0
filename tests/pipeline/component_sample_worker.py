"""Makes references in spawned processes: a crash of RDKit breaks the pool, not the test run."""

from megafold.pipeline.chemistry import ComponentDictionary, load_dictionary
from megafold.pipeline.chemistry.conformers import build_reference
from megafold.pipeline.chemistry.reference import ReferenceComponent

#: Of the largest: RDKit needs half a minute for it.
SLOW = frozenset({"WJW"})

_dictionary: ComponentDictionary | None = None


def open_dictionary() -> None:
    """The bundled one, once for each process."""
    global _dictionary
    _dictionary = load_dictionary()


def reference(code: str) -> ReferenceComponent:
    """The reference of a code of the bundled dictionary."""
    assert _dictionary is not None
    component = _dictionary.get(code)
    assert component is not None
    return build_reference(component, skip_embedding="timeout" if code in SLOW else "")
