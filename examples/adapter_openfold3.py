"""Train OpenFold3 (package openfold3) on a cache: ``python examples/adapter_openfold3.py CACHE``.

Small sizes, one sample and one noise again and again, so that the loss shows whether the model learns.
"""

import argparse
import copy
import random

import torch
from openfold3.core.loss.loss_module import OpenFold3Loss
from openfold3.projects.of3_all_atom.model import OpenFold3
from openfold3.projects.of3_all_atom.project_entry import OF3ProjectEntry
from torch.utils.data import default_convert

from megafold.pipeline.stream import CropConfig, MsaConfig, Stream, StreamConfig
from megafold.pipeline.stream.adapters.openfold3 import to_openfold3, to_openfold3_batch

parser = argparse.ArgumentParser()
parser.add_argument("cache")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--index", type=int, default=0)
args = parser.parse_args()

stream = Stream(args.cache, StreamConfig(crop=CropConfig(tokens=48), msa=MsaConfig(rows=16)))
sample = stream.sample(args.index)
print(sample.meta["entry"], len(sample.features["restype"]), "tokens")
adapted = to_openfold3(sample.features, paired_rows=sample.meta["paired_rows"])
batch = default_convert(to_openfold3_batch([adapted]))

torch.manual_seed(0)
config = OF3ProjectEntry().get_model_config_with_presets()
sizes = config.architecture
sizes.pairformer.no_blocks = 1
sizes.msa.msa_module.no_blocks = 1
sizes.template.template_pair_stack.no_blocks = 1
sizes.diffusion_module.diffusion_transformer.no_blocks = 1
sizes.shared.diffusion.no_samples = 2
sizes.shared.diffusion.no_mini_rollout_steps = 2
sizes.shared.num_recycles = 0
sizes.heads.pairformer_embedding.pairformer.no_blocks = 1
model = OpenFold3(config)
loss_of = OpenFold3Loss(config=sizes.loss_module)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(args.steps):
    torch.manual_seed(1)
    random.seed(1)
    expanded, output = model(copy.deepcopy(batch))
    loss = loss_of(expanded, output)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
