"""Adaptive layer norm (algorithm 26): ``kernel`` on the device, ``operator`` around it."""
