"""[job] and [metrics]: where the run is kept, and what is recorded and shown of it."""

from dataclasses import dataclass

from quaver.trainer.config.settings import AtLeast1, FiniteNotNegative, NotNegative, Settings, is_folder_name


@dataclass(frozen=True)
class Job(Settings, section="job"):
    """Where the run is written, and whether a bfloat16 baseline trains with it."""

    name: str = ""
    """Folder of the run inside dump_folder; empty for one named by recipe and time."""
    dump_folder: str = "runs"
    """Folder of all runs."""
    compare: bool = False
    """Also train a bfloat16 baseline from the same weights on the same data (short: --compare)."""

    def check(self) -> None:
        """Refuse paths where a name is needed, and empty folders."""
        fix = "put parent folders in job.dump_folder"
        self.require(is_folder_name(self.name), "name", "the name of one folder", fix)
        self.require(bool(self.dump_folder), "dump_folder", "a folder")


@dataclass(frozen=True)
class Metrics(Settings, section="metrics"):
    """What is printed and logged; metrics.jsonl always has every step."""

    log_freq: AtLeast1 = 10
    """Steps between two printed lines where no terminal shows a progress bar."""
    float8_scales_freq: NotNegative = 1
    """Delayed recipes: steps between two lines of float8_scales.jsonl (scale, amax and saturation per tensor); 0
    never."""
    plot_float8_scales: bool = False
    """Delayed recipes: draw float8_scales.png from them at the end."""
    loss_spike_deviations: FiniteNotNegative = 6.0
    """A loss this many robust standard deviations above the median of the last 64 is a spike; 0 never."""
    enable_tensorboard: bool = False
    """Write TensorBoard events too (pip install 'quaver[tensorboard]')."""
    save_tb_folder: str = "tb"
    """Their folder inside the run folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases too (pip install 'quaver[wandb]'); WANDB_MODE=offline keeps it local."""
    wandb_project: str = "quaver"
    """Project of the run there."""

    def check(self) -> None:
        """Refuse names that no logger would read, and a plot without its data."""
        for name, owner in (("save_tb_folder", "enable_tensorboard"), ("wandb_project", "enable_wandb")):
            self.require(bool(getattr(self, name)), name, "a name")
            if not getattr(self, owner):
                self.require_default(name, unless=f"metrics.{owner}")
        self.require(
            self.float8_scales_freq > 0 or not self.plot_float8_scales,
            "float8_scales_freq",
            "at least 1 with metrics.plot_float8_scales",
            "the picture is drawn from what is written",
        )
