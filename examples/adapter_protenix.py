"""Train Protenix (package protenix) on a cache: ``python examples/adapter_protenix.py CACHE``.

Small sizes, one sample and one noise again and again, so that the loss shows whether the model learns.
"""

import argparse
import os

os.environ.setdefault("LAYERNORM_TYPE", "torch")  # its fused layer norm needs a CUDA compiler

import torch
from configs.configs_base import configs as base_configs
from protenix.config.config import parse_configs
from protenix.model.loss import ProtenixLoss
from protenix.model.protenix import Protenix
from protenix.utils.permutation.permutation import SymmetricPermutation
from torch.utils.data import default_convert

from megafold.pipeline.stream import CropConfig, MsaConfig, Stream, StreamConfig
from megafold.pipeline.stream.adapters.protenix import to_protenix

parser = argparse.ArgumentParser()
parser.add_argument("cache")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--index", type=int, default=0)
args = parser.parse_args()

stream = Stream(args.cache, StreamConfig(crop=CropConfig(tokens=48), msa=MsaConfig(rows=16)))
sample = stream.sample(args.index)
print(sample.meta["entry"], len(sample.features["restype"]), "tokens")
inputs, labels = default_convert(to_protenix(sample.features))

SIZES = """--c_s 64 --c_z 32 --c_token 64 --c_s_inputs 129 --model.diffusion_module.c_token 64
    --n_blocks 1 --model.msa_module.n_blocks 1 --model.template_embedder.n_blocks 1
    --model.confidence_head.n_blocks 1 --model.diffusion_module.atom_encoder.n_blocks 1
    --model.diffusion_module.transformer.n_blocks 1 --model.diffusion_module.atom_decoder.n_blocks 1
    --diffusion_batch_size 2 --model.N_cycle 1 --sample_diffusion.N_step_mini_rollout 2
    --triangle_multiplicative torch --triangle_attention torch --dtype fp32"""
both = {"train": 16, "test": 16}
msa = {"msa": {"enable": True, "strategy": "random", "sample_cutoff": both, "min_size": both}}
configs = parse_configs({**base_configs, "data": msa}, SIZES, fill_required_with_null=True)
torch.manual_seed(0)
model = Protenix(configs).train()
loss_of = ProtenixLoss(configs)
symmetry = SymmetricPermutation(configs, error_dir=None)
full_labels = {name: inputs[name] for name in ("mol_id", "mol_atom_index", "entity_mol_id")} | labels
# No exchange of equivalent atoms: each stays at its place in its residue.
first = torch.searchsorted(inputs["ref_space_uid"], inputs["ref_space_uid"])
inputs["atom_perm_list"] = [[place] for place in (torch.arange(len(first)) - first).tolist()]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(args.steps):
    torch.manual_seed(1)
    predicted, matched, _ = model(
        dict(inputs), dict(full_labels), dict(labels), "train", 0, symmetric_permutation=symmetry
    )
    loss, _ = loss_of(inputs, predicted, matched)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
