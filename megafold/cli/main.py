"""``megafold``: the group of commands, and how errors are told."""

import errno
import os
import sys
from typing import Any, Final

import click

import megafold

#: What a file system says of files and disks that users name: errors of theirs, not ours.
_OF_FILES: Final = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
    }
)
_OF_DISKS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_COMMANDS = {
    "cache": "megafold.cli.cache",
    "sample": "megafold.cli.sample",
    "sample-corpus": "megafold.cli.sample_corpus",
    "simulate": "megafold.cli.simulate",
    "stream": "megafold.cli.stream",
    "train": "megafold.cli.train",
    "tune": "megafold.cli.tune",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used: ``megafold --help`` imports no library."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the table."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the module of a command and take its ``command``."""
        if name not in _COMMANDS:
            return None
        from importlib import import_module

        command: click.Command = import_module(_COMMANDS[name]).command
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(megafold.__version__, prog_name="megafold")
def group() -> None:
    """Structures, alignments and templates in, training samples out."""


def main() -> Any:
    """Run the command line. A user's mistake is a message and exit status 2, never a traceback."""
    try:
        return group.main(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    except BrokenPipeError:  # `megafold cache ls … | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not is_told(error):
            raise
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)


def is_told(error: Exception) -> bool:
    """True: an error whose message is meant for the user."""
    from megafold.cache_store import CacheError
    from megafold.pipeline.errors import MegafoldError

    if isinstance(error, CacheError | MegafoldError):
        return True
    if isinstance(error, OSError):
        return error.errno in _OF_DISKS or (error.errno in _OF_FILES and error.filename is not None)
    # Asked of the module only if it is loaded: it is torch's side, which most commands never import.
    trainer = sys.modules.get("megafold.trainer.errors")
    return trainer is not None and isinstance(error, trainer.TrainerError)
