"""Template hits of a chain: hit list parsers, their structures, and the ``template`` object."""

from megafold.pipeline.template.features import VERSION, TemplateResult, featurize_templates
from megafold.pipeline.template.hits import hit_entries
from megafold.pipeline.template.structures import TemplateStructures

__all__ = ["VERSION", "TemplateResult", "TemplateStructures", "featurize_templates", "hit_entries"]
