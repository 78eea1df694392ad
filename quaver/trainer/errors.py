"""How a run ends that can not go on, each with a message of one line."""


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm was not finite, so training stopped; the message names the first culprit."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what is still good."""


class OutputError(RuntimeError):
    """A file of the run folder could not be written."""
