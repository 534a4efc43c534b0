"""Compiles a kernel for GPUs that are not there, as a launch would specialise it."""

from collections.abc import Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile

TARGETS = {
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx90a": GPUTarget("hip", "gfx90a", 64),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Bytes of shared memory that a program may have.
SHARED_MEMORY = {"cuda:90": 232448, "hip:gfx90a": 65536, "hip:gfx942": 65536}


def compile_for(
    target: str, function: Any, pointers: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> CompiledKernel:
    """``pointers``: types of the pointer arguments; arguments in neither mapping are integers of 64 bits.

    A constant None makes a float; strides along channels are 1 and pointers are aligned, as in the model.
    """
    signature, fixed, aligned = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants and constants[name] is None:
            signature[name] = "fp32"
        elif name in constants or name.endswith("_d"):
            signature[name] = "constexpr"
            fixed[(index,)] = constants.get(name, 1)
        elif name in pointers:
            signature[name] = pointers[name]
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i64"
    source = ASTSource(function, signature=signature, constexprs=fixed, attrs=aligned)
    return compile(source, target=TARGETS[target], options=options)
