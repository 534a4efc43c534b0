"""Back end ``triton``: importing this registers the kernels."""

from megafold.trainer.kernels.evoattention import operator as operator

__all__ = ["operator"]
