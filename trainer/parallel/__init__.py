"""EvoSP-3D: the pair representation sharded over GPUs, with data parallelism over it.

Sharded versions of the network's operators live here, beside the model: each takes the serial module and
its parameters, so that state dicts, checkpoints and the optimizer know nothing of it.
"""
