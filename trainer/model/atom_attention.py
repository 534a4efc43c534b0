"""Atom attention encoder and decoder (algorithms 5 and 6).

Shapes: A atoms, N tokens, S noised copies; W windows of Q query and K key atoms. What does not depend
on the noised positions (the atoms' conditioning c and their pairs p) is computed once for all copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafold.trainer.model.config import N_CHAR, N_ELEMENT, ModelConfig
from megafold.trainer.model.primitives import LayerNorm, Linear, NormLinear, PreciseLinear
from megafold.trainer.model.transformer import DiffusionTransformer, DiffusionTransformerBlock
from megafold.trainer.model.windows import AtomWindows

_N_ATOM_TRANSITION = 2


@dataclass(frozen=True, kw_only=True)
class AtomConditioning:
    """What the atom transformers know of the atoms besides their noised positions.

    Attributes:
        c: [B, 1, A, C_atom].
        p: [B, W, Q, K, C_atompair].
        mask: [B, A] boolean.
        to_token: [B, A] token of each atom.
        n_token: N.
        windows: how atoms fall into windows.
    """

    c: Tensor
    p: Tensor
    mask: Tensor
    to_token: Tensor
    n_token: int
    windows: AtomWindows

    def membership(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, A, N]: 1 where the atom belongs to the token; nothing for padding.

        Sums over atoms and copies to atoms are products with it: exact, and the same every time on a
        GPU, which scatters are not.
        """
        token = torch.where(self.mask, self.to_token, -1)
        return (token.unsqueeze(-1) == torch.arange(self.n_token, device=token.device))[:, None].to(dtype)

    def mean_over_atoms(self, x: Tensor) -> Tensor:
        """[B, S, A, C] → [B, S, N, C]; zeros for tokens without atoms."""
        membership = self.membership(x.dtype)
        count = membership.sum(-2).clamp(min=1)
        return membership.transpose(-1, -2) @ x / count.unsqueeze(-1)

    def to_atoms(self, x: Tensor) -> Tensor:
        """[B, S, N, C] → [B, S, A, C]; zeros for padding."""
        return self.membership(x.dtype) @ x


class AtomConditioner(nn.Module):
    """Algorithm 5, lines 1 to 14: c and p from the reference conformers and, if given, the trunk.

    ``ref_space_uid`` says which offsets have a meaning; as a number it is no input of the network,
    as in AF3's published code. The charge enters as arcsinh, likewise.
    """

    def __init__(self, config: ModelConfig, *, with_trunk: bool) -> None:
        super().__init__()
        c_atom, c_pair = config.c_atom, config.c_atompair
        self.n_queries, self.n_keys = config.atom.n_queries, config.atom.n_keys
        self.linear_ref_pos = PreciseLinear(3, c_atom)
        self.linear_features = Linear(2 + N_ELEMENT + 4 * N_CHAR, c_atom)
        self.linear_offset = PreciseLinear(3, c_pair)
        self.linear_distance = PreciseLinear(1, c_pair)
        self.linear_valid = Linear(1, c_pair)
        self.trunk_s = NormLinear(config.c_s, c_atom, init="final", offset=False) if with_trunk else None
        self.trunk_z = NormLinear(config.c_z, c_pair, init="final", offset=False) if with_trunk else None
        self.linear_c_query = Linear(c_atom, c_pair, init="relu")
        self.linear_c_key = Linear(c_atom, c_pair, init="relu")
        self.pair_mlp = nn.Sequential(
            nn.ReLU(),
            Linear(c_pair, c_pair, init="relu"),
            nn.ReLU(),
            Linear(c_pair, c_pair, init="relu"),
            nn.ReLU(),
            Linear(c_pair, c_pair, init="final"),
        )

    def forward(
        self, batch: dict[str, Tensor], s_trunk: Tensor | None = None, z: Tensor | None = None
    ) -> AtomConditioning:
        """Conditioning of the atoms.

        Args:
            batch: the sample's features.
            s_trunk: [B, N, C_s].
            z: [B, N, N, C_z].
        """
        mask, to_token = batch["atom_mask"], batch["atom_to_token"].long()
        windows = AtomWindows(n_atom=mask.shape[1], n_queries=self.n_queries, n_keys=self.n_keys)
        c = self._atoms(batch)
        p = self._pairs(batch, windows)
        row = torch.arange(len(to_token), device=to_token.device)
        if self.trunk_s is not None and s_trunk is not None:
            c = c + self.trunk_s(s_trunk)[row[:, None], to_token]
        if self.trunk_z is not None and z is not None:
            token = to_token.unsqueeze(-1)
            query, key = windows.queries(token), windows.keys(token).transpose(-1, -2)
            p = p + self.trunk_z(z)[row[:, None, None, None], query, key]
        c = c * mask.unsqueeze(-1)
        of_query = windows.queries(self.linear_c_query(torch.relu(c)))
        of_key = windows.keys(self.linear_c_key(torch.relu(c)))
        p = p + of_query.unsqueeze(-2) + of_key.unsqueeze(-3)
        p = p + self.pair_mlp(p)
        n_token = batch["token_mask"].shape[1]
        return AtomConditioning(
            c=c[:, None], p=p, mask=mask, to_token=to_token, n_token=n_token, windows=windows
        )

    def _atoms(self, batch: dict[str, Tensor]) -> Tensor:
        """[B, A, C_atom] (line 1)."""
        features = torch.cat(
            [
                torch.arcsinh(batch["ref_charge"]).unsqueeze(-1),
                batch["ref_mask"].unsqueeze(-1),
                F.one_hot(batch["ref_element"].long(), N_ELEMENT),
                F.one_hot(batch["ref_atom_name_chars"].long(), N_CHAR).flatten(-2),
            ],
            dim=-1,
        )
        dtype = self.linear_features.weight.dtype
        c: Tensor = self.linear_ref_pos(batch["ref_pos"]) + self.linear_features(features.to(dtype))
        return c

    def _pairs(self, batch: dict[str, Tensor], windows: AtomWindows) -> Tensor:
        """[B, W, Q, K, C_atompair] from offsets within a reference conformer (lines 2 to 6)."""
        ref_pos = batch["ref_pos"]
        # Padding and atoms without a reference position are in no conformer.
        uid = torch.where(batch["atom_mask"] & batch["ref_mask"], batch["ref_space_uid"] + 1, 0)
        uid = uid.unsqueeze(-1)
        query, key = windows.queries(uid), windows.keys(uid).transpose(-1, -2)
        valid = ((query == key) & (query > 0)).unsqueeze(-1).to(self.linear_offset.weight.dtype)
        offset = windows.queries(ref_pos).unsqueeze(-2) - windows.keys(ref_pos).unsqueeze(-3)
        closeness = 1 / (1 + offset.square().sum(-1, keepdim=True))
        p: Tensor = (self.linear_offset(offset) + self.linear_distance(closeness)) * valid
        return p + self.linear_valid(valid)


