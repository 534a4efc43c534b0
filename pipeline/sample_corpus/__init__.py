"""A synthetic, chemically real corpus, so that everything can be tried without downloading one.

:func:`write_sample_corpus` writes it. From the bottom up:

- ``geometry``: atoms from internal coordinates, frames, rigid contact;
- ``monomers``: building blocks from the component dictionary, side-chain rotamers;
- ``backbone``, ``family``, ``evolution``: folds, families that share one, sequences that diverge;
- ``packing``, ``sites``: side chains, disulfides and metal sites;
- ``nucleic``, ``placement``: double helices; docking, glycans, haem, ions and waters;
- ``model``, ``assembling``, ``recipes``: what an entry is, and one recipe for each kind of entry;
- ``mmcif``, ``alignments``, ``write``: the files.
"""

from megafold.pipeline.sample_corpus.write import SampleCorpus, write_sample_corpus

__all__ = ["SampleCorpus", "write_sample_corpus"]
