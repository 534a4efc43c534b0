"""The bundled AlphaFold3-style trainer: model, losses, loop, kernels."""
