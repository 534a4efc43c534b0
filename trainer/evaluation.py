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
from megafold.trainer.confidence_scores import (
    ConfidenceScores,
    LddtScores,
    confidence_scores,
    lddt_scores,
)
from megafold.trainer.config import TrainConfig
from megafold.trainer.devices import autocast, to_device
from megafold.trainer.losses.permutation import with_nearest_truth
from megafold.trainer.metrics import lddt, rmsd
from megafold.trainer.mini_rollout import is_judged
from megafold.trainer.structure_output import label_of_chain, write_mmcif


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
        chain_pair_iptm: of each two of the file's chains, by their names, the same of these alone; of a chain
            and itself its pTM.
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
    chain_pair_iptm: tuple[Mapping[str, Mapping[str, float]], ...] = ()


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
        confidence = _confidence(judged, index, _chain_names(own, about))
        structures.append(SampledStructure(entry=entry, path=path, **measured, **confidence))
    return structures


def _predict(
    model: Any, features: dict[str, Tensor], config: TrainConfig, generator: torch.Generator
) -> tuple[Tensor, list[LddtScores]]:
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
    scores = confidence_scores if config.alpha_pae > 0 else lddt_scores
    return coords, [scores(features, model.judge(features, trunk, own)) for own in coords.unbind(1)]


def _b_factors(judged: Sequence[LddtScores], index: int) -> NDArray[np.float64] | None:
    """Expected lDDTs [S, N_atom] of one sample's structures, 0 to 100."""
    if not judged:
        return None
    return np.stack([100 * scores.plddt[index].double().cpu().numpy() for scores in judged])


def _chain_names(features: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> list[str]:
    """Names of a sample's chains in its file, in the order of their numbers."""
    numbers = np.unique(features["asym_id"][features["token_mask"]])
    return [label_of_chain(int(number), about) for number in numbers]


def _confidence(judged: Sequence[LddtScores], index: int, chains: Sequence[str]) -> dict[str, Any]:
    """Scores of one sample's structures; those that PAE gives only if it is trained."""
    found: dict[str, Any] = {"plddt": tuple(float(scores.mean_plddt[index]) for scores in judged)}
    all_scores = [scores for scores in judged if isinstance(scores, ConfidenceScores)]
    iptm = [float(scores.iptm[index]) for scores in all_scores]
    return found | {
        "ptm": tuple(float(scores.ptm[index]) for scores in all_scores),
        "iptm": tuple(None if np.isnan(value) else value for value in iptm),
        "ranking": tuple(float(scores.ranking[index]) for scores in all_scores),
        "chain_pair_iptm": tuple(
            {
                name: dict(zip(chains, row, strict=True))
                for name, row in zip(chains, scores.chain_pair_iptm[index].tolist(), strict=True)
            }
            for scores in all_scores
        ),
    }


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
) -> dict[str, Any]:
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
