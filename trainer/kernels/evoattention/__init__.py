"""EvoFlash-3D: attention with pair bias in O(N²) memory."""
