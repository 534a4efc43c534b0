"""From arrays to a storable object: the only way the featurizer makes one."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from megafold.cache_store import Content
from megafold.pipeline import schema


def make_content(kind: str, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> Content:
    """Check an object against the schema and lay out its chunks.

    Raises:
        megafold.pipeline.schema.SchemaError: the object does not fit.
    """
    schema.validate(kind, arrays, attributes)
    return Content(arrays=arrays, attributes=attributes, chunks=schema.chunks(kind, arrays))
