"""The errors of a run's files, each with a message of one line."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and which ones are intact."""


class OutputError(RuntimeError):
    """A file of the run folder could not be written."""
