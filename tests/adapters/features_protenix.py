"""Whether ``to_protenix`` gives templates as Protenix computes them: ``features_protenix.py CACHE …``.

Runs in the package's environment; arguments as for the examples.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np
from one_sample import arguments, draw
from protenix.data.template.template_utils import (
    RESTYPE_RIGIDGROUP_DENSE_ATOM_IDX,
    DistogramFeaturesConfig,
    TemplateFeatures,
)

from megafold.pipeline.stream.adapters import to_protenix


def differences(features, inputs):
    same_chain = features["asym_id"][:, None] == features["asym_id"]
    for place, restype in enumerate(features["template_restype"]):
        beta, frame = features["template_pseudo_beta"][place], features["template_backbone_frame"][place]
        beta_mask = inputs["template_pseudo_beta_mask"][place]
        distogram = TemplateFeatures.dgram_from_positions(beta, DistogramFeaturesConfig())
        if not np.array_equal(
            inputs["template_distogram"][place], distogram * (beta_mask * same_chain)[..., None]
        ):
            yield f"template_distogram {place}: another"
        # Atoms as the package stores them, of which it takes C, CA and N.
        atoms, mask = np.zeros((len(restype), 24, 3), np.float32), np.zeros((len(restype), 24))
        rows = np.arange(len(restype))
        for atom, column in zip((2, 1, 0), RESTYPE_RIGIDGROUP_DENSE_ATOM_IDX[restype, 0].T, strict=True):
            atoms[rows, column] = frame[:, atom]
            mask[rows, column] = features["template_backbone_frame_mask"][place]
        vector, vector_mask = TemplateFeatures.compute_template_unit_vector(restype, atoms, mask)
        if not np.array_equal(inputs["template_backbone_frame_mask"][place], vector_mask):
            yield f"template_backbone_frame_mask {place}: another"
        vector = vector * (vector_mask * same_chain)[..., None]
        if not np.allclose(inputs["template_unit_vector"][place], vector, atol=1e-4):
            yield f"template_unit_vector {place}: another"


def main():
    sample = draw(arguments())
    inputs, _, _ = to_protenix(sample.features)
    wrong = list(differences(sample.features, inputs))
    n_template = len(sample.features["template_restype"])
    print(f"protenix, {sample.meta['entry']}: {n_template} templates as its own code has them")
    if wrong:
        sys.exit("\n".join(wrong))


main()
