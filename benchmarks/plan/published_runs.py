"""Training runs that others measured and published: reads and checks published_runs.toml.

for run in load_published():
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
TRAIN_CONFIGS = Path(__file__).parents[2] / "train_configs"
RECIPES = ("bfloat16", *(recipe.value for recipe in Float8LinearRecipeName))


@dataclass(frozen=True)
class Published:
    """A training run that its authors measured.

    Raises (when made):
        ValueError: fields contradict each other.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    name: str
    """The group, and what distinguishes the run in it. Names are unique."""
    source: str
    model: str
    """The key of `models`."""
    gpu: Literal["A100", "B200", "B200-limited", "H100", "H100-500W", "H100-DGX", "H200", "H800"]
    """A GPU of `published.CALIBRATED_GPUS`."""
    gpus: int
    local_batch: int
    """Sequences of one microbatch of a data-parallel rank."""
    checkpointing: Literal["none", "selective op", "selective 2", "full"]
    recipe: str
    """bfloat16, or the recipe of quaver with the same casts."""
    tokens_per_s_per_gpu: float
    note: str = ""
    """Further facts that the source states or leaves out."""
    assumed: tuple[str, ...] = ()
    """Fields that the source does not state: defaults of its trainer."""
    gpus_per_node: int = 8
    """GPUs that NVLink connects."""
    network_gbps_per_gpu: float | None = None
    """Gb/s between nodes; None if the source does not state it."""
    seq_len: int = 8192
    global_batch: int | None = None
    """Sequences of an optimizer step, over all ranks; None if the source does not state it."""
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
    """The model is compiled by torch.compile."""
    float8_all_gather: bool = False
    """Weights are gathered in float8."""
    memory_gib: float | None = None
    """The peak memory that PyTorch's allocator reserved on the fullest GPU; None if the source does not state it."""
    loss: Literal["", "float32", "compiled"] = ""
    """Set if memory is stated. float32: eager cross entropy of all logits in float32. compiled: the same, compiled."""
    root_has_head: bool = False
    """The output projection is in FSDP2's group of the embedding, whose weights stay gathered."""

    def __post_init__(self) -> None:
        """Check that the fields do not contradict each other."""
        degrees = self.dp_replicate, self.dp_shard, self.tp, self.cp, self.pp
        self._require(prod(degrees) == self.gpus, f"degrees {degrees} that multiply to {self.gpus} GPUs")
        self._require(self.model in load_models(), f"a model of {sorted(load_models())}")
        self._require(self.recipe in RECIPES, f"a recipe of {RECIPES}")
        self._require(self.recipe != "bfloat16" or not self.float8_all_gather, "float8 where float8_all_gather is true")
        self._require((self.pp > 1) == bool(self.pp_schedule), "a pp_schedule with pipelines, and none without")
        is_interleaved = self.pp_schedule == "Interleaved1F1B"
        self._require((self.pp_virtual > 1) == is_interleaved, "virtual stages where the schedule is interleaved")
        divides = self.global_batch is None or self.global_batch % (self.local_batch * self.data_parallel) == 0
        self._require(divides, f"a global_batch of whole microbatches of {self.data_parallel} ranks")
        self._require(self.memory_gib is None or bool(self.loss), "a loss where memory is stated")
        self._require(set(self.assumed) <= {field.name for field in fields(self)}, "assumed: names of fields")

    def _require(self, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: expected {expected}, got {self}")

    @property
    def shape(self) -> Model:
        """The shape of the model."""
        return load_models()[self.model]

    @property
    def data_parallel(self) -> int:
        """The number of ranks with different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def micro_batches(self) -> int:
        """Microbatches of a step on each rank; 1 if the global batch is not stated."""
        return 1 if self.global_batch is None else self.global_batch // (self.local_batch * self.data_parallel)


@cache
def load_models() -> dict[str, Model]:
    """Return the shapes of the published models, from train_configs/ and from the file."""
    ours = {path.stem: load_config(path).model for path in TRAIN_CONFIGS.glob("llama3_*b.toml")}
    return ours | {name: Model(**shape) for name, shape in _read_content()["models"].items()}


@cache
def load_published() -> tuple[Published, ...]:
    """Return all runs, in the order of the file.

    Raises:
        ValueError: a field of a run is unknown, missing, has a wrong type, or contradicts another field.
    """
    runs = []
    for group in _read_content()["group"]:
        rows = group.pop("runs")
        runs += [parse_run({**group, **row, "name": f"{group['name']} {row['name']}"}) for row in rows]
    return tuple(runs)


def parse_run(values: dict[str, Any]) -> Published:
    try:
        # From JSON, because strict validation then accepts a list as a tuple.
        return TypeAdapter(Published).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{values['name']}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _read_content() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
