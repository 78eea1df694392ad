"""Training runs that others measured and published, as published_runs.toml has them: typed and checked.

for run in published():
    print(run.name, run.tokens_per_s_per_gpu, run.source)
"""

import json
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from quaver.lab.settings import Model
from quaver.lab.settings.config_file import load_config
from quaver.recipes.config import Float8LinearRecipeName

FILE = Path(__file__).with_name("published_runs.toml")
TRAIN_CONFIGS = Path(__file__).parents[1] / "train_configs"
RECIPES = ("bfloat16", *(recipe.value for recipe in Float8LinearRecipeName))


@dataclass(frozen=True)
class Published:
    """A training run that its authors measured.

    Raises (when made):
        ValueError: fields contradict each other.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    name: str
    """The group and what sets the run apart in it; no two runs share one."""
    source: str
    model: str
    """The key of `models`."""
    gpu: Literal["A100", "B200", "B200-limited", "H100", "H100-500W", "H100-DGX", "H200", "H800"]
    """A card of quaver/lab/plan/calibration.py."""
    gpus: int
    local_batch: int
    """Sequences of one micro-batch of a data-parallel rank."""
    checkpointing: Literal["none", "selective op", "selective 2", "full"]
    recipe: str
    """bfloat16, or the recipe of quaver whose casts these are."""
    tokens_per_s_per_gpu: float
    note: str = ""
    """What else the source says, and what it does not."""
    assumed: tuple[str, ...] = ()
    """Fields that the source does not state: defaults of its trainer."""
    nodes_of: int = 8
    """GPUs that NVLink connects."""
    network_gbps_per_gpu: float | None = None
    """Gb/s between nodes; None where it is not stated."""
    seq_len: int = 8192
    global_batch: int | None = None
    """Sequences of an optimizer step, over all ranks; None where it is not stated."""
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    pp_virtual: int = 1
    """Stages of a pipeline's rank."""
    pp_schedule: Literal["", "1F1B", "Interleaved1F1B", "DualPipe"] = ""
    ep: int = 1
    """Ranks that split the experts, among those of data parallelism."""
    sharding: Literal["fsdp", "zero2", "zero1"] = "fsdp"
    """zero2: gathered weights stay until the backward. zero1: only the optimizer is sharded, over dp_replicate."""
    async_tp: bool = False
    """Tensor parallel collectives overlap with the matmuls beside them."""
    compiled: bool = False
    """By torch.compile."""
    float8_gather: bool = False
    """Weights are gathered in float8."""
    memory_gib: float | None = None
    """The peak of the fullest GPU, where it is stated: what the allocator of PyTorch reserved."""
    loss: Literal["", "float32", "compiled"] = ""
    """Where memory is stated. float32: cross entropy in eager code, of all logits in float32; compiled: the same,
    compiled."""
    root_has_head: bool = False
    """The output projection is in FSDP2's group of the embedding, whose weights stay gathered."""

    def __post_init__(self) -> None:
        """Check what holds between fields."""
        degrees = self.dp_replicate, self.dp_shard, self.tp, self.cp, self.pp
        self._require(prod(degrees) == self.gpus, f"degrees {degrees} that multiply to {self.gpus} GPUs")
        self._require(self.model in models(), f"a model of {sorted(models())}")
        self._require(self.recipe in RECIPES, f"a recipe of {RECIPES}")
        self._require(self.recipe != "bfloat16" or not self.float8_gather, "float8 where float8_gather is true")
        self._require((self.pp > 1) == bool(self.pp_schedule), "a pp_schedule with pipelines, and none without")
        is_interleaved = self.pp_schedule == "Interleaved1F1B"
        self._require((self.pp_virtual > 1) == is_interleaved, "virtual stages where the schedule is interleaved")
        divides = self.global_batch is None or self.global_batch % (self.local_batch * self.data_parallel) == 0
        self._require(divides, f"a global_batch of whole micro-batches of {self.data_parallel} ranks")
        self._require(self.memory_gib is None or bool(self.loss), "a loss where memory is stated")
        self._require(set(self.assumed) <= {each.name for each in fields(self)}, "assumed: names of fields")

    def _require(self, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: expected {expected}, got {self}")

    @property
    def shape(self) -> Model:
        """The shape of its model."""
        return models()[self.model]

    @property
    def data_parallel(self) -> int:
        """Ranks with different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank; 1 where the global batch is not stated."""
        return 1 if self.global_batch is None else self.global_batch // (self.local_batch * self.data_parallel)


@cache
def models() -> dict[str, Model]:
    """The shapes of the published models: those of train_configs/, and those of the file."""
    ours = {path.stem: load_config(path).model for path in TRAIN_CONFIGS.glob("llama3_*b.toml")}
    return ours | {name: Model(**shape) for name, shape in _content()["models"].items()}


@cache
def published() -> tuple[Published, ...]:
    """All runs, sorted by group.

    Raises:
        ValueError: one of them has a field that is unknown, missing, of another type, or contradicts another.
    """
    runs = []
    for group in _content()["group"]:
        rows = group.pop("runs")
        runs += [_run({**group, **row, "name": f"{group['name']} {row['name']}"}) for row in rows]
    return tuple(runs)


def _run(values: dict[str, Any]) -> Published:
    try:
        # Strict, but for what JSON lacks: tuples.
        return TypeAdapter(Published).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{values['name']}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _content() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
