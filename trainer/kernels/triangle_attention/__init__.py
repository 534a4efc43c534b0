"""Triangle attention as one operator: projections after the layer norm, EvoFlash-3D, gated output."""
