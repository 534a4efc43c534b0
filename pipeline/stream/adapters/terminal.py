"""Samples without OXT and OP3: for packages in whose models a residue's class says which atoms it has."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import FEATURES
from megafold.pipeline.stream.adapters.arrays import Arrays, Features
from megafold.pipeline.stream.symmetry import Symmetry


def without_terminal_atoms(features: Features, symmetry: Symmetry | None) -> tuple[Features, Symmetry | None]:
    """A sample without the OXT of whole amino acids and the OP3 of whole nucleotides.

    Ends of chains have them. Orders that exchange them with atoms that stay are left out.
    """
    keep = ~_is_terminal(features)
    if keep.all():
        return features, symmetry
    place = np.cumsum(keep) - 1
    if symmetry is not None:
        orders = (_kept_orders(images, keep) for images in symmetry.automorphisms)
        symmetry = replace(
            symmetry,
            automorphisms=tuple(place[images] for images in orders if len(images) > 1),
            chains=tuple(
                replace(
                    chain,
                    atoms=place[chain.atoms[keep[chain.atoms]]],
                    places=chain.places[keep[chain.atoms]],
                    coords=chain.coords[:, keep[chain.atoms]],
                    coords_mask=chain.coords_mask[:, keep[chain.atoms]],
                )
                for chain in symmetry.chains
            ),
        )
    return _kept(features, keep, place), symmetry


def _is_terminal(features: Features) -> NDArray[np.bool_]:
    """[N_atom] True: to be left out."""
    token = features["atom_to_token"]
    whole = (features["token_atom_count"] > 1)[token]
    amino_acid, nucleotide = features["is_protein"][token], (features["is_dna"] | features["is_rna"])[token]
    found: NDArray[np.bool_] = whole & (
        (_is_named(features, "OXT") & amino_acid) | (_is_named(features, "OP3") & nucleotide)
    )
    return found


def _is_named(features: Features, name: str) -> NDArray[np.bool_]:
    chars = [ord(letter) - 32 for letter in name.ljust(4)]
    found: NDArray[np.bool_] = (features["ref_atom_name_chars"] == chars).all(axis=1)
    return found


def _kept(features: Features, keep: NDArray[np.bool_], place: NDArray[np.int64]) -> Arrays:
    kept = {
        name: value[keep] if FEATURES[name].axes[0] == "N_atom" else value for name, value in features.items()
    }
    gone = np.bincount(features["atom_to_token"][~keep], minlength=len(features["token_atom_count"]))
    kept["token_atom_count"] = features["token_atom_count"] - gone.astype(np.int32)
    kept["token_atom_start"] = np.searchsorted(kept["atom_to_token"], np.arange(len(gone))).astype(np.int32)
    kept["frame_mask"] = features["frame_mask"] & keep[features["frame_atoms"]].all(axis=1)
    for name in ("center_atom", "rep_atom", "frame_atoms"):
        kept[name] = place[features[name]].astype(np.int32)
    kept["frame_atoms"][~kept["frame_mask"]] = 0
    return kept


def _kept_orders(images: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The orders [n, k] of those atoms that stay, where they stay among themselves; row 0 stays the first."""
    stays = images[:, keep[images[0]]]
    stays = stays[keep[stays].all(axis=1)]
    first = np.sort(np.unique(stays, axis=0, return_index=True)[1])
    found: NDArray[np.int64] = stays[first]
    return found
