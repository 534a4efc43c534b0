"""Back end ``triton``: importing this registers the kernels."""

from megafold.trainer.kernels.adaln import operator as adaln_operator
from megafold.trainer.kernels.dropout_add import operator as dropout_add_operator
from megafold.trainer.kernels.evoattention import operator as evoattention_operator
from megafold.trainer.kernels.gated_output import operator as gated_output_operator
from megafold.trainer.kernels.layernorm import operator as layernorm_operator
from megafold.trainer.kernels.layernorm_linear import operator as layernorm_linear_operator
from megafold.trainer.kernels.single_attention import operator as single_attention_operator
from megafold.trainer.kernels.smooth_lddt import operator as smooth_lddt_operator
from megafold.trainer.kernels.transition import operator as transition_operator
from megafold.trainer.kernels.triangle_attention import operator as triangle_attention_operator
from megafold.trainer.kernels.triangle_multiplication import operator as triangle_multiplication_operator

__all__ = [
    "adaln_operator",
    "dropout_add_operator",
    "evoattention_operator",
    "gated_output_operator",
    "layernorm_linear_operator",
    "layernorm_operator",
    "single_attention_operator",
    "smooth_lddt_operator",
    "transition_operator",
    "triangle_attention_operator",
    "triangle_multiplication_operator",
]
