"""Two runs whose memory is compared: the flags of the first, and those that the other has over them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quaver.memory.faking.target import is_for_a_gpu
from quaver.memory.predict import Prediction
from quaver.trainer.config import TrainConfig
from quaver.trainer.config_io import load_config, parse_arguments
from quaver.memory.runs.module import predict_module
from quaver.memory.runs.predict import predict_memory

_OF_NO_STEP = ("job", "lr_scheduler", "validation", "metrics", "profiling", "checkpoint", "comm")
"""Sections that change nothing in a training step's memory."""

Flags = dict[str, Any]
"""Values by the name of their setting, such as "training.compile"."""


@dataclass(frozen=True)
class Case:
    """Two runs: one of these flags, and the same one with `vs` over them; or one module of each."""

    path: Path | None
    flags: Flags
    vs: Flags
    ranks: int = 1
    module: str = ""
    """Empty for the whole model."""

    def config(self, *, other: bool) -> TrainConfig:
        """The settings of the first run, or of the other one.

        Raises:
            ValueError, OSError: what `load_config` does.
        """
        sections: dict[str, Flags] = {}
        for name, value in {**self.flags, **(self.vs if other else {})}.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        return load_config(self.path, sections)

    def predict(self, *, other: bool) -> Prediction:
        """Predict one of the two."""
        config = self.config(other=other)
        if self.module:
            return predict_module(config, self.module, self.ranks).prediction
        return predict_memory(config, self.ranks).prediction

    def with_flags(self, **flags: Any) -> Case:
        """The same with other flags, written with two underscores for the dot; not where `vs` has them."""
        now, changed = self.config(other=False), {}
        for name, value in flags.items():
            section, _, key = name.partition("__")
            if f"{section}.{key}" not in self.vs and getattr(getattr(now, section), key) != value:
                changed[f"{section}.{key}"] = value
        return replace(self, flags={**self.flags, **changed})

    @property
    def command(self) -> str:
        """What prints the difference."""
        words = ["quaver", "memory", *([] if self.path is None else [str(self.path)]), *words_of(self.flags)]
        words += ["--ranks", str(self.ranks)] * (self.ranks > 1)
        words += [] if is_for_a_gpu() else ["--device", "cpu"]
        words += ["--module", self.module] * bool(self.module)
        return shlex.join([*words, "--vs", shlex.join(words_of(self.vs))])


def case_of(words: Sequence[str], vs: Sequence[str], ranks: int = 1) -> Case:
    """The case of two runs.

    Args:
        words: of the first, as `quaver train` takes them.
        vs: flags over those; or, beginning with a file, all words of the other run.
    Raises:
        ValueError, OSError: what `parse_arguments` and `load_config` do.
    """
    path, sections = parse_arguments(list(words))
    flags = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    is_over = not vs or vs[0].startswith("--")
    first = load_config(path, sections)
    other = load_config(*parse_arguments([*words, *vs] if is_over else list(vs)))
    differ = _settings_that_differ(first, other)
    case = Case(path, flags, differ, ranks)
    in_step = {name: value for name, value in differ.items() if name.partition(".")[0] not in _OF_NO_STEP}
    try:
        replace(case, vs=in_step).config(other=True)
    except ValueError:  # one of the others is necessary for one of these
        return case
    return replace(case, vs=in_step)


def _settings_that_differ(first: TrainConfig, other: TrainConfig) -> Flags:
    values, others = asdict(first), asdict(other)
    return {
        f"{section}.{name}": value
        for section, settings in others.items()
        for name, value in settings.items()
        if value != values[section][name]
    }


def words_of(flags: Flags) -> list[str]:
    """The flags as `parse_arguments` reads them."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words += [f"--{name}", str(value).lower()]
        elif isinstance(value, (list, tuple)):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]
    return words
