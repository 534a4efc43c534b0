"""The build: from a corpus to a snapshot in the cache, and the check of it."""