class AtomTransformer(DiffusionTransformer):
    """Algorithm 7: the diffusion transformer over windows of atoms."""

    def __init__(self, config: ModelConfig) -> None:
        c, n_head = config.c_atom, config.atom.n_head
        blocks = [
            DiffusionTransformerBlock(c, c, config.c_atompair, n_head, _N_ATOM_TRANSITION)
            for _ in range(config.atom.n_block)
        ]
        super().__init__(blocks, recompute=config.activation_checkpointing)


class AtomAttentionEncoder(nn.Module):
    """Algorithm 5. ``with_positions``: it sees noised positions (and its conditioning the trunk)."""

    def __init__(self, config: ModelConfig, c_token: int, *, with_positions: bool) -> None:
        super().__init__()
        self.conditioner = AtomConditioner(config, with_trunk=with_positions)
        self.linear_positions = PreciseLinear(3, config.c_atom) if with_positions else None
        self.transformer = AtomTransformer(config)
        self.linear_token = Linear(config.c_atom, c_token, init="relu")

    def forward(
        self,
        atoms: AtomConditioning,
        positions: Tensor | None = None,
        biases: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, S, N, C_token] and atoms q [B, S, A, C_atom].

        Args:
            atoms: what ``conditioner`` gave.
            positions: [B, S, A, 3], scaled to unit variance; None: S = 1.
            biases: of the transformer's blocks, if they are known already.
        """
        q = atoms.c
        if self.linear_positions is not None and positions is not None:
            q = q + self.linear_positions(positions)
        q = self.transformer(q, atoms.c, atoms.p, atoms.mask, atoms.windows, biases)
        return atoms.mean_over_atoms(torch.relu(self.linear_token(q))), q


class AtomAttentionDecoder(nn.Module):
    """Algorithm 6."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.linear_token = Linear(config.c_token, config.c_atom)
        self.transformer = AtomTransformer(config)
        self.norm = LayerNorm(config.c_atom, offset=False)
        self.linear_positions = PreciseLinear(config.c_atom, 3, init="final")

    def forward(
        self, a: Tensor, q: Tensor, atoms: AtomConditioning, biases: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Update of the positions, [B, S, A, 3].

        Args:
            a: tokens [B, S, N, C_token].
            q: the encoder's atoms [B, S, A, C_atom].
            atoms: their conditioning.
            biases: of the transformer's blocks, if they are known already.
        """
        q = q + atoms.to_atoms(self.linear_token(a))
        q = self.transformer(q, atoms.c, atoms.p, atoms.mask, atoms.windows, biases)
        update: Tensor = self.linear_positions(self.norm(q))
        return update
