"""The errors that end a run, each with a message of one line."""


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm was not finite; the message names the first non-finite operand."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and which ones are intact."""


class OutputError(RuntimeError):
    """A file of the run folder could not be written."""
