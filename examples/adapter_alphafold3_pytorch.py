"""Train alphafold3-pytorch, at small sizes: ``python examples/adapter_alphafold3_pytorch.py CACHE``."""

from alphafold3_pytorch import Alphafold3
from one_sample import arguments, draw, seed, train
from torch.utils.data import default_convert

from megafold.pipeline.stream.adapters.alphafold3_pytorch import (
    ATOM_INPUTS,
    TEMPLATE_FEATURES,
    to_alphafold3_pytorch,
    to_alphafold3_pytorch_batch,
)

args = arguments()
sample = draw(args)
adapted = to_alphafold3_pytorch(sample.features, resolution=sample.meta["resolution"])
batch = default_convert(to_alphafold3_pytorch_batch([adapted]))

seed(0)
model = Alphafold3(
    dim_atom_inputs=ATOM_INPUTS,
    dim_template_feats=TEMPLATE_FEATURES,
    dim_atom=16,
    dim_atompair=8,
    dim_input_embedder_token=32,
    dim_single=32,
    dim_pairwise=16,
    dim_token=32,
    dim_template_model=16,
    diffusion_num_augmentations=2,
    num_rollout_steps=2,
    input_embedder_kwargs={"atom_transformer_blocks": 1, "atom_transformer_heads": 2},
    confidence_head_kwargs={"pairformer_depth": 1},
    template_embedder_kwargs={"pairformer_stack_depth": 1},
    msa_module_kwargs={"depth": 1, "dim_msa": 16},
    pairformer_stack={"depth": 1, "pair_bias_attn_dim_head": 8, "pair_bias_attn_heads": 2},
    diffusion_module_kwargs={
        "atom_encoder_depth": 1,
        "atom_encoder_heads": 2,
        "token_transformer_depth": 1,
        "token_transformer_heads": 2,
        "atom_decoder_depth": 1,
        "atom_decoder_heads": 2,
    },
)


def loss():
    return model(**batch, num_recycling_steps=1, diffusion_add_smooth_lddt_loss=True)


train(model, loss, args.steps, rate=3e-3)
