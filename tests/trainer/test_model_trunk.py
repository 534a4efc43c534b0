"""The trunk's order of things: algorithm 1, lines 2 to 14, algorithms 8 and 17, and the distogram head."""

import torch

from megafold.trainer.model.msa import MSABlock
from megafold.trainer.model.pairformer import PairformerBlock
from tests.trainer.batches import random_batch
from tests.trainer.networks import MINI, as_dtype, mini_model


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_trunk_is_algorithm_1():
    trunk = mini_model().trunk
    batch = as_dtype(random_batch(0))
    mask = batch["token_mask"]
    pair_mask = mask[:, :, None] & mask[:, None]
    s_inputs = trunk.input_embedder(batch)
    s_init = s_inputs @ trunk.linear_s_init.weight.T
    z_init = (s_inputs @ trunk.linear_z_row.weight.T)[:, :, None]
    z_init = z_init + (s_inputs @ trunk.linear_z_column.weight.T)[:, None]
    z_init = z_init + trunk.relative_position(batch)
    z_init = z_init + batch["token_bonds"][..., None] * trunk.linear_bonds.weight[:, 0]
    s, z = torch.zeros_like(s_init), torch.zeros_like(z_init)
    for _ in range(3):
        z = z_init + trunk.recycle_z(z)
        z = z + trunk.template_embedder(batch, z, pair_mask)
        z = trunk.msa_module(batch, s_inputs, z, mask, pair_mask)
        s = s_init + trunk.recycle_s(s)
        s, z = trunk.pairformer(s, z, mask, pair_mask)
    outputs = trunk(batch, 3)
    torch.testing.assert_close(outputs.s_inputs, s_inputs)
    torch.testing.assert_close(outputs.s_trunk, s)
    torch.testing.assert_close(outputs.z_trunk, z)
    head = trunk.distogram_head.linear
    logits = (z + z.transpose(1, 2)) @ head.weight.T + 2 * head.bias
    torch.testing.assert_close(outputs.distogram_logits, logits)


def test_msa_module_is_algorithm_8():
    module = mini_model().trunk.msa_module
    batch = as_dtype(random_batch(0))
    mask = batch["token_mask"]
    pair_mask = mask[:, :, None] & mask[:, None]
    n = mask.shape[1]
    s_inputs, z = rand(1, n, MINI.c_s_inputs), rand(1, n, n, MINI.c_z, seed=1)
    of_row, of_deletion, of_value = module.linear_msa.weight.T.split([32, 1, 1])
    m = of_row[batch["msa"].long()] + (s_inputs @ module.linear_s.weight.T)[:, None]
    m = m + batch["has_deletion"][..., None] * of_deletion + batch["deletion_value"][..., None] * of_value
    expected = z
    for number, block in enumerate(module.blocks, start=1):
        assert isinstance(block, MSABlock)
        expected = expected + block.outer_product_mean(m, batch["msa_mask"])
        if number < MINI.n_msa:
            assert block.msa is not None
            m = m + block.msa.averaging(m, expected, mask)
            m = m + block.msa.transition(m)
        expected = block.pair(expected, pair_mask)
    torch.testing.assert_close(module(batch, s_inputs, z, mask, pair_mask), expected)


def test_pairformer_block_is_algorithm_17():
    block = mini_model().trunk.pairformer.blocks[0]
    assert isinstance(block, PairformerBlock)
    s, z = rand(1, 6, MINI.c_s), rand(1, 6, 6, MINI.c_z, seed=1)
    mask = torch.tensor([[True] * 5 + [False]])
    pair_mask = mask[:, :, None] & mask[:, None]
    s_out, z_out = block(s, z, mask, pair_mask)
    pair = block.pair
    for update in (
        pair.multiplication_outgoing,
        pair.multiplication_incoming,
        pair.attention_starting,
        pair.attention_ending,
    ):
        z = z + update(z, pair_mask)
    z = z + pair.transition(z)
    s = s + block.attention(s, z, mask)
    s = s + block.transition(s)
    torch.testing.assert_close(z_out, z)
    torch.testing.assert_close(s_out, s)
