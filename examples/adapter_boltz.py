"""Train Boltz-1 (package boltz) on a cache: ``python examples/adapter_boltz.py CACHE``.

Small sizes, one sample and one noise again and again, so that the loss shows whether the model learns.
"""

import argparse

import torch
from boltz.model.loss.distogram import distogram_loss
from boltz.model.models.boltz1 import Boltz1
from torch.utils.data import default_convert

from megafold.pipeline.stream import CropConfig, MsaConfig, Stream, StreamConfig
from megafold.pipeline.stream.adapters.boltz import to_boltz, to_boltz_batch

parser = argparse.ArgumentParser()
parser.add_argument("cache")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--index", type=int, default=0)
args = parser.parse_args()

stream = Stream(args.cache, StreamConfig(crop=CropConfig(tokens=48), msa=MsaConfig(rows=16)))
sample = stream.sample(args.index)
print(sample.meta["entry"], len(sample.features["restype"]), "tokens")
adapted = to_boltz(sample.features, paired_rows=sample.meta["paired_rows"])
batch = default_convert(to_boltz_batch([adapted]))

torch.manual_seed(0)
atom_encoder = {"atom_encoder_depth": 1, "atom_encoder_heads": 2}
model = Boltz1(
    atom_s=16,
    atom_z=8,
    token_s=32,
    token_z=16,
    num_bins=64,
    atom_feature_dim=3 + 1 + 1 + 128 + 4 * 64,
    training_args={},
    validation_args={},
    embedder_args=atom_encoder,
    msa_args={"msa_s": 16, "msa_blocks": 1, "msa_dropout": 0.0, "z_dropout": 0.0, "use_paired_feature": True},
    pairformer_args={"num_blocks": 1, "num_heads": 2, "dropout": 0.0},
    score_model_args=atom_encoder
    | {"sigma_data": 16, "dim_fourier": 32, "token_transformer_depth": 1, "token_transformer_heads": 2}
    | {"atom_decoder_depth": 1, "atom_decoder_heads": 2, "conditioning_transition_layers": 1},
    diffusion_process_args={"sigma_data": 16.0},
    diffusion_loss_args={},
    confidence_model_args={},
)
model.train()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(args.steps):
    torch.manual_seed(1)
    feats = dict(batch)  # the model replaces its coordinates
    out = model(feats, recycling_steps=0, multiplicity_diffusion_train=2)
    diffusion = model.structure_module.compute_loss(feats, out, multiplicity=2)["loss"]
    loss = 4.0 * diffusion + 0.03 * distogram_loss(out, feats)[0]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}", flush=True)
