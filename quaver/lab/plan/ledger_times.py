"""The time of a layout's block from the kernels that Inductor generates for its GPU: the ledger of one rank.

The trainer's code makes, converts and parallelizes a model of one block on the first rank of the layout. The block is
compiled as in `quaver bench ledger`, and each launch takes the time of its bytes and FLOPs. Formulas give the rest: the
recomputation (in the same ratio), the output projection and the embedding. The simulation times the collectives.
"""

from __future__ import annotations

from dataclasses import replace

from quaver.lab.bench.ledger.counting import check_triton
from quaver.lab.bench.ledger.entries import LedgerEntry, list_entries
from quaver.lab.bench.ledger.gpu_code import GPU_PROPERTIES, record_compiled
from quaver.lab.bench.ledger.launches import CompiledGraph
from quaver.lab.bench.ledger.times import predict_entry_seconds
from quaver.lab.memory.devices.gpu import simulate_float8_gpu
from quaver.lab.memory.faking.fakes import FakeMode
from quaver.lab.memory.train_step.predict_run import fake_run, with_depth
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute_time import BlockTimes, list_linear_sizes, predict_linear_time
from quaver.lab.plan.planned_run import PlannedRun
from quaver.lab.plan.step import ComputeTimes
from quaver.lab.settings import ActivationCheckpoint, TrainConfig
from quaver.roofline.device_specs import DeviceSpec

_COLLECTIVE_PREFIX = "_c10d_functional."


def check_ledger_gpu(spec: DeviceSpec) -> None:
    """Check that code can be generated for the device.

    Raises:
        InputError: triton is not installed.
        NotImplementedError: `quaver bench ledger` does not know the device.
    """
    check_triton()
    if spec.name not in GPU_PROPERTIES:
        raise NotImplementedError(
            f"--ledger: expected a GPU that is one of {', '.join(GPU_PROPERTIES)}, got {spec.name}"
        )


def predict_ledger_times(config: TrainConfig, ranks: int, run: PlannedRun, cluster: Cluster) -> ComputeTimes:
    """Return the times of a run's microbatch, with the kernels of its block counted. Compiling takes seconds.

    Args:
        run: the run of `config` on `ranks` ranks.
        cluster: a cluster of GPUs that `check_ledger_gpu` accepts.
    Raises:
        NotImplementedError: blocks differ, or are not one compiled graph, as under expert parallelism.
    """
    if parts := [name for name, share in run.float8_shares.items() if 0 < share < 1]:
        raise NotImplementedError(f"expected blocks that are alike, got {parts[0]} in float8 in some of them only")
    entries = list_block_entries(config, ranks, cluster.spec)
    forward, backward = (
        sum(
            predict_entry_seconds(entry, cluster.spec, by_shape=True, sustained_share=cluster.sustained_share)
            for entry in entries
            if entry.is_backward is is_backward
        )
        for is_backward in (False, True)
    )
    if run.casts_weights_once and not run.float8_all_gather:  # outside of the block, for all microbatches
        linears = list_linear_sizes(run.model).items()
        forward += sum(predict_linear_time(run, name, *sizes, cluster).weight_casts_s for name, sizes in linears)
    formulas = ComputeTimes.from_formulas(run, cluster)
    recomputed_s = formulas.block.recomputed * forward / formulas.block.forward
    return formulas._replace(block=BlockTimes(forward, backward, recomputed_s))


def list_block_entries(config: TrainConfig, ranks: int, spec: DeviceSpec) -> tuple[LedgerEntry, ...]:
    """Return the launches of one compiled block of the first rank, not checkpointed, without collectives.

    Raises:
        NotImplementedError: as `predict_ledger_times`.
    """
    entries = list_entries(compile_block(config, ranks, spec), GPU_PROPERTIES[spec.name].L2_cache_size)
    return tuple(entry for entry in entries if not entry.name.startswith(_COLLECTIVE_PREFIX))


def compile_block(config: TrainConfig, ranks: int, spec: DeviceSpec) -> list[CompiledGraph]:
    """Return the compiled forward and backward of one block of the first rank, not checkpointed.

    Raises:
        NotImplementedError: as `predict_ledger_times`.
    """
    stores = config.activation_checkpoint.store_in_float8
    config = replace(
        with_depth(config, 1),
        training=replace(config.training, compile=True),
        activation_checkpoint=ActivationCheckpoint(mode="none", store_in_float8=stores),
    )
    with simulate_float8_gpu(), fake_run(config, ranks, FakeMode()) as run:
        return record_compiled(run.train_step, GPU_PROPERTIES[spec.name])
