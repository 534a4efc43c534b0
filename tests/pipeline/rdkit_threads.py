"""Another thread count for RDKit's embedding, here or (as a Dask preload) in the workers of a build."""

import os
from typing import Any, Final

from megafold.pipeline.chemistry import conformers

VARIABLE: Final = "MEGAFOLD_TEST_RDKIT_THREADS"


def set_rdkit_threads(count: int) -> None:
    """Let every embedding in this process use ``count`` threads; 0 is all cores."""
    module: Any = conformers
    real = module.rdDistGeom

    class Threaded:
        """RDKit's module, whose embedding has the thread count set at the last moment."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        @staticmethod
        def EmbedMolecule(mol: Any, params: Any) -> int:
            params.numThreads = count
            return int(real.EmbedMolecule(mol, params))

    module.rdDistGeom = Threaded()


def dask_setup(worker: Any) -> None:
    """Called by Dask in each worker."""
    set_rdkit_threads(int(os.environ[VARIABLE]))
