"""What the simulator projects, drawn."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megafold.trainer.parallel import schemes
from megafold.trainer.parallel.simulator import Inputs, longest


def draw(inputs: Inputs, gpus: Sequence[int], tokens: int, path: Path) -> None:
    """The longest sample by number of GPUs, and the seconds that transfers take for one of ``tokens``.

    Writes a PNG file.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    whole = [longest(inputs.memory, number)[0] for number in gpus]
    left.plot(gpus, whole, "k.-", label="rotating, the whole step")
    for scheme in schemes.SCHEMES:
        ranks = [p for p in gpus if schemes.exists(scheme, p)]
        left.plot(
            ranks, [schemes.longest(scheme, inputs, p) for p in ranks], ".--", label=f"{scheme}, the trunk"
        )
        several = [p for p in ranks if p > 1]
        right.plot(
            several, [schemes.transfers_s(scheme, inputs, tokens, p) for p in several], ".-", label=scheme
        )
    left.set(xlabel="GPUs that share a sample", ylabel="tokens", title="longest sample", yscale="log")
    right.set(
        xlabel="GPUs that share a sample",
        ylabel="seconds a step",
        title=f"transfers of the trunk, {tokens} tokens",
        yscale="log",
    )
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
