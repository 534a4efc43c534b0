"""Is a sample what the schema says it is?"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import MegafoldError
from megafold.pipeline.schema import N_RESTYPE, SAMPLE, SchemaError, check_layout

_MASK_OF = {
    "ref_pos": "ref_mask",
    "coords": "coords_mask",
    "template_pseudo_beta": "template_pseudo_beta_mask",
    "template_backbone_frame": "template_backbone_frame_mask",
}
_ATOM_INDICES = ("token_atom_start", "center_atom", "rep_atom", "frame_atoms")


class SampleError(MegafoldError):
    """Objects of a cache that do not fit each other, or a sample that does not fit the schema."""


def validate_sample(features: Mapping[str, NDArray[Any]]) -> None:
    """Check one sample, padded or not, against ``schema.SAMPLE``.

    Raises:
        SampleError: a feature is missing, unknown, of another dtype, rank or length; a float is not
            finite; something masked is not zero; an index or class points outside its range.
    """
    layout = {name: (value.dtype, value.shape) for name, value in features.items()}
    try:
        lengths = check_layout("sample", SAMPLE, layout)
    except SchemaError as error:
        raise SampleError(str(error)) from error
    for feature in SAMPLE:
        value = features[feature.name]
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise SampleError(f"{feature.name}: not all values are finite; missing ones are 0 with a mask")
    for name, mask in _MASK_OF.items():
        if features[name][~features[mask]].any():
            raise SampleError(f"{name}: a value where {mask} is false is not 0")
    _check_ranges(features, lengths)


def _check_ranges(features: Mapping[str, NDArray[Any]], lengths: Mapping[str, int]) -> None:
    for name in ("restype", "msa", "template_restype"):
        _check_range(name, features[name], N_RESTYPE)
    for name in _ATOM_INDICES:
        _check_range(name, features[name], lengths["N_atom"])
    _check_range("atom_to_token", features["atom_to_token"], lengths["N_token"])
    bonds = features["token_bonds"]
    if (bonds != bonds.T).any() or bonds.diagonal().any():
        raise SampleError("token_bonds: not symmetric with a false diagonal")
    real = features["token_mask"]
    count = features["token_atom_count"][real]
    owner = np.repeat(np.flatnonzero(real), count)
    mask = features["atom_mask"]
    if len(owner) != mask.sum() or (features["atom_to_token"][mask] != owner).any():
        raise SampleError("atom_to_token does not agree with token_atom_start and token_atom_count")


def _check_range(name: str, value: NDArray[Any], end: int) -> None:
    if value.size and (value.min() < 0 or value.max() >= max(end, 1)):
        raise SampleError(f"{name}: values from {value.min()} to {value.max()}, expected 0 to {end - 1}")
