"""The loss of a run, drawn from its CSV file."""

import math
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megafold.trainer.logging.csv_log import read_rows

_CURVES = ("loss", "mse", "smooth_lddt", "distogram")


def draw_losses(csv_path: Path, png_path: Path) -> None:
    """Draw the loss and its parts over the steps: dots for the steps, a line for their moving mean."""
    rows = list(read_rows(csv_path))
    curves = [name for name in _CURVES if rows and name in rows[0]]
    figure = Figure(figsize=(4 * max(len(curves), 1), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(curves, start=1):
        axes = figure.add_subplot(1, len(curves), place)
        points = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        steps = [step for step, value in points if math.isfinite(value)]
        values = [value for _, value in points if math.isfinite(value)]
        axes.plot(steps, values, ".", markersize=2, alpha=0.3)
        window = max(1, len(values) // 20)
        if len(values) > window:
            smooth = np.convolve(values, np.ones(window) / window, mode="valid")
            first = (window - 1) // 2
            axes.plot(steps[first : first + len(smooth)], smooth, linewidth=1.5)
        if values and min(values) > 0:
            axes.set_yscale("log")
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    temporary = png_path.with_name(f".{png_path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(png_path)
