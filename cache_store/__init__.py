"""The content-addressed store: digests, immutable Zarr objects, manifests, refs. It knows no biology."""
