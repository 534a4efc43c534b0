"""Train Boltz-1 (package boltz), at small sizes: ``python examples/adapter_boltz.py CACHE``."""

from functools import partial
from types import SimpleNamespace

from boltz.model.models.boltz1 import Boltz1
from one_sample import arguments, draw, seed, train
from torch.utils.data import default_convert

from megafold.pipeline.stream.adapters.boltz import to_boltz, to_boltz_batch

args = arguments()
sample = draw(args)
adapted = to_boltz(sample.features, paired_rows=sample.meta["paired_rows"], symmetry=sample.symmetry)
batch = default_convert(to_boltz_batch([adapted]))

seed(0)
atom_encoder = {"atom_encoder_depth": 1, "atom_encoder_heads": 2}
pairformer = {"num_blocks": 1, "num_heads": 2, "dropout": 0.0}
model = Boltz1(
    atom_s=16,
    atom_z=8,
    token_s=32,
    token_z=16,
    num_bins=64,
    atom_feature_dim=3 + 1 + 1 + 128 + 4 * 64,
    training_args=SimpleNamespace(
        recycling_steps=0,
        sampling_steps=2,
        diffusion_samples=1,
        diffusion_multiplicity=2,
        symmetry_correction=True,
        confidence_loss_weight=3e-3,
        diffusion_loss_weight=4.0,
        distogram_loss_weight=3e-2,
    ),
    validation_args={},
    embedder_args=atom_encoder,
    msa_args={"msa_s": 16, "msa_blocks": 1, "msa_dropout": 0.0, "z_dropout": 0.0, "use_paired_feature": True},
    pairformer_args=pairformer,
    score_model_args=atom_encoder
    | {"sigma_data": 16, "dim_fourier": 32, "token_transformer_depth": 1, "token_transformer_heads": 2}
    | {"atom_decoder_depth": 1, "atom_decoder_heads": 2, "conditioning_transition_layers": 1},
    diffusion_process_args={"sigma_data": 16.0},
    diffusion_loss_args={},
    confidence_model_args={"pairformer_args": pairformer, "confidence_args": {}},
    confidence_prediction=True,
    alpha_pae=1.0,
)
model.train()
model.log = model.training_log = lambda *_, **__: None  # there is no Lightning trainer to log to
model.forward = partial(model.forward, max_parallel_samples=1)  # its training step forgets it
train(model, lambda: model.training_step(dict(batch), 0), args.steps, rate=3e-3)
