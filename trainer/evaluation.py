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
from megafold.trainer.confidence_scores import ConfidenceScores, confidence_scores
from megafold.trainer.config import TrainConfig
from megafold.trainer.devices import autocast, to_device
from megafold.trainer.losses.permutation import with_nearest_truth
from megafold.trainer.metrics import lddt, rmsd
from megafold.trainer.mini_rollout import is_judged
from megafold.trainer.structure_output import write_mmcif


@dataclass(frozen=True, kw_only=True)
class SampledStructure:
    """The sampled structures of one sample, measured on its resolved atoms; one value a structure.

    Attributes:
        entry: the sample's entry.
        path: mmCIF file with one model a structure; B factors are expected lDDTs, 0 to 100, where the
            confidence head is trained.
        lddt: all atoms, pairs within a residue left out.
        lddt_center: the tokens' centre atoms alone (Cα, C1', ligand atoms).
        rmsd: all atoms, Å.
        plddt: what the confidence head expects, 0 to 1, over all atoms; empty where it is not trained.
        ptm, iptm, ranking: TM scores that it expects, and AF3's score to rank structures by; empty where PAE
            is not trained. ``iptm`` is None of a single chain.
    """

    entry: str
    path: Path
    lddt: tuple[float, ...]
    lddt_center: tuple[float, ...]
    rmsd: tuple[float, ...]
    plddt: tuple[float, ...] = ()
    ptm: tuple[float, ...] = ()
    iptm: tuple[float | None, ...] = ()
    ranking: tuple[float, ...] = ()


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
        coords, judged = _predict(model, features, config, generator)
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
        path, about = folder / f"{entry}{number}.cif", {**meta, "entry": entry}
        models = coords[index].double().cpu().numpy()
        write_mmcif(path, models, own, about, _b_factors(judged, index))
        measured = _measure(models, own_truths, own)
        confidence = _confidence(judged, index, with_pae=config.alpha_pae > 0)
        structures.append(SampledStructure(entry=entry, path=path, **measured, **confidence))
    return structures


def _predict(
    model: Any, features: dict[str, Tensor], config: TrainConfig, generator: torch.Generator
) -> tuple[Tensor, list[ConfidenceScores]]:
    """S structures [B, S, N_atom, 3] of each sample, and what the head says of each, where it is trained."""
    settings = {
        "n_samples": config.sample_count,
        "n_steps": config.sample_steps,
        "generator": generator,
    }
    if not is_judged(model, config):
        return model.sample(features, n_cycles=config.sample_cycles, **settings), []
    trunk = model.run_trunk(features, n_cycles=config.sample_cycles)
    coords: Tensor = model.rollout(features, trunk, **settings)
    return coords, [
        confidence_scores(features, model.judge(features, trunk, own)) for own in coords.unbind(1)
    ]


def _b_factors(judged: Sequence[ConfidenceScores], index: int) -> NDArray[np.float64] | None:
    """Expected lDDTs [S, N_atom] of one sample's structures, 0 to 100."""
    if not judged:
        return None
    return np.stack([100 * scores.plddt[index].double().cpu().numpy() for scores in judged])


def _confidence(judged: Sequence[ConfidenceScores], index: int, *, with_pae: bool) -> dict[str, Any]:
    """Scores of one sample's structures; those that PAE gives only if it is trained."""
    found: dict[str, Any] = {"plddt": tuple(float(scores.mean_plddt[index]) for scores in judged)}
    if with_pae:
        iptm = [float(scores.iptm[index]) for scores in judged]
        found |= {
            "ptm": tuple(float(scores.ptm[index]) for scores in judged),
            "iptm": tuple(None if np.isnan(value) else value for value in iptm),
            "ranking": tuple(float(scores.ranking[index]) for scores in judged),
        }
    return found


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
) -> dict[str, tuple[float, ...]]:
    """Compare the models [S, N_atom, 3] of one sample with their ground truths."""
    residue = features["ref_space_uid"]
    center = features["center_atom"][features["token_mask"]]
    compared = [(model, *truth) for model, truth in zip(models, truths, strict=True)]
    return {
        "lddt": tuple(lddt(model, truth, resolved, residue) for model, truth, resolved in compared),
        "lddt_center": tuple(
            lddt(model[center], truth[center], resolved[center]) for model, truth, resolved in compared
        ),
        "rmsd": tuple(rmsd(model, truth, resolved) for model, truth, resolved in compared),
    }
