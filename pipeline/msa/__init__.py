"""Alignments of a chain: parsers, the ``msa`` object, and pairing across the chains of an entry."""

from megafold.pipeline.msa.featurize import VERSION, MsaResult, featurize_msa
from megafold.pipeline.msa.pairing import PAIRING_VERSION, MsaRows, pair_msas

__all__ = ["PAIRING_VERSION", "VERSION", "MsaResult", "MsaRows", "featurize_msa", "pair_msas"]
