"""Clusters that MMseqs2 makes: 40 % identity over 80 % of both sequences.

AF3 SI 2.5.3 says 40 %, and not over how much; 80 % of both is what MMseqs2 does if it is not told otherwise,
and keeps one shared domain from joining all proteins that have it. The sequences are given in the order of
their digests, so that the clusters are a function of the set of sequences and the version of MMseqs2: the
number of threads does not change them.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from megafold.pipeline.clusters.assign import DIGEST_DIGITS, Proteins
from megafold.pipeline.errors import InputError

BINARY: Final = "mmseqs"
OPTIONS: Final = ("--min-seq-id", "0.4", "-c", "0.8", "--cov-mode", "0")
_VERSION_LIMIT_S: Final = 60.0
_LAST_WORDS: Final = 3


@dataclass(frozen=True)
class Mmseqs:
    """The binary, what it says its version is, and the threads it may use."""

    binary: str
    version: str
    threads: int = 1
    by_sequence_alone: ClassVar[bool] = True

    @classmethod
    def find(cls, threads: int = 1) -> "Mmseqs | None":
        """The binary on the PATH, None where there is none.

        Raises:
            InputError: there is one that cannot say its version.
        """
        binary = shutil.which(BINARY)
        if binary is None:
            return None
        version = _run([binary, "version"], timeout_s=_VERSION_LIMIT_S).strip()
        if not version or "\n" in version:
            raise _failure(f"{binary} version", f"it says {version[:200]!r}")
        return cls(binary, version, threads)

    @property
    def identity(self) -> dict[str, Any]:
        """See :class:`~megafold.pipeline.clusters.assign.Clustering`."""
        return {"method": "mmseqs2", "version": self.version, "options": list(OPTIONS)}

    def clusters(self, proteins: Proteins) -> tuple[Mapping[str, str], dict[str, int]]:
        """See :class:`~megafold.pipeline.clusters.assign.Clustering`; representatives name clusters."""
        sequences = proteins.sequences()
        return (self.cluster(sequences) if sequences else {}), {}

    def cluster(self, sequences: Mapping[str, str]) -> dict[str, str]:
        """Representative's digest, 16 digits, by sequence digest.

        Raises:
            InputError: the binary fails, or writes what cannot be understood.
        """
        with tempfile.TemporaryDirectory(prefix="megafold-mmseqs2-") as scratch:
            folder = Path(scratch)
            fasta, prefix = folder / "proteins.fasta", folder / "proteins"
            with fasta.open("w") as file:
                for digest in sorted(sequences):
                    file.write(f">{digest}\n{sequences[digest]}\n")
            command = [self.binary, "easy-cluster", str(fasta), str(prefix), str(folder / "work")]
            _run([*command, *OPTIONS, "--threads", str(self.threads)])
            try:
                text = Path(f"{prefix}_cluster.tsv").read_text()
            except OSError as error:
                raise _failure(f"{self.binary} easy-cluster", f"it wrote no clusters ({error})") from error
        return self._parsed(text, sequences)

    def _parsed(self, text: str, sequences: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            names = line.split("\t")
            if len(names) != 2 or not sequences.keys() >= set(names):
                raise _failure(
                    f"{self.binary} easy-cluster", f"line {number} of its clusters is {line[:200]!r}"
                )
            representative, member = names
            found[member] = representative[:DIGEST_DIGITS]
        return found


def _run(command: list[str], timeout_s: float | None = None) -> str:
    """What a command writes.

    Raises:
        InputError: it cannot be run, or says that it failed; with its last words.
    """
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failure(" ".join(command[:2]), str(error)) from error
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        words = " / ".join(line.strip() for line in text.splitlines()[-_LAST_WORDS:] if line.strip())
        raise _failure(" ".join(command[:2]), f"exit status {done.returncode}: {words}")
    return text


def _failure(command: str, what: str) -> InputError:
    return InputError(
        f"{command}: {what}; mend the installation of MMseqs2, or give `--clusters FILE` or `none` "
        "(finished work is kept: the same command goes on from here)",
        reason="mmseqs2-failed",
    )
