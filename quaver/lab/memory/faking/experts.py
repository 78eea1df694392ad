"""Expert parallelism of tokens without values: each expert gets as many of them.

The rows that a rank gets are as many as its experts' tokens, which routers decide. Their balance is what routers are
trained for; a rank with more load than the mean needs more memory than is predicted.
"""

from __future__ import annotations

from torch import Tensor, nn

from quaver.experts.module import RoutedExperts
from quaver.parallel.expert_parallel import ExpertDispatcher

EVEN_LOAD = "expert parallelism: predicted for ranks whose experts get as many tokens"


class _EvenDispatcher(ExpertDispatcher):
    """Sends as many rows to each rank; the first ones get what is left over."""

    def _read(self, numbers: Tensor, pairs: int) -> list[list[int]]:
        sent = [pairs // self.ranks + (rank < pairs % self.ranks) for rank in range(self.ranks)]
        return [sent, [sent[self.mesh.get_local_rank()]] * self.ranks, [0] * self.ranks]


def load_evenly(model: nn.Module) -> None:
    """Let experts that are split take equally many tokens, whatever their routers choose."""
    for module in model.modules():
        if isinstance(module, RoutedExperts) and isinstance(module.dispatcher, ExpertDispatcher):
            old = module.dispatcher
            module.dispatcher = _EvenDispatcher(
                old.mesh, old.experts, grad_weight_from_codes=old.grad_weight_from_codes
            )
