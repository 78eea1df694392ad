"""Registers "float8" as an implementation of transformers' expert parallelism.

    import quaver.integrations.transformers
    distributed = DistributedConfig(fsdp_size=4, ep_size=2, ep_implementation="float8")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed)
    prepare_model_for_float8(model, "tensorwise")

transformers (5.21 and newer) splits experts when it loads a model. It replaces the forward of each instance by a call
of the implementation. "float8" sends tokens as `Float8ExpertParallel` does (parallel/expert_parallel.py);
"float8_grad_weight_from_codes" also sets that option. Before the conversion both run transformers' "auto".
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AutoEP, EPImplementation, EPImplementationInterface

from quaver.experts.module import Float8Experts, RoutedExperts
from quaver.parallel.expert_parallel import AllToAllDispatcher, check_backend


class Float8EP(EPImplementation):
    """Dispatches tokens in float8 to an instance of transformers' experts; see `EPImplementation`.

    Ranks of tensor parallelism have the same tokens. Each rank sends its share, and the results are all-gathered.
    """

    def __init__(
        self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, grad_weight_from_codes: bool = False
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._plain, self._experts = AutoEP(experts, ep_mesh, tp_mesh), experts
        check_backend(ep_mesh, torch.device(ep_mesh.device_type))
        count = experts.num_experts * ep_mesh.size()
        dispatcher = AllToAllDispatcher(ep_mesh, count, grad_weight_from_codes=grad_weight_from_codes)
        vars(experts)["external_dispatcher"] = dispatcher

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not isinstance(self._experts, Float8Experts):
            return self._plain(hidden_states, top_k_index, top_k_weights)
        shards = map(self._shard, (hidden_states, top_k_index, top_k_weights))
        results = RoutedExperts.forward(self._experts, *shards)  # the class's forward: the instance's calls this method
        if self.tp_mesh.size() == 1:
            return results
        shape, stride = hidden_states.shape, (hidden_states.shape[1], 1)
        return DTensor.from_local(
            results.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=stride
        ).full_tensor()

    def _shard(self, tensor: Tensor) -> Tensor:
        if self.tp_mesh.size() == 1:
            return tensor
        shared = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()


EPImplementationInterface.register("float8", Float8EP)
EPImplementationInterface.register(
    "float8_grad_weight_from_codes", functools.partial(Float8EP, grad_weight_from_codes=True)
)
