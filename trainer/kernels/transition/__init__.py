"""SwiGLU transitions: ``kernel`` on the device, ``fused`` and ``composed`` around it, ``operator``."""
