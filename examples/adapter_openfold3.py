"""Train OpenFold3 (package openfold3), at small sizes: ``python examples/adapter_openfold3.py CACHE``."""

import copy

from one_sample import arguments, draw, seed, train
from openfold3.core.loss.loss_module import OpenFold3Loss
from openfold3.projects.of3_all_atom.model import OpenFold3
from openfold3.projects.of3_all_atom.project_entry import OF3ProjectEntry
from torch.utils.data import default_convert

from megafold.pipeline.stream.adapters.openfold3 import to_openfold3, to_openfold3_batch

args = arguments()
sample = draw(args)
adapted = to_openfold3(
    sample.features,
    paired_rows=sample.meta["paired_rows"],
    resolution=sample.meta["resolution"],
    symmetry=sample.symmetry,
    crop_method=sample.meta["crop_method"],
)
batch = default_convert(to_openfold3_batch([adapted]))

seed(0)
config = OF3ProjectEntry().get_model_config_with_presets()
sizes = config.architecture
sizes.pairformer.no_blocks = 1
sizes.msa.msa_module.no_blocks = 1
sizes.template.template_pair_stack.no_blocks = 1
sizes.diffusion_module.diffusion_transformer.no_blocks = 1
sizes.shared.diffusion.no_samples = 2
sizes.shared.diffusion.no_mini_rollout_steps = 2
sizes.shared.num_recycles = 0
sizes.heads.pairformer_embedding.pairformer.no_blocks = 1
model = OpenFold3(config).train()
loss_of = OpenFold3Loss(config=sizes.loss_module)
train(model, lambda: loss_of(*model(copy.deepcopy(batch))), args.steps, rate=1e-3)
