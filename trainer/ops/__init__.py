"""The operator boundary: one function per hot operator, each dispatching to a back end.

The body of every operator is its plain PyTorch reference (back end ``eager``). ``compile`` runs the
same bodies through Inductor, ``triton`` takes the kernels that ``megafold.trainer.kernels`` registers;
an operator without a kernel, or whose kernel does not take the given tensors, falls back to ``eager``,
and :func:`backend_report` says so. Parameters belong to the model: operators are functions of tensors.
"""

from megafold.trainer.ops.attention import evoattention
from megafold.trainer.ops.gated_output import dropout_add, gated_output
from megafold.trainer.ops.normalization import adaln, layernorm, layernorm_linear
from megafold.trainer.ops.registry import active_backend, backend_report, register, use_backend
from megafold.trainer.ops.single import SingleAttentionWeights, single_attention
from megafold.trainer.ops.smooth_lddt import smooth_lddt
from megafold.trainer.ops.transition import swiglu, transition
from megafold.trainer.ops.triangle import (
    TriangleAttentionWeights,
    TriangleMultiplicationWeights,
    triangle_attention,
    triangle_multiplication,
)

__all__ = [
    "SingleAttentionWeights",
    "TriangleAttentionWeights",
    "TriangleMultiplicationWeights",
    "active_backend",
    "adaln",
    "backend_report",
    "dropout_add",
    "evoattention",
    "gated_output",
    "layernorm",
    "layernorm_linear",
    "register",
    "single_attention",
    "smooth_lddt",
    "swiglu",
    "transition",
    "triangle_attention",
    "triangle_multiplication",
    "use_backend",
]
