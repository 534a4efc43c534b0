"""The command line: ``megafold``."""

from megafold.cli.main import main

__all__ = ["main"]
