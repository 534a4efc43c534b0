"""How commands take places: of a cache (a folder, or a URL where reading is enough), of what they write."""

from collections.abc import Iterator
from contextlib import contextmanager
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


class OutputFile(click.Path):
    """A file to write: it is refused before the work begins where it could not be written after it."""

    def __init__(self, suffix: str) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)
        self._suffix = suffix

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A path that ends with the suffix, in a folder that is there."""
        path: Any = super().convert(value, param, ctx)  # a Path, as asked for above
        if path.suffix.lower() != self._suffix:
            self.fail(f"{path}: give a name that ends with {self._suffix}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {path.parent}; make it first", param, ctx)
        return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name ``path`` in errors of a file system that name no file: a disk that is full says no more."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
