"""Whether OpenFold3 finds a sample's atoms and templates in a batch: ``features_openfold3.py CACHE …``.

The package's model looks atoms up by a residue's class and their place in it; what it finds must be what the
sample says. Its own distograms and unit vectors of templates must be the adapter's. Runs in the package's
environment; arguments as for the examples.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np
import torch
from one_sample import arguments, draw
from openfold3.core.data.primitives.featurization.template import (
    create_template_distogram,
    create_template_unit_vector,
)
from openfold3.core.utils.atomize_utils import (
    get_token_center_atoms,
    get_token_frame_atoms,
    get_token_representative_atoms,
)
from torch.utils.data import default_convert

from megafold.pipeline.stream.adapters import to_openfold3, to_openfold3_batch


def differences(features, batch):
    truth = batch["ground_truth"]
    coords, mask = truth["atom_positions"], truth["atom_resolved_mask"]
    for name, function in (("center", get_token_center_atoms), ("rep", get_token_representative_atoms)):
        position, known = function(batch, coords, mask)
        ours = features[f"{name}_atom"]
        if not np.array_equal(known[0].numpy() > 0, features["coords_mask"][ours]):
            yield f"{name} atoms: resolved ones are not the same"
        if not np.array_equal(position[0].numpy(), features["coords"][ours]):
            yield f"{name} atoms: others"
    (one, center, two), known = get_token_frame_atoms(batch, coords, mask)
    # The package takes neighbours of single atoms inside the crop, where the sample has them of the chain.
    whole = features["token_atom_count"] > 1
    if not np.array_equal(known[0].numpy()[whole] > 0, features["frame_mask"][whole]):
        yield "frames of residues: known ones are not the same"
    framed = whole & features["frame_mask"]
    frames = features["frame_atoms"].copy()
    # (C1', C3', C4') in AF3 SI 4.3.2; the package has (C3', C1', C4').
    is_nucleotide = features["is_dna"] | features["is_rna"]
    frames[is_nucleotide] = frames[is_nucleotide][:, [1, 0, 2]]
    frames = features["coords"][frames[framed]]
    for place, atom in enumerate((one, center, two)):
        if not np.array_equal(atom[0].numpy()[framed], frames[:, place]):
            yield f"frames of residues: atom {place} is another"


def template_differences(features, batch):
    asym = torch.from_numpy(features["asym_id"])
    same_chain = (asym[:, None] == asym)[None, :, :, None]
    beta, beta_mask = features["template_pseudo_beta"], features["template_pseudo_beta_mask"]
    frame, frame_mask = features["template_backbone_frame"], features["template_backbone_frame_mask"]
    distogram = create_template_distogram(beta, beta_mask.astype(float), same_chain)
    vector = create_template_unit_vector(frame, torch.from_numpy(frame_mask).float(), same_chain)
    if not np.array_equal(batch["template_distogram"][0], distogram):
        yield "template_distogram: another"
    if not np.allclose(batch["template_unit_vector"][0], vector, atol=1e-4):
        yield "template_unit_vector: another"


def main():
    sample = draw(arguments())
    batch = default_convert(to_openfold3_batch([to_openfold3(sample.features)]))
    wrong = list(differences(sample.features, batch))
    n_template = len(sample.features["template_restype"])
    if n_template:
        wrong += template_differences(sample.features, batch)
    print(f"openfold3, {sample.meta['entry']}: atoms and {n_template} templates as its own code has them")
    if wrong:
        sys.exit("\n".join(wrong))


main()
