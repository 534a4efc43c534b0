"""Ways to share a stack of pair blocks over ranks, side by side: what they send, and what a rank holds whole.

``rotating``: ours. ``gathering``: rows over ranks, and every rank gathers what its rows lack: an operand of a
multiplication, z for the other axis. ``tiles``: √P × √P tiles of both axes, each of which gathers panels of
rows and of columns from its row and its column of ranks. Only blocks are compared: what comes after the trunk
is the same for all.
"""

from typing import Final, Literal

from megafold.trainer.errors import ConfigError
from megafold.trainer.parallel import cost
from megafold.trainer.parallel.simulator import GIB, Inputs, Network, transfer_ms

Scheme = Literal["rotating", "gathering", "tiles"]
SCHEMES: Final[tuple[Scheme, ...]] = ("rotating", "gathering", "tiles")

#: Bytes of an operand and of its gradient, both in bfloat16.
_OPERAND_BYTES: Final = 4
#: Of a head's bias: as the kernels read it, transposed, and its gradient in float32.
_BIAS_BYTES: Final = 10
#: Collectives of a block and pass: multiplications, attentions with their bias, and rotations.
_CALLS: Final[dict[Scheme, int]] = {"rotating": 8, "gathering": 5, "tiles": 10}


def exists(scheme: Scheme, p: int) -> bool:
    """Whether ``p`` ranks can be arranged so: tiles ask for a square number."""
    return scheme != "tiles" or round(p**0.5) ** 2 == p


def sent(scheme: Scheme, network: Network, n: int, p: int) -> float:
    """Numbers that a rank sends in the forward pass of a block; the backward pass sends as many.

    Raises:
        ConfigError: ``p`` ranks cannot be arranged so.
    """
    if not exists(scheme, p):
        raise ConfigError(f"{p} ranks make no square of tiles")
    c_z, c, heads = network.c_z, network.c_triangle, network.n_head
    others = (p - 1) / p
    if scheme == "rotating":
        by_operand = cost.choose_triangle_scheme(n, c, p) == "operand"
        multiplication = (cost.operand_gather if by_operand else cost.channel_exchange)(n, c, p)
        return 2 * (multiplication + cost.rotation(n, c_z, p) + cost.bias_gather(n, heads, p))
    if scheme == "gathering":
        return n**2 * others * (2 * c + c_z + 2 * heads)
    side = round(p**0.5)
    # Two operands of each multiplication, keys and values of each attention: a panel of N/√P rows each, in
    # tiles of which a rank sends its own to the √P - 1 others of its row or column. And panels of the bias.
    panels = 2 * 2 * c + 2 * 2 * c_z
    return n**2 * (panels * (side - 1) / p + 2 * heads * (side - 1) / side)


def whole_bytes(scheme: Scheme, network: Network, p: int) -> float:
    """Bytes a pair of tokens that a rank holds beside its share while a block runs."""
    bias = _BIAS_BYTES * network.n_head
    operand = _OPERAND_BYTES * max(network.c_triangle, network.c_z)
    if p == 1:
        return bias
    if scheme == "rotating":
        return bias + (operand if p == 2 else 0)
    if scheme == "gathering":
        return bias + operand
    return (bias + 2 * operand) / p**0.5


def longest(scheme: Scheme, inputs: Inputs, p: int) -> int:
    """The longest sample whose trunk ``p`` ranks hold, by the shared bytes of phase ``trunk``.

    Raises:
        ConfigError: the inputs have no such phase.
    """
    memory = inputs.memory
    if "trunk" not in memory.phases:
        raise ConfigError(f"{inputs.name}: no phase trunk, whose bytes the schemes share")
    pair = memory.phases["trunk"].shared_bytes / p + whole_bytes(scheme, inputs.network, p)
    return int(((memory.gpu_gib - memory.fixed_gib) * GIB / pair) ** 0.5) // p * p


def transfers_s(scheme: Scheme, inputs: Inputs, n: int, p: int) -> float:
    """Seconds of a step's transfers between blocks' parts, hidden ones included, in bfloat16.

    Raises:
        ConfigError: the inputs have no links.
    """
    if inputs.links is None:
        raise ConfigError(f"{inputs.name}: no links, so no times can be projected")
    network = inputs.network
    blocks = network.n_pairformer + network.n_msa
    passes = network.mean_cycles + 2  # the last cycle's blocks run forward twice, and backward
    each = transfer_ms(inputs.links, 2 * sent(scheme, network, n, p), p, _CALLS[scheme])
    return blocks * passes * each / 1e3
