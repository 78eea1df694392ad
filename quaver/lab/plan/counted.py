"""The seconds of a layout's block from the kernels that Inductor writes for its GPU: the ledger of one rank.

The trainer's own code makes, converts and parallelizes a model of one block on the first rank of the layout; the block
is compiled as `quaver bench ledger` compiles one, and each launch takes what its bytes and FLOPs take. Formulas have
the rest: what checkpointing recomputes (in the same ratio), the output projection and the embedding. Collectives inside
the block are the simulation's.
"""

from __future__ import annotations

from dataclasses import replace

from quaver.lab.bench.ledger.entries import LedgerEntry, entries_of
from quaver.lab.bench.ledger.subjects import check_triton
from quaver.lab.bench.ledger.times import seconds_of
from quaver.lab.memory.compiling.gpu_code import GPUS, record_compiled
from quaver.lab.memory.compiling.launches import CompiledGraph
from quaver.lab.memory.faking.fakes import Fakes
from quaver.lab.memory.faking.gpu import as_on_a_gpu
from quaver.lab.memory.runs.predict import fake_run, with_depth
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute import BlockTimes, linear_time, weights_of_block
from quaver.lab.plan.run import PlannedRun
from quaver.lab.plan.step import Costs
from quaver.lab.settings import ActivationCheckpoint, TrainConfig
from quaver.roofline.device_specs import DeviceSpec

_COLLECTIVES = "_c10d_functional."


def check_counts_for(spec: DeviceSpec) -> None:
    """Refuse a device for which no code is written.

    Raises:
        ValueError: triton is not installed.
        NotImplementedError: another device than those of quaver bench ledger.
    """
    check_triton()
    if spec.name not in GPUS:
        raise NotImplementedError(f"--ledger: expected a GPU that is one of {', '.join(GPUS)}, got {spec.name}")


def counted_costs(config: TrainConfig, ranks: int, run: PlannedRun, cluster: Cluster) -> Costs:
    """The costs of a run's micro-batch, with its block counted; seconds to compile it.

    Args:
        run: of `config` on so many ranks.
        cluster: of GPUs that `check_counts_for` accepts.
    Raises:
        NotImplementedError: the block is no single compiled graph, as with experts that ranks split, or blocks differ.
    """
    if parts := [name for name, share in run.in_float8.items() if 0 < share < 1]:
        raise NotImplementedError(f"expected blocks that are alike, got {parts[0]} in float8 in some of them only")
    entries = block_entries(config, ranks, cluster.spec)
    forward, backward = (
        sum(
            seconds_of(each, cluster.spec, by_shape=True, sustained=cluster.sustained)
            for each in entries
            if each.is_backward is is_backward
        )
        for is_backward in (False, True)
    )
    if run.casts_weights_once and not run.float8_gather:  # outside of the block, for all micro-batches
        weights = weights_of_block(run).items()
        forward += sum(linear_time(run, name, *sizes, cluster).weight_casts_s for name, sizes in weights)
    modelled = Costs.of(run, cluster)
    again = modelled.block.recomputed * forward / modelled.block.forward
    return modelled._replace(block=BlockTimes(forward, backward, again))


def block_entries(config: TrainConfig, ranks: int, spec: DeviceSpec) -> tuple[LedgerEntry, ...]:
    """The launches of one compiled block of the first rank, not checkpointed, without collectives.

    Raises:
        NotImplementedError: as `counted_costs`.
    """
    entries = entries_of(block_graphs(config, ranks, spec), GPUS[spec.name].L2_cache_size)
    return tuple(each for each in entries if not each.name.startswith(_COLLECTIVES))


def block_graphs(config: TrainConfig, ranks: int, spec: DeviceSpec) -> list[CompiledGraph]:
    """The forward and the backward of that block.

    Raises:
        NotImplementedError: as `counted_costs`.
    """
    stores = config.activation_checkpoint.store_in_float8
    config = replace(
        with_depth(config, 1),
        training=replace(config.training, compile=True),
        activation_checkpoint=ActivationCheckpoint(mode="none", store_in_float8=stores),
    )
    with as_on_a_gpu(), fake_run(config, ranks, Fakes()) as run:
        return record_compiled(run.step, GPUS[spec.name])
