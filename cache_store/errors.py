"""Errors of the store. Each names the object or file, and what to do."""


class CacheError(Exception):
    """Base of everything a cache can refuse or be found guilty of."""
