"""Writing mmCIF text: quoting, items and loops (the CIF 1.1 syntax)."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

_RESERVED: Final = re.compile(r"(?i:data_|save_|loop_$|stop_$|global_$)|[_#$'\"\[\];]|[.?]$")


def quoted(value: str) -> str:
    """A value as CIF wants it: plain, in quotes, or as a text field between semicolons.

    An empty value becomes ``.``, which says that there is none. CIF 1.1 knows ASCII alone; other characters
    are written as ``\\u03b1``.
    """
    value = value.encode("ascii", "backslashreplace").decode("ascii")
    if not value:
        return "."
    if not _RESERVED.match(value) and not re.search(r"[\s'\"]", value):
        return value
    if "\n" not in value:
        # A quote ends a quoted value only where white space follows it.
        for quote in ("'", '"') if "'" not in value else ('"', "'"):
            if not re.search(rf"{quote}\s|{quote}$", value):
                return f"{quote}{value}{quote}"
    return f"\n;{value.replace(chr(10) + ';', chr(10) + ' ;')}\n;\n"


def item(name: str, value: str) -> str:
    """One data item, as ``_entry.id 1abc``."""
    return f"{name} {quoted(value)}\n"


def loop(category: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A category with rows; nothing where there are none."""
    lines = [" ".join(quoted(value) for value in row) for row in rows]
    if not lines:
        return ""
    names = [f"_{category}.{column}" for column in columns]
    return "\n".join(["#", "loop_", *names, *lines]) + "\n"
