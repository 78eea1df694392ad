"""[job] and [metrics]: where the run is kept, and what is recorded and shown of it."""

from dataclasses import dataclass

from quaver.trainer.config.require import is_folder_name, require, require_default, require_finite, require_positive


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
        fix = "put parent folders in job.dump_folder"
        require(is_folder_name(self.name), "job.name", "the name of one folder", self.name, fix)
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

    loss_spike_deviations: float = 6.0
    """A loss that is so many robust standard deviations above the median of the 64 before it is noted as a spike; 0
    never."""
    enable_tensorboard: bool = False
    """Write TensorBoard events too, to save_tb_folder (pip install 'quaver[tensorboard]')."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard events inside the run folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases too (pip install 'quaver[wandb]'); WANDB_MODE=offline keeps it here."""
    wandb_project: str = "quaver"
    """Project of the run there."""

    def __post_init__(self) -> None:
        require_positive("metrics", self, "log_freq")
        require_finite("metrics", self, "loss_spike_deviations")
        for name, owner in (("save_tb_folder", "enable_tensorboard"), ("wandb_project", "enable_wandb")):
            require(bool(getattr(self, name)), f"metrics.{name}", "a name", getattr(self, name))
            if not getattr(self, owner):
                require_default("metrics", self, name, f"metrics.{owner}")
        require(self.float8_scales_freq >= 0, "metrics.float8_scales_freq", "not negative", self.float8_scales_freq)
        require(
            self.float8_scales_freq > 0 or not self.plot_float8_scales,
            "metrics.float8_scales_freq",
            "at least 1 with metrics.plot_float8_scales",
            self.float8_scales_freq,
            "the picture is drawn from what is written",
        )
