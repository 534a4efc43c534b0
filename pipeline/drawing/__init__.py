"""Pictures of what a sample holds.

Figures are made with matplotlib's object interface and its Agg canvas, so that nothing depends on a display
or on global state.
"""

from megafold.pipeline.drawing.sample import draw_sample

__all__ = ["draw_sample"]
