"""A linear layer of a layer norm: ``kernel`` on the device, ``launches`` and ``operator`` around it."""
