"""Runs torchtitan 0.3's Trainer on a CPU with torch 2.13, as each rank's program `titan_trainer.py RESULTS`.

torchtitan is written for a GPU and a newer torch. Replaced here: its device, `set_timeout`, the sum of gradients
without a division, which gloo knows only as a plain sum, and flex attention, which has no backward on a CPU.
RESULTS gets a JSON list with rank 0's report of each run: a tiny Llama on one batch, three steps.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools
from torch.distributed.fsdp import FSDPModule


def divide_after_sum(module: FSDPModule, factor: float, *, set_factor=FSDPModule.set_gradient_divide_factor) -> None:
    module.set_force_sum_reduction_for_comms(True)
    set_factor(module, factor)


memory = {"get_device_name": lambda _: "CPU", "current_device": lambda: 0, "memory_stats": lambda _: {}}
memory |= {"get_device_properties": lambda _: SimpleNamespace(total_memory=1)}
memory |= dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), lambda: None)
# Before the imports below, which take these names from their modules.
tools.device_type, tools.device_module = "cpu", SimpleNamespace(**{**vars(torch.cpu), **memory})
tools.get_local_device = lambda: torch.device("cpu")
dist.set_timeout = lambda timeout, group: None
FSDPModule.set_gradient_divide_factor = divide_after_sum

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from quaver import assert_float8_training, conversion_report  # noqa: E402
from quaver.integrations.torchtitan import Float8LinearConverter  # noqa: E402

PRECISIONS = (None, "rowwise", "tensorwise")
BATCH, SEQUENCE, STEPS = 4, 32, 3


class OneBatch(BaseDataLoader):
    """The same tokens at every step, divided among the ranks of data parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, dp_world_size, **_):
        tokens = torch.randint(64, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
        self.tokens = tokens.chunk(dp_world_size)[dp_rank]

    def __iter__(self):
        while True:
            yield {"input": self.tokens[:, :-1]}, self.tokens[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoTokenizer(BaseTokenizer):
    """The tokens need none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = get_vocab_size = encode


def train(recipe: str | None, folder: str, world: int, tp: int, gather: bool) -> dict:
    converter = Float8LinearConverter.Config(recipe_name=str(recipe), enable_fsdp_float8_all_gather=gather)
    spec = model_registry("debugmodel", converters=[converter] if recipe else None)
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    shards = world // tp
    degrees = {"data_parallel_shard_degree": shards, "tensor_parallel_degree": tp}
    parts = {"loss": CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)), "debug": DebugConfig(seed=0)}
    parts |= {"tokenizer": NoTokenizer.Config(), "dataloader": OneBatch.Config(), "optimizer": default_adamw(lr=1e-3)}
    parts |= {"training": TrainingConfig(local_batch_size=BATCH // shards, seq_len=SEQUENCE, steps=STEPS)}
    parts |= {"parallelism": ParallelismConfig(**degrees, spmd_backend="partial_dtensor")}
    parts |= {"metrics": MetricsProcessor.Config(log_freq=1)}
    trainer = Trainer.Config(model_spec=spec, dump_folder=folder, **parts).build()
    logged = []
    trainer.metrics_processor.logger.log = lambda metrics, step: logged.append(metrics)
    trainer.train()
    (model,) = trainer.model_parts
    if recipe:
        assert_float8_training(model, *trainer.optimizers)
    report = conversion_report(model)
    weight = model.layers["0"].feed_forward.w1.weight
    result = {"recipe": recipe, "tp": tp, "gather": gather, "float8": len(report.converted)}
    result |= {"losses": [metrics["loss_metrics/global_avg_loss"] for metrics in logged]}
    result |= {"mfu": any("mfu(%)" in metrics for metrics in logged)}
    result |= {"high precision": [layer.name for layer in report.layers if not layer.converted]}
    result |= {"backends": sorted({layer.backend for layer in report.converted})}
    return result | {"gathers float8": hasattr(weight.to_local(), "fsdp_pre_all_gather")}


def main(results: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    runs = [(recipe, 1, False) for recipe in PRECISIONS]
    if world > 1:
        runs += [*((recipe, 1, True) for recipe in PRECISIONS[1:]), *((recipe, world, False) for recipe in PRECISIONS)]
    with TemporaryDirectory() as folder:
        reports = [train(recipe, folder, world, tp, gather) for recipe, tp, gather in runs]
    if dist.get_rank() == 0:
        results.write_text(json.dumps(reports))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
