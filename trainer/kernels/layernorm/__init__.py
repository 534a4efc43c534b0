"""Layer normalisation: ``kernel`` on the device, ``operator`` around it."""
