"""What ``--clusters`` says."""

from pathlib import Path
from typing import Final

from megafold.pipeline.clusters.assign import Clustering, IdenticalSequences
from megafold.pipeline.clusters.file import ClusterFile
from megafold.pipeline.clusters.mmseqs import BINARY, Mmseqs
from megafold.pipeline.errors import InputError

AUTO: Final = "auto"
MMSEQS: Final = "mmseqs2"
NONE: Final = "none"


def choose_clustering(setting: str, threads: int = 1) -> tuple[Clustering, str]:
    """The clustering that a setting asks for, and a sentence for people where it is not the obvious one.

    ``auto``: MMseqs2 if its binary is on the PATH, else identical sequences; ``mmseqs2``: MMseqs2 or an
    error; ``none``: identical sequences; else the path of a file (``./none`` for one of such a name).
    ``threads`` is what MMseqs2 may use; it does not change the clusters.

    Raises:
        InputError: no binary, or a file that cannot be read.
    """
    if setting == NONE:
        return IdenticalSequences(), ""
    if setting not in (AUTO, MMSEQS):
        if not Path(setting).exists():
            raise InputError(
                f"--clusters {setting}: there is no such file, and it is none of {AUTO}, {MMSEQS}, {NONE}",
                reason="missing-file",
            )
        return ClusterFile.read(Path(setting)), ""
    found = Mmseqs.find(threads)
    if found is not None:
        return found, ""
    if setting == MMSEQS:
        raise InputError(
            f"--clusters {MMSEQS}: there is no `{BINARY}` on the PATH; install MMseqs2, give a file of "
            f"clusters, or `--clusters {NONE}` for clusters of identical sequences",
            reason="no-mmseqs2",
        )
    return IdenticalSequences(), (
        f"MMseqs2 (`{BINARY}`) is not on the PATH: proteins of one sequence are a cluster, not those of 40 % "
        "identity. Install it or give --clusters FILE; `--clusters none` leaves this out."
    )
