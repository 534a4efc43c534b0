"""``python -m megafold``."""

from megafold.cli import main

main()
