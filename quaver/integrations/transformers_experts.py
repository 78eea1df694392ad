"""Float8 experts under transformers' own expert parallelism: its registry of implementations gains "float8".

    import quaver.integrations.transformers
    distributed = DistributedConfig(fsdp_size=4, ep_size=2, ep_implementation="float8")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed)
    prepare_model_for_float8(model, "tensorwise")

transformers (5.21 and newer) splits experts when it loads a model, and replaces their forward on the instance by one
that asks the implementation for their results. This one sends tokens as `Float8ExpertParallel` does
(parallel/expert_parallel.py); "float8_grad_weight_from_codes" is that with its option. Until the conversion they are
transformers' "auto".
"""

from __future__ import annotations

import functools
import typing

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AutoEP, EPImplementation, EPImplementationInterface

from quaver.experts.module import Float8Experts, RoutedExperts
from quaver.parallel.expert_parallel import ExpertDispatcher, check_backend


class Float8EP(EPImplementation):
    """Float8 dispatch to the experts of an instance of transformers' experts; see `EPImplementation`.

    Ranks of tensor parallelism have the same tokens: each sends its part of them, and all get all results.
    """

    def __init__(
        self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, grad_weight_from_codes: bool = False
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._plain, self._experts = AutoEP(experts, ep_mesh, tp_mesh), experts
        count = typing.cast(int, experts.num_experts) * ep_mesh.size()
        check_backend(ep_mesh, torch.device(ep_mesh.device_type))
        dispatcher = ExpertDispatcher(ep_mesh, count, grad_weight_from_codes=grad_weight_from_codes)
        vars(experts)["planned_dispatcher"] = dispatcher

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not isinstance(self._experts, Float8Experts):
            return typing.cast(Tensor, self._plain(hidden_states, top_k_index, top_k_weights))
        mine = (self._mine(each) for each in (hidden_states, top_k_index, top_k_weights))
        results = RoutedExperts.forward(self._experts, *mine)  # the forward of the instance calls this method
        if self.tp_mesh.size() == 1:
            return results
        shape, stride = hidden_states.shape, (hidden_states.shape[1], 1)
        return DTensor.from_local(
            results.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=stride
        ).full_tensor()

    def _mine(self, whole: Tensor) -> Tensor:
        if self.tp_mesh.size() == 1:
            return whole
        shared = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()


EPImplementationInterface.register("float8", Float8EP)
EPImplementationInterface.register(
    "float8_grad_weight_from_codes", functools.partial(Float8EP, grad_weight_from_codes=True)
)
