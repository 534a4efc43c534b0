"""The Pairformer's attention of single representations, as one operator."""
