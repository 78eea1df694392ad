"""The simulated step of a small model against real steps of gloo ranks on this machine: a test of bookkeeping.

    python -m benchmarks.plan.local_ranks            # 1, 2 and 4 ranks, one thread each; about a minute

Compute and collectives are measured separately, on all ranks at once: steps of an unsharded model, and all-gathers and
reduce-scatters of the size of a block. The simulation adds their number, order and overlap. gloo runs on the cores that
compute, so the simulated range has two ends: all communication overlaps as on a GPU, or none does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quaver.lab.memory.train_step.predict_run import make_train_step
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute_time import BlockTimes
from quaver.lab.plan.planned_run import make_planned_run
from quaver.lab.plan.simulate import simulate
from quaver.lab.plan.step import ComputeTimes, build_tasks, list_block_groups
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import Float8, Model, Parallelism, TrainConfig, Training
from quaver.lab.settings.parallel_dims import ParallelDims, resolve_parallel_dims
from quaver.lab.trainer.run_setup import make_models
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.roofline.block import PerPass
from quaver.roofline.device_specs import find_device_spec

CPU = torch.device("cpu")
STEPS, WARM_UP = 9, 3


@dataclass(frozen=True)
class MeasuredCluster(Cluster):
    """A cluster whose collectives take the measured seconds per byte, by kind."""

    per_byte: Mapping[str, float] = field(default_factory=dict)

    def predict_collective_seconds(self, kind: str, tensor_bytes: float, ranks: int, stride: int = 1) -> float:
        return 0.0 if ranks == 1 else self.per_byte[kind] * tensor_bytes


def make_config() -> TrainConfig:
    """Return a bfloat16 model of the debug config's width, with more blocks and few tokens: communication matters."""
    return TrainConfig(
        model=Model(dim=256, n_layers=6, n_heads=4, n_kv_heads=2, hidden_dim=768),
        training=Training(seq_len=128, local_batch_size=2, device="cpu", steps=1000),
        parallelism=Parallelism(),
        float8=Float8(enable_float8_linear=False),
    )


def time_median(call: Callable[[], object]) -> float:
    """Return the median seconds of STEPS calls after WARM_UP calls, with a barrier before each."""
    times = []
    for number in range(WARM_UP + STEPS):
        dist.barrier()
        start = time.perf_counter()
        call()
        if number >= WARM_UP:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(rank: int, ranks: int, port: int, results: torch.multiprocessing.SimpleQueue) -> None:
    """Measure a real step and its parts on one rank. Rank 0 puts the results into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    config = make_config()
    resolved, dims = resolve_parallel_dims(config, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",)) if ranks > 1 else None
    real = time_median(_make_step(resolved, dims, mesh, rank, ranks))
    alone, alone_dims = resolve_parallel_dims(config, world_size=1)
    parts = _measure_unsharded_steps(alone, alone_dims)
    group = list_block_groups(make_planned_run(resolved, dims))[0]
    per_byte = _time_per_byte(int(group.gathered_bytes), group.parameters, ranks) if ranks > 1 else {}
    if rank == 0:
        results.put((real, parts, per_byte))
    dist.barrier()
    dist.destroy_process_group()


def _time_per_byte(gathered_bytes: int, parameters: int, ranks: int) -> dict[str, float]:
    """Return the seconds per byte of the collectives of a block, and of an all-reduce of one number."""
    whole = torch.empty(gathered_bytes // ranks * ranks, dtype=torch.uint8)
    gradients, number = torch.empty(parameters // ranks * ranks), torch.zeros(1)
    part, sums = whole[: len(whole) // ranks].clone(), gradients[: len(gradients) // ranks].clone()
    return {
        "all_gather": time_median(lambda: dist.all_gather_into_tensor(whole, part)) / len(whole),
        "reduce_scatter": time_median(lambda: dist.reduce_scatter_tensor(sums, gradients)) / (4 * len(gradients)),
        "all_reduce": time_median(lambda: dist.all_reduce(number)) / 4,
    }


def _make_step(
    config: TrainConfig, dims: ParallelDims, mesh: DeviceMesh | None, rank: int, ranks: int
) -> Callable[[], object]:
    trained = TrainedModel.build(*make_models(config, CPU).first, config, CPU, Ranks(rank, 0, ranks), mesh)
    return make_train_step(trained, config, dims)[0]


def _measure_unsharded_steps(config: TrainConfig, dims: ParallelDims) -> dict[str, float]:
    """Return the seconds of a step of the unsharded model, and of one with two blocks."""
    seconds = {}
    for blocks in (2, config.model.n_layers):
        changed = replace(config, model=replace(config.model, n_layers=blocks))
        seconds[blocks] = time_median(_make_step(changed, dims, None, 0, 1))
    return {"few": seconds[2], "whole": seconds[config.model.n_layers]}


def main() -> None:
    """Print real and simulated seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks to measure")
    options = parser.parse_args()
    spec = find_device_spec("h100")
    assert spec is not None
    print("| ranks | real step ms | simulated ms | ratio |\n| --- | --- | --- | --- |")
    for ranks in options.ranks:
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (ranks, 29511 + ranks, results)
        torch.multiprocessing.start_processes(measure, arguments, nprocs=ranks, start_method="spawn")
        real, parts, per_byte = results.get()
        resolved, dims = resolve_parallel_dims(make_config(), world_size=ranks)
        run = make_planned_run(resolved, dims)
        block = (parts["whole"] - parts["few"]) / (run.model.n_layers - 2)
        rest = parts["few"] - 2 * block
        cluster = MeasuredCluster(replace(spec, memory_gb_per_s=1e9), per_byte=per_byte)
        compute_times = ComputeTimes(
            BlockTimes(block / 3, 2 * block / 3, 0.0), PerPass(rest / 3, 2 * rest / 3), PerPass(0, 0)
        )
        tasks = build_tasks(run, cluster, compute_times)
        hidden, exposed = simulate(tasks, contention=0.0).seconds, sum(task.seconds for task in tasks)
        times = f"{1e3 * real:.1f} | {1e3 * hidden:.1f} to {1e3 * exposed:.1f}"
        print(f"| {ranks} | {times} | {hidden / real:.2f} to {exposed / real:.2f} |", flush=True)


if __name__ == "__main__":
    main()
