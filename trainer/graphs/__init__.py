"""The network's blocks replayed as CUDA graphs: a short crop's step waits for the GPU and not for the host.

A block of the network launches some 150 kernels forward and backward. On crops of 384 tokens the GPU is done
with them sooner than a host can launch them. A CUDA graph is recorded once for each kind of block and each
shape, and then takes one launch.

Blocks that recompute (``activation_checkpointing``), and blocks without gradients, leave nothing behind
between passes, so all of a kind share one pair of graphs and its memory. The graphs belong to a copy of the
block, into which inputs and weights are copied before each replay. The forward graph has no gradients and
serves recycling passes as well; the backward graph computes the block anew and then its gradients, from the
random state that the forward pass began with, so that dropout draws the same masks. A block that keeps its
activations has graphs of its own, in whose memory they stay between its forward and its backward pass.

Results and gradients are copied out: nothing that a caller holds changes with a later replay. Draws are those
of the block called plainly, from PyTorch's own generator: seeds and resumed runs mean the same with graphs
and without them.

The network knows of it in one place: ``run_block`` asks :func:`replayed` first.
"""

from megafold.trainer.graphs.blocks import LARGEST_INPUT, BlockGraphs, replayed
from megafold.trainer.graphs.recorder import CudaRecorder, Recorder

__all__ = ["LARGEST_INPUT", "BlockGraphs", "CudaRecorder", "Recorder", "replayed"]
