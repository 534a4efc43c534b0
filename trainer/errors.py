"""Errors of the trainer. Messages name the file or setting at fault and what to do about it."""


class TrainerError(Exception):
    """Anything the trainer raises on purpose."""


class ConfigError(TrainerError, ValueError):
    """A setting that cannot be used."""


class CheckpointError(TrainerError):
    """A checkpoint that is missing, cannot be read or written, or belongs to another model or other data."""


class DataError(TrainerError):
    """Batches that lack a feature, or a data set that yields none."""


class DivergedError(TrainerError):
    """Too many steps in a row had a loss or gradient that is not finite."""
