"""Train Protenix (package protenix), at small sizes: ``python examples/adapter_protenix.py CACHE``."""

import os

os.environ.setdefault("LAYERNORM_TYPE", "torch")  # its fused layer norm needs a CUDA compiler

from configs.configs_base import configs as base_configs
from one_sample import arguments, draw, seed, train
from protenix.config.config import parse_configs
from protenix.model.loss import ProtenixLoss
from protenix.model.protenix import Protenix
from protenix.utils.permutation.permutation import SymmetricPermutation
from torch.utils.data import default_convert

from megafold.pipeline.stream.adapters.protenix import to_protenix

args = arguments()
sample = draw(args)
adapted = to_protenix(
    sample.features,
    resolution=sample.meta["resolution"],
    symmetry=sample.symmetry,
    crop_method=sample.meta["crop_method"],
)
inputs, full_labels, labels = default_convert(adapted)

SIZES = """--c_s 64 --c_z 32 --c_token 64 --c_s_inputs 129 --model.diffusion_module.c_token 64
    --n_blocks 1 --model.msa_module.n_blocks 1 --model.template_embedder.n_blocks 1
    --model.confidence_head.n_blocks 1 --model.diffusion_module.atom_encoder.n_blocks 1
    --model.diffusion_module.transformer.n_blocks 1 --model.diffusion_module.atom_decoder.n_blocks 1
    --diffusion_batch_size 2 --model.N_cycle 1 --sample_diffusion.N_step_mini_rollout 2
    --triangle_multiplicative torch --triangle_attention torch --dtype fp32"""
both = {"train": 16, "test": 16}
msa = {"msa": {"enable": True, "strategy": "random", "sample_cutoff": both, "min_size": both}}
configs = parse_configs({**base_configs, "data": msa}, SIZES, fill_required_with_null=True)
seed(0)
model = Protenix(configs).train()
loss_of = ProtenixLoss(configs)
exchanges = SymmetricPermutation(configs, error_dir=None)


def loss():
    predicted, matched, _ = model(
        dict(inputs), dict(full_labels), dict(labels), "train", 0, symmetric_permutation=exchanges
    )
    return loss_of(inputs, predicted, matched)[0]


train(model, loss, args.steps, rate=1e-3)
