"""Samples as other trainers' own features and labels. NumPy only; docs/adapters.md says what maps to what.

One module for each trainer. Each takes the features of one sample (``Sample.features``) and returns arrays
under that trainer's names; ``torch.utils.data.default_convert`` makes tensors of them.
"""

from megafold.pipeline.stream.adapters.alphafold3_pytorch import (
    to_alphafold3_pytorch,
    to_alphafold3_pytorch_batch,
)
from megafold.pipeline.stream.adapters.boltz import to_boltz, to_boltz_batch
from megafold.pipeline.stream.adapters.openfold3 import to_openfold3, to_openfold3_batch
from megafold.pipeline.stream.adapters.protenix import to_protenix

__all__ = [
    "to_alphafold3_pytorch",
    "to_alphafold3_pytorch_batch",
    "to_boltz",
    "to_boltz_batch",
    "to_openfold3",
    "to_openfold3_batch",
    "to_protenix",
]
