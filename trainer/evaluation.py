"""Structures sampled from a trained model, and how close they come to the ground truth."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafold.trainer.batches import Batch
from megafold.trainer.config import TrainConfig
from megafold.trainer.devices import autocast, to_device
from megafold.trainer.losses.permutation import with_nearest_truth
from megafold.trainer.metrics import lddt, rmsd
from megafold.trainer.structure_output import write_mmcif


@dataclass(frozen=True, kw_only=True)
class SampledStructure:
    """The sampled structures of one sample, measured on its resolved atoms; one value a structure.

    Attributes:
        entry: the sample's entry.
        path: mmCIF file with one model a structure.
        lddt: all atoms, pairs within a residue left out.
        lddt_center: the tokens' centre atoms alone (Cα, C1', ligand atoms).
        rmsd: all atoms, Å.
    """

    entry: str
    path: Path
    lddt: tuple[float, ...]
    lddt_center: tuple[float, ...]
    rmsd: tuple[float, ...]


def sample_structures(
    model: Any,
    batch: Batch,
    config: TrainConfig,
    folder: Path,
    device: torch.device,
    written: Counter[str] | None = None,
) -> list[SampledStructure]:
    """Sample ``config.sample_count`` structures for each sample of a batch, measure and write them.

    The model's weights are used as they are; noise comes from a generator of its own, seeded by
    ``config.seed``, so that sampling disturbs no training. Each structure is compared with the ground truth
    that is nearest to it, where the batch says which chains and atoms may be exchanged (``symmetry``).
    ``written`` counts files by entry, over several batches: another crop of an entry gets a file of its own.
    """
    written = Counter() if written is None else written
    features = to_device(batch, device)
    generator = torch.Generator(device).manual_seed(config.seed)
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(device, config.precision):
        coords = model.sample(
            features,
            n_cycles=config.sample_cycles,
            n_samples=config.sample_count,
            n_steps=config.sample_steps,
            generator=generator,
        )
    model.train(was_training)
    arrays = {name: value.cpu().numpy() for name, value in features.items()}
    truths = _truths(features, coords, batch.get("symmetry"))
    metas = batch.get("meta") or [{} for _ in coords]
    structures = []
    for index, meta in enumerate(metas):
        own = {name: value[index] for name, value in arrays.items()}
        own_truths = [(truth[index], resolved[index]) for truth, resolved in truths]
        entry = str(meta.get("entry", f"sample-{index}"))
        written[entry] += 1
        number = "" if written[entry] == 1 else f"-{written[entry]}"
        models = coords[index].double().cpu().numpy()
        structures.append(
            _measure(models, own_truths, own, {**meta, "entry": entry}, folder / f"{entry}{number}.cif")
        )
    return structures


def _truths(
    features: dict[str, Tensor], coords: Tensor, exchanges: Any
) -> list[tuple[NDArray[np.float32], NDArray[np.bool_]]]:
    """For each of the S structures [B, S, N_atom, 3] its ground truth [B, N_atom, 3] and what is resolved."""
    found = []
    for predicted in coords.unbind(1):
        batch = with_nearest_truth(features, predicted, exchanges) if exchanges else features
        mask = batch["coords_mask"] & batch["atom_mask"]
        found.append((batch["coords"].cpu().numpy(), mask.cpu().numpy()))
    return found


def _measure(
    models: NDArray[np.float64],
    truths: Sequence[tuple[NDArray[np.float32], NDArray[np.bool_]]],
    features: Mapping[str, NDArray[Any]],
    meta: Mapping[str, Any],
    path: Path,
) -> SampledStructure:
    """Compare the models [S, N_atom, 3] of one sample with their ground truths, and write them."""
    residue = features["ref_space_uid"]
    center = features["center_atom"][features["token_mask"]]
    compared = [(model, *truth) for model, truth in zip(models, truths, strict=True)]
    write_mmcif(path, models, features, meta)
    return SampledStructure(
        entry=meta["entry"],
        path=path,
        lddt=tuple(lddt(model, truth, resolved, residue) for model, truth, resolved in compared),
        lddt_center=tuple(
            lddt(model[center], truth[center], resolved[center]) for model, truth, resolved in compared
        ),
        rmsd=tuple(rmsd(model, truth, resolved) for model, truth, resolved in compared),
    )
