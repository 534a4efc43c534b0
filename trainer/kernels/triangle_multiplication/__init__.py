"""Triangle multiplication: gated projections, batched product and gated output in three passes."""
