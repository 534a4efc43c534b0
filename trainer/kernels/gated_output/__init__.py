"""The gated output projection of attention, with its dropout and residual."""
