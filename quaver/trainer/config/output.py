"""[job] and [metrics]: where the run is kept, and what is recorded and shown of it."""

from dataclasses import dataclass

from quaver.trainer.config.require import require, require_positive


@dataclass(frozen=True)
class Job:
    """Where the run is kept, and whether it has a twin."""

    name: str = ""
    """Folder of the run inside dump_folder; empty makes one from the recipe and the time."""
    dump_folder: str = "runs"
    """Folder that holds the runs."""
    compare: bool = False
    """Also train the bfloat16 twin, from the same weights on the same data (short: --compare)."""

    def __post_init__(self) -> None:
        plain = self.name not in (".", "..") and not any(sep in self.name for sep in "/\\")
        require(plain, "job.name", "the name of one folder", self.name, "put parent folders in job.dump_folder")
        require(bool(self.dump_folder), "job.dump_folder", "a folder", self.dump_folder)


@dataclass(frozen=True)
class Metrics:
    """What is shown; metrics.jsonl gets every step whatever this says."""

    log_freq: int = 10
    """Steps between two printed lines where there is no terminal for a progress bar."""
    float8_scales_freq: int = 1
    """With delayed scaling: steps between two lines of float8_scales.jsonl, which has every tensor's scale, amax and
    saturation; 0 never."""
    plot_float8_scales: bool = False
    """With delayed scaling: draw float8_scales.png from them when the run ends."""

    def __post_init__(self) -> None:
        require_positive("metrics", self, "log_freq")
        require(self.float8_scales_freq >= 0, "metrics.float8_scales_freq", "not negative", self.float8_scales_freq)
        require(
            self.float8_scales_freq > 0 or not self.plot_float8_scales,
            "metrics.float8_scales_freq",
            "at least 1 with metrics.plot_float8_scales",
            self.float8_scales_freq,
            "the picture is drawn from what is written",
        )
