"""Errors that a user's input can cause. Each says which file or entry, and what to do."""


class MegafoldError(Exception):
    """Base of every error that is told to the user without a traceback."""


class InputError(MegafoldError):
    """An input that cannot be used.

    ``reason`` is a short stable slug (``unknown-component``): the class under which the failures ledger
    counts it.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions travel from Dask workers to the client: pickling must keep the keyword argument.
        return (_restore, (type(self), str(self), self.reason))


def _restore(kind: type[InputError], message: str, reason: str) -> InputError:
    return kind(message, reason=reason)


class StructureError(InputError):
    """A structure file that cannot be read or featurized."""


class AlignmentError(InputError):
    """An alignment file that cannot be read or does not belong to its chain."""


class TemplateError(InputError):
    """A template hit file or template structure that cannot be used."""


class ComponentError(InputError):
    """A chemical component that cannot be found or understood."""
