"""Training steps of AF3's network without data: a random protein, random weights, the loop's own step."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafold.pipeline.schema import SAMPLE
from megafold.trainer.batches import Batch
from megafold.trainer.loop import Trainer
from megafold.trainer.model.config import Backend, ModelConfig
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.signals import StopSignals

ATOMS_PER_TOKEN, MSA_ROWS, TEMPLATES = 8, 512, 4


def sample(n: int, *, symmetric: bool = False) -> Batch:
    """A random protein of one chain; the same for the same length.

    ``symmetric``: the last two atoms of each residue may be exchanged: a trainer predicts a structure first.
    """
    random = torch.Generator().manual_seed(n)
    lengths = {"N_token": n, "N_atom": n * ATOMS_PER_TOKEN, "N_msa": MSA_ROWS, "N_templ": TEMPLATES}
    batch: Batch = {}
    for feature in SAMPLE:
        shape = [lengths.get(axis) or int(axis) for axis in feature.axes]
        batch[feature.name] = torch.zeros([1, *shape], dtype=getattr(torch, feature.dtype))
    token = torch.arange(n)
    atom_token = token.repeat_interleave(ATOMS_PER_TOKEN)
    first = token * ATOMS_PER_TOKEN
    restype = torch.randint(20, (n,), generator=random)
    msa = torch.randint(20, (MSA_ROWS, n), generator=random)
    trace = torch.randn(n, 3, generator=random).cumsum(0) * 2.2
    values = {
        "residue_index": token + 1,
        "token_index": token + 1,
        "restype": restype,
        "token_atom_start": first,
        "center_atom": first + 1,
        "rep_atom": first + 4,
        "atom_to_token": atom_token,
        "ref_space_uid": atom_token,
        "ref_pos": 1.5 * torch.randn(len(atom_token), 3, generator=random),
        "coords": trace[atom_token] + 1.5 * torch.randn(len(atom_token), 3, generator=random),
        "profile": torch.nn.functional.one_hot(msa, 32).float().mean(0),
        "msa": msa,
        "template_restype": restype.expand(TEMPLATES, n),
        "template_pseudo_beta": trace.expand(TEMPLATES, n, 3),
        "template_backbone_frame": trace[:, None] + torch.randn(TEMPLATES, n, 3, 3, generator=random),
    }
    for name, value in values.items():
        batch[name] = value.to(batch[name].dtype)[None].contiguous()
    ones = "asym_id entity_id sym_id is_protein token_mask atom_mask ref_mask coords_mask msa_mask".split()
    for name in [*ones, "template_pseudo_beta_mask", "template_backbone_frame_mask"]:
        batch[name] = torch.ones_like(batch[name])
    batch["token_atom_count"] = torch.full_like(batch["token_atom_start"], ATOMS_PER_TOKEN)
    batch["ref_element"] = torch.full_like(batch["ref_element"], 6)
    if symmetric:
        last = first + ATOMS_PER_TOKEN - 1
        orders = torch.stack([torch.stack([last - 1, last], -1), torch.stack([last, last - 1], -1)], 1)
        batch["symmetry"] = [{"chains": [], "orders": [orders]}]
    return batch


def network(sizes: ModelConfig, device: torch.device, backend: Backend) -> AlphaFold3:
    """A network in training; the same for the same sizes and device."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = AlphaFold3(sizes)
    model.backend = backend
    torch.manual_seed(0)
    with torch.no_grad():  # layers that start at zero would leave the others without gradients
        for parameter in model.parameters():
            if parameter.ndim == 2 and not parameter.any():
                parameter.normal_(std=0.1 * parameter.shape[1] ** -0.5)
    return model.train()


def shallow(sizes: ModelConfig, most: int) -> ModelConfig:
    """The same with at most so many blocks in each stack."""
    judging = sizes.confidence
    return replace(
        sizes,
        confidence=judging and replace(judging, n_block=min(most, judging.n_block)),
        n_pairformer=min(most, sizes.n_pairformer),
        n_msa=min(most, sizes.n_msa),
        n_template=min(most, sizes.n_template),
        diffusion=replace(sizes.diffusion, n_block=min(most, sizes.diffusion.n_block)),
    )


class Steps:
    """Steps of a trainer's loop on one batch, one at a call."""

    def __init__(self, trainer: Trainer, batch: Batch) -> None:
        self._trainer, self._batches, self._signals = trainer, _endless(batch), StopSignals()

    def __call__(self) -> dict[str, float | int]:
        """What the loop records of the step."""
        return self._trainer._step(self._batches, self._signals)[0]


def _endless(batch: Batch) -> Iterator[Any]:
    while True:
        yield batch
