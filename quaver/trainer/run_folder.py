"""The folder of one run: made once, never over an older run, and every file that goes into it."""

import itertools
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quaver.trainer.config import TrainConfig
from quaver.trainer.config_io import write_config


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run; `create` is the way to get one."""

    path: Path

    @classmethod
    def create(cls, config: TrainConfig) -> "RunFolder":
        """Make dump_folder/name and write the resolved config there.

        Raises:
            FileExistsError: if the folder holds files already.
            OSError: if it cannot be made or written.
        """
        dump_folder = Path(config.job.dump_folder).expanduser()
        path = dump_folder / config.job.name if config.job.name else _unused_path(dump_folder, config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            is_used = any(path.iterdir())
            if not is_used:
                write_config(config, path / "config.toml")
        except OSError as error:
            raise type(error)(
                f"cannot write the run folder {str(path)!r}: {error.strerror or error}; give another job.dump_folder"
            ) from error
        if is_used:
            raise FileExistsError(f"the run folder {str(path)!r} has files already; give another job.name or remove it")
        return cls(path)

    @property
    def metrics(self) -> Path:
        """One JSON object per line, one line per step and twin, and per validation."""
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> Path:
        """The plot."""
        return self.path / "curves.png"

    @property
    def float8_scales(self) -> Path:
        """One JSON object per line, one line per recorded step: the kept scales; see scales.py."""
        return self.path / "float8_scales.jsonl"

    @property
    def float8_scales_plot(self) -> Path:
        """The picture of them."""
        return self.path / "float8_scales.png"

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write `value` to the file `name`, replacing it in one move so that no reader sees half of it."""
        partial = self.path / f".{name}.partial"
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(self.path / name)


def _unused_path(dump_folder: Path, config: TrainConfig) -> Path:
    precision = config.training.mixed_precision_param
    if config.float8.enable_float8_linear:
        precision = config.float8.recipe_name
    compared = "-compare" if config.job.compare else ""
    name = f"{precision}{compared}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (dump_folder / (name + (f"-{count}" if count > 1 else "")) for count in itertools.count(1))
    return next(path for path in candidates if not path.exists())
