"""A cluster, and the seconds of a collective on it.

A collective takes the fastest of NCCL's protocols, by NCCL's own model of its ring algorithm (github.com/NVIDIA/nccl
2.30, src/graph/tuning.cc):

    seconds = start + (steps - between nodes) * hop inside + between nodes * hop outside + sent bytes / rate

with n ranks on k nodes: n - 1 steps, k - 1 of them between nodes, twice as many in an all-reduce; for an all-reduce
between nodes the tree's 2 log2(k). Sent: (n - 1) / n of the tensor, twice that to all-reduce. The rate is that of the
slowest link: inside a node its NVLink, between nodes one network interface for each of a group's ranks in a node, over
which as many rings run.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from quaver.lab.plan.calibration import sustained
from quaver.roofline.device_specs import DeviceSpec


class Protocol(NamedTuple):
    """Seconds to start a ring, of a hop inside and between nodes, and its share of a link's rate."""

    start_s: float
    inside_s: float
    between_s: float
    share: float
    most_gb_per_s: float = float("inf")


PROTOCOLS = (
    Protocol(6.6e-6, 0.6e-6, 2.7e-6, 0.5, 141.0),  # LL; its largest rate is Hopper's
    Protocol(14.0e-6, 1.9e-6, 4.0e-6, 0.92),  # LL128
    Protocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0),  # Simple
)
"""tuning.cc: baseLat of the ring, hwLat of NVLINK and NET, and what each protocol keeps of the bus bandwidth."""

LINK_SHARE = 0.80
"""Share of NVLink's data sheet that a ring reaches on 8 GPUs: 361 GB/s of 450 in an all-gather on H200s, 677 of 900 on
B200s ("Machine Learning Engineering", network); XLA's table for sm_90 has 342 (all-gather) and 319 (reduce-scatter)."""

NETWORK_SHARE = 0.94
"""Share of a network interface's rate: 47 of 50 GB/s (NVIDIA/nccl-tests#290), 188 of 200 on two nodes of 8 x 200
Gb/s."""

EXCHANGE_SHARE = 0.85
"""An all-to-all has no ring: each rank sends to all others at once. DeepEP reaches 43 of 50 GB/s between nodes."""

NVLINK, NETWORK = "NVLink", "network"


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes.

    Attributes:
        sustained: the share of the best matmul rate that a long run keeps; see calibration.py.
    """

    spec: DeviceSpec
    nodes_of: int = 8
    network_gbps: float = 400.0
    """Gigabits per second of each GPU's network interface, in one direction."""
    sustained: float = 1.0
    storage_gb_per_s: float = 1.0
    """Each node writes as much while all of them do: 2 TB/s for 16,384 GPUs in nodes of 8, sustained, 7 at best (Llama
    3, arXiv 2407.21783, section 3.3.1)."""

    @classmethod
    def of(
        cls, spec: DeviceSpec, nodes_of: int = 8, network_gbps: float = 400.0, storage_gb_per_s: float = 1.0
    ) -> Cluster:
        """A cluster of devices that keep their calibrated share of the best matmul rate."""
        return cls(spec, nodes_of, network_gbps, sustained(spec), storage_gb_per_s)

    def nodes(self, ranks: int, stride: int) -> int:
        """The nodes over which a group of ranks lies, `stride` ranks from one to the next."""
        return max(1, ceil(ranks / max(1, self.nodes_of // stride))) if ranks > 1 else 1

    def link(self, ranks: int, stride: int) -> str:
        """The link that limits a group: NVLink inside a node, else the network."""
        return NVLINK if self.nodes(ranks, stride) == 1 else NETWORK

    @staticmethod
    def sent_bytes(kind: str, tensor_bytes: float, ranks: int) -> float:
        """The bytes that each of `ranks` sends of a tensor in a collective; see `seconds`."""
        return (2 if kind == "all_reduce" else 1) * tensor_bytes * (ranks - 1) / ranks

    def seconds(self, kind: str, tensor_bytes: float, ranks: int, stride: int = 1) -> float:
        """The time of a collective of `ranks`, every `stride`-th.

        Args:
            kind: all_gather, reduce_scatter, all_reduce or all_to_all.
            tensor_bytes: of the whole tensor; in an all-to-all what a rank sends, its own part included.
        """
        if ranks == 1:
            return 0.0
        nodes = self.nodes(ranks, stride)
        per_node = ranks / nodes
        times = 2 if kind == "all_reduce" else 1
        sent = self.sent_bytes(kind, tensor_bytes, ranks)
        inside, network = self.spec.link_gb_per_s * LINK_SHARE, self.network_gbps / 8 * NETWORK_SHARE
        if kind == "all_to_all":
            return self._exchange_s(tensor_bytes, ranks, nodes, inside)
        rate = inside if nodes == 1 else min(inside, per_node * network)
        return min(
            each.start_s
            + times * (ranks - nodes) * each.inside_s
            + self._hops(kind, nodes) * each.between_s
            + sent / (1e9 * min(each.share * rate, each.most_gb_per_s))
            for each in PROTOCOLS
        )

    @staticmethod
    def _hops(kind: str, nodes: int) -> float:
        if kind == "all_reduce":
            return 2 * min(nodes - 1, log2(nodes)) if nodes > 1 else 0
        return nodes - 1

    def _exchange_s(self, tensor_bytes: float, ranks: int, nodes: int, inside: float) -> float:
        """Each rank sends 1 / ranks of its tensor to each other one: to those of other nodes through its interface."""
        per_node = ranks / nodes
        near = tensor_bytes * (per_node - 1) / ranks / inside
        far = tensor_bytes * (ranks - per_node) / ranks / (self.network_gbps / 8)
        simple = PROTOCOLS[-1]
        hop_s = simple.between_s if nodes > 1 else simple.inside_s
        return simple.start_s + hop_s + max(near, far) / (1e9 * EXCHANGE_SHARE)

    def send_s(self, tensor_bytes: float, stride: int) -> float:
        """The time to send a tensor to the rank `stride` further, as pipeline stages do."""
        if stride < self.nodes_of:
            return PROTOCOLS[-1].inside_s + tensor_bytes / (1e9 * self.spec.link_gb_per_s * LINK_SHARE)
        return PROTOCOLS[-1].between_s + tensor_bytes / (1e9 * self.network_gbps / 8 * NETWORK_SHARE)
