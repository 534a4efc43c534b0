"""A Dask preload: in this worker, featurizing the entry ``$MEGAFOLD_TEST_KILLER`` aborts the process."""

import os

from megafold.pipeline.builder import tasks


def dask_setup(worker):
    featurize = tasks.featurize_structure

    def deadly(path, entry, *rest):
        if entry == os.environ["MEGAFOLD_TEST_KILLER"]:
            os.abort()
        return featurize(path, entry, *rest)

    tasks.featurize_structure = deadly
