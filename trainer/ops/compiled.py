"""Back end ``compile``: every operator's reference through ``torch.compile`` (Inductor)."""

import torch

from megafold.trainer.ops.registry import operators, register

# One operator meets many shapes (single, pair, MSA, atoms; each width, training or not), and each is
# compiled once. Dynamo's default of 8 would silently leave the rest uncompiled.
torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)

for _name, _operator in operators().items():
    register(_name, "compile")(torch.compile(_operator.naive, dynamic=False))
