"""Assemblies: which chain is copied by which operators."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import StructureError
from megafold.pipeline.structure.chains import Chain
from megafold.pipeline.structure.entry import Generator, ParsedEntry, Report
from megafold.pipeline.structure.options import AS_DEPOSITED

#: The assembly that most files have and that is built unless another one is asked for.
_DEFAULT: Final = "1"
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
#: More copies of a chain than any assembly has: a slip in the file, which would take all memory.
_MOST_PRODUCTS: Final = 100_000
#: How far the product of a rotation and its transpose may be from the identity.
_ROUNDING: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One chain of the assembly: a chain of the deposited coordinates, moved.

    ``operator`` '' for not moved.
    """

    chain: int
    operator: str
    transform: NDArray[np.float64]

    def move(self, coords: NDArray[np.float64]) -> NDArray[np.float64]:
        """Coordinates [N, 3] moved, rounded to 1e-3 Å. Written out, for the same sums on every machine."""
        if not self.operator:
            return coords
        x, y, z = coords.T
        moved = [row[0] * x + row[1] * y + row[2] * z + row[3] for row in self.transform]
        return np.round(np.stack(moved, axis=1), 3) + 0.0


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Copies in the order of the file's chains, second copies after all first ones, and so on."""

    id: str
    copies: list[Copy]


def choose_assembly(
    parsed: ParsedEntry, chains: list[Chain], wanted: str, entry: str, report: Report
) -> Assembly:
    """The assembly called ``wanted``, or the coordinates as they are.

    Raises:
        StructureError: an assembly was asked for by its id that the file does not have
        (``no-such-assembly``).
    """
    why = _why_deposited(parsed, chains)
    if wanted == AS_DEPOSITED or why:
        if wanted not in (AS_DEPOSITED, _DEFAULT):
            raise _missing(entry, wanted, why)
        if why and wanted != AS_DEPOSITED:
            report.warn(f"{why}: the coordinates are taken as they are")
        return Assembly(id=AS_DEPOSITED, copies=_deposited(chains))
    ids = list(dict.fromkeys(generator.assembly for generator in parsed.generators))
    if wanted not in ids:
        if wanted != _DEFAULT:
            raise _missing(entry, wanted, f"it has {', '.join(ids)}")
        report.warn(f"there is no assembly {wanted}: assembly {ids[0]} is used")
        wanted = ids[0]
    generators = [generator for generator in parsed.generators if generator.assembly == wanted]
    copies = _expand(parsed, chains, generators, report)
    report.remove("chains_outside_assembly", len(chains) - len({copy.chain for copy in copies}))
    return Assembly(id=wanted, copies=copies)


def _missing(entry: str, wanted: str, why: str) -> StructureError:
    return StructureError(
        f"entry {entry}: there is no assembly {wanted} ({why}); choose one that is there, "
        f"or {AS_DEPOSITED!r}",
        reason="no-such-assembly",
    )


def _why_deposited(parsed: ParsedEntry, chains: list[Chain]) -> str:
    """Why the file's assemblies cannot be built, '' if they can."""
    if parsed.is_expanded:
        return "the file holds an assembly already (pdbx_chain_remapping)"
    if not parsed.generators:
        return "the file defines no assembly"
    try:
        used = {
            operator
            for generator in parsed.generators
            for product in parse_operators(generator.expression)
            for operator in product
        }
    except ValueError as error:
        return str(error)
    undefined = sorted(used - parsed.operators.keys())
    if undefined or not used:
        return (
            f"the file's assemblies use operators that it does not define ({', '.join(undefined) or 'none'})"
        )
    unusable = [name for name in sorted(used) if not _is_rigid(parsed.operators[name])]
    if unusable:
        return f"the file's assemblies use operators that are no rotations ({', '.join(unusable)})"
    present = {chain.source_asym for chain in chains}
    if not any(present.intersection(generator.asym_ids) for generator in parsed.generators):
        return "the file's assemblies name none of its chains"
    return ""


def _is_rigid(operator: NDArray[np.float64]) -> bool:
    """Whether a [3, 4] operator turns and shifts, and does nothing else; files round its numbers."""
    turn = operator[:, :3]
    if not np.isfinite(operator).all():
        return False
    return bool(np.abs(turn @ turn.T - np.eye(3)).max() < _ROUNDING and np.linalg.det(turn) > 0)


def parse_operators(expression: str) -> list[tuple[str, ...]]:
    """Products of operators that an ``oper_expression`` stands for: ``(1-3,P)(4,5)`` are eight, ``1,2`` are
    two.

    The last operator of a product is applied first.

    Raises:
        ValueError: the expression cannot be understood.
    """
    factors = re.findall(r"\(([^()]*)\)|([^()]+)", expression)
    if "".join(f"({inner})" if inner else bare for inner, bare in factors) != expression:
        raise ValueError(f"the operator expression {expression!r} cannot be understood")
    lists = [_operator_list(inner or bare) for inner, bare in factors]
    if math.prod(map(len, lists)) > _MOST_PRODUCTS:
        raise ValueError(f"the operator expression {expression!r} means more than {_MOST_PRODUCTS} copies")
    return list(itertools.product(*lists))


def _operator_list(text: str) -> list[str]:
    names: list[str] = []
    for part in filter(None, text.split(",")):
        span = _RANGE.fullmatch(part)
        if span and int(span[2]) - int(span[1]) >= _MOST_PRODUCTS:
            raise ValueError(f"the operator expression {text!r} means more than {_MOST_PRODUCTS} copies")
        names.extend(map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part])
    return names


def _deposited(chains: list[Chain]) -> list[Copy]:
    identity = np.eye(3, 4)
    return [Copy(chain=index, operator="", transform=identity) for index in range(len(chains))]


def _expand(
    parsed: ParsedEntry, chains: list[Chain], generators: list[Generator], report: Report
) -> list[Copy]:
    by_asym: dict[str, dict[str, NDArray[np.float64]]] = {}
    for generator in generators:
        for product in parse_operators(generator.expression):
            name, transform = "-".join(product), _compose([parsed.operators[part] for part in product])
            for asym in generator.asym_ids:
                if name in by_asym.setdefault(asym, {}):
                    report.warn(f"the assembly has chain {asym} by operator {name} twice; it is built once")
                by_asym[asym][name] = transform
    copies: list[tuple[int, int, Copy]] = []
    for index, chain in enumerate(chains):
        operators = by_asym.get(chain.source_asym, {})
        for number, (name, transform) in enumerate(operators.items()):
            copies.append((number, index, Copy(chain=index, operator=name, transform=transform)))
    return [copy for _, _, copy in sorted(copies, key=lambda item: item[:2])]


def _compose(transforms: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    result = np.eye(4)
    for transform in transforms:
        result = result @ np.vstack([transform, [0.0, 0.0, 0.0, 1.0]])
    return result[:3]
