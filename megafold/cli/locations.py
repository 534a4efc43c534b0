"""How commands take the place of a cache: a folder, or a URL where reading is enough."""

from pathlib import Path
from typing import Any

import click


class CacheLocation(click.ParamType):
    """A cache's folder (as a path) or URL (as text: a path would lose one of its slashes)."""

    name = "cache"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """A URL as it is, anything else as a path."""
        return value if isinstance(value, str) and "://" in value else Path(value)


class CacheFolder(click.Path):
    """A cache's folder, for commands that write or lock it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A path; a URL is refused."""
        if isinstance(value, str) and "://" in value:
            self.fail(f"{value} is a URL: name a folder, then copy it there with `megafold cache push`")
        return super().convert(value, param, ctx)
