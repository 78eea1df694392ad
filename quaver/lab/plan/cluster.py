"""Models a cluster: the seconds that a collective takes on it.

A collective takes the fastest of NCCL's protocols, by NCCL's own model of its ring algorithm (github.com/NVIDIA/nccl
2.30, src/graph/tuning.cc):

    seconds = start + (steps - between nodes) * hop inside + between nodes * hop outside + sent bytes / rate.

With n ranks on k nodes there are n - 1 steps, k - 1 of them between nodes. An all-reduce has twice as many, or the
tree's 2 log2(k) between nodes. quaver/roofline/sent_bytes.py counts the sent bytes. The rate is the slowest link's:
NVLink inside a node; between nodes one network interface per rank of the group in a node, with a ring over each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from quaver.lab.plan.calibration import get_sustained_share
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.sent_bytes import RING_PASSES, count_sent_bytes


class NcclProtocol(NamedTuple):
    """A protocol of NCCL: the seconds for a ring's start and for a hop, and the share of a link's rate."""

    start_s: float
    hop_in_node_s: float
    hop_between_nodes_s: float
    rate_share: float
    max_gb_per_s: float = float("inf")


NCCL_PROTOCOLS = (
    NcclProtocol(6.6e-6, 0.6e-6, 2.7e-6, 0.5, 141.0),  # LL, with its largest rate on Hopper
    NcclProtocol(14.0e-6, 1.9e-6, 4.0e-6, 0.92),  # LL128
    NcclProtocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0),  # Simple
)
"""tuning.cc: baseLat of the ring, hwLat of NVLINK and NET, and each protocol's share of the bus bandwidth."""

LINK_SHARE = 0.80
"""Share of NVLink's data sheet that a ring reaches on 8 GPUs: 361 GB/s of 450 in an all-gather on H200s, 677 of 900 on
B200s ("Machine Learning Engineering", network); XLA's table for sm_90 has 342 (all-gather) and 319 (reduce-scatter)."""

NETWORK_SHARE = 0.94
"""Share of a network interface's rate: 47 of 50 GB/s (NVIDIA/nccl-tests#290), 188 of 200 on two nodes of 8 x 200
Gb/s."""

ALL_TO_ALL_NETWORK_SHARE = 0.85
"""Share of a network interface's rate in an all-to-all, which has no ring: DeepEP reaches 43 of 50 GB/s on two nodes.
Inside a node it reaches 153 to 158 of an H800's 200 GB/s, which is LINK_SHARE."""

NVLINK, NETWORK = "NVLink", "network"


@dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal nodes, with the rates of their links and of their storage."""

    spec: DeviceSpec
    gpus_per_node: int = 8
    network_gbit_per_s: float = 400.0
    """Gigabits per second of each GPU's network interface, in one direction."""
    sustained_share: float = 1.0
    """The share of the best matmul rate that a long run sustains; see calibration.py."""
    storage_gb_per_s: float = 1.0
    """The rate at which each node writes while all nodes do. Llama 3: 2 TB/s sustained and 7 TB/s at best for 16,384
    GPUs in nodes of 8 (arXiv 2407.21783, section 3.3.1)."""

    @classmethod
    def from_spec(
        cls, spec: DeviceSpec, gpus_per_node: int = 8, network_gbit_per_s: float = 400.0, storage_gb_per_s: float = 1.0
    ) -> Cluster:
        """Make a cluster of devices whose `sustained_share` is calibrated."""
        return cls(spec, gpus_per_node, network_gbit_per_s, get_sustained_share(spec), storage_gb_per_s)

    def count_nodes(self, ranks: int, stride: int) -> int:
        """Return the number of nodes that a group of `ranks`, `stride` apart, spans."""
        return max(1, ceil(ranks / max(1, self.gpus_per_node // stride))) if ranks > 1 else 1

    def find_link(self, ranks: int, stride: int) -> str:
        """Return the link that limits a group: NVLink inside a node, otherwise the network."""
        return NVLINK if self.count_nodes(ranks, stride) == 1 else NETWORK

    def predict_collective_seconds(self, kind: str, tensor_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return the time of a collective of `ranks` that are `stride` apart.

        `count_sent_bytes` describes `kind` and `tensor_bytes`.
        """
        if ranks == 1:
            return 0.0
        nodes = self.count_nodes(ranks, stride)
        per_node = ranks / nodes
        sent_bytes = count_sent_bytes(kind, tensor_bytes, ranks)
        nvlink_gb_per_s, network_gb_per_s = (
            self.spec.link_gb_per_s * LINK_SHARE,
            self.network_gbit_per_s / 8 * NETWORK_SHARE,
        )
        if kind == "all_to_all":
            return self._predict_all_to_all_seconds(tensor_bytes, ranks, nodes, nvlink_gb_per_s)
        gb_per_s = nvlink_gb_per_s if nodes == 1 else min(nvlink_gb_per_s, per_node * network_gb_per_s)
        return min(
            protocol.start_s
            + RING_PASSES.get(kind, 1) * (ranks - nodes) * protocol.hop_in_node_s
            + self._count_hops_between_nodes(kind, nodes) * protocol.hop_between_nodes_s
            + sent_bytes / (1e9 * min(protocol.rate_share * gb_per_s, protocol.max_gb_per_s))
            for protocol in NCCL_PROTOCOLS
        )

    @staticmethod
    def _count_hops_between_nodes(kind: str, nodes: int) -> float:
        if kind == "all_reduce":
            return 2 * min(nodes - 1, log2(nodes)) if nodes > 1 else 0
        return nodes - 1

    def _predict_all_to_all_seconds(self, tensor_bytes: float, ranks: int, nodes: int, nvlink_gb_per_s: float) -> float:
        """Return the time of an all-to-all, in which a rank sends 1 / ranks of its tensor to every other rank."""
        per_node = ranks / nodes
        network_gb_per_s = self.network_gbit_per_s / 8 * ALL_TO_ALL_NETWORK_SHARE
        in_node_ns = tensor_bytes * (per_node - 1) / ranks / nvlink_gb_per_s
        between_nodes_ns = tensor_bytes * (ranks - per_node) / ranks / network_gb_per_s
        simple = NCCL_PROTOCOLS[-1]
        hop_s = simple.hop_between_nodes_s if nodes > 1 else simple.hop_in_node_s
        return simple.start_s + hop_s + max(in_node_ns, between_nodes_ns) / 1e9
