"""[data] and [validation]: the text, and how often a part of it measures the model."""

from dataclasses import dataclass

from quaver.trainer.config.require import require, require_positive


@dataclass(frozen=True)
class Data:
    """The text."""

    path: str = "stdlib"
    """A text file, a folder of text files, or stdlib: the sources of Python's own library (short: --data)."""

    def __post_init__(self) -> None:
        require(bool(self.path), "data.path", "stdlib, a file or a folder", self.path)


@dataclass(frozen=True)
class Validation:
    """The same sequences of the validation split, every time."""

    freq: int = 50
    """Steps between two validations; the last step always has one."""
    steps: int = 8
    """Batches of local_batch_size sequences in one validation."""
    high_precision_too: bool = False
    """Also report validation_loss_hp: the same weights with every linear in high precision. Not with tensor parallelism
    or float8.enable_fsdp_float8_all_gather, whose inputs and weights travel in float8."""

    def __post_init__(self) -> None:
        require_positive("validation", self, "freq", "steps")
