"""Writes ``docs/features.md`` from the schema: ``python -m megafold.pipeline.schema_docs FILE``."""

import sys
from collections.abc import Iterator
from pathlib import Path

from megafold.pipeline import schema


def render() -> str:
    """The page, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Features"
    yield ""
    yield "Generated from `pipeline/schema.py` by `make docs`; do not edit. Missing coordinates are NaN with"
    yield "a mask, never zeros. Masks are boolean, True means present. Sources are sections of the supplement"
    yield "of AlphaFold 3 (Abramson et al. 2024), written AF3 SI."
    yield ""
    yield f"`restype` classes: {' '.join(f'{index}={code}' for index, code in enumerate(schema.RESTYPES))}"
    for spec in schema.OBJECTS.values():
        yield from _object(spec)
    yield ""
    yield "## Samples"
    yield ""
    yield "What the stream hands over for one crop; a batch adds a leading axis. Padding holds 0 or False."
    yield ""
    yield "| group | feature | dtype | axes | unit | what | source |"
    yield "|---|---|---|---|---|---|---|"
    for feature in schema.SAMPLE:
        cells = (_axes(feature.axes), feature.unit, _cell(feature.doc), feature.source)
        yield f"| {feature.group} | `{feature.name}` | {feature.dtype} | " + " | ".join(cells) + " |"


def _object(spec: schema.ObjectSpec) -> Iterator[str]:
    yield ""
    yield f"## `{spec.kind}` object"
    yield ""
    yield spec.doc
    yield ""
    yield "| attribute | what |"
    yield "|---|---|"
    for name, doc in spec.attributes.items():
        yield f"| `{name}` | {_cell(doc)} |"
    yield ""
    yield "| array | dtype | axes | unit | what | source |"
    yield "|---|---|---|---|---|---|"
    for array in spec.arrays:
        cells = (_axes(array.axes), array.unit, _cell(array.doc), array.source)
        yield f"| `{array.name}` | {array.dtype} | " + " | ".join(cells) + " |"
    for array in spec.arrays:
        if isinstance(array, schema.Table):
            yield ""
            yield f"Columns of `{array.name}`:"
            yield ""
            yield from (f"- `{column.name}`: {column.doc}" for column in array.columns)


def _axes(axes: tuple[str, ...]) -> str:
    return "[" + ", ".join(axes) + "]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
