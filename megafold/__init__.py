"""MegaFold: structures, alignments and templates in, training samples out.

The package is composed of three parts that know as little of each other as possible:

- ``megafold.cache_store``: content-addressed Zarr objects, manifests, refs (no biology),
- ``megafold.pipeline``: the deterministic featurizer, the build and the sample stream,
- ``megafold.trainer``: an AlphaFold3-style training model with interchangeable back ends.

Importing ``megafold`` imports none of them, and never torch: Dask workers would pay for it.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("megafold")
except PackageNotFoundError:  # running from a checkout without an install
    __version__ = "0.1.0"

__all__ = ["__version__"]
