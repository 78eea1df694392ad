"""Expert parallelism of fake tokens: each rank's experts get the same number of tokens.

In a real step the routers decide how many rows a rank gets. They are trained to balance the experts; a rank with more
load than the mean needs more memory than predicted.
"""

from __future__ import annotations

from torch import Tensor, nn

from quaver.experts.module import RoutedExperts
from quaver.parallel.expert_parallel import AllToAllDispatcher, AllToAllExchange

EVEN_LOAD_NOTE = "expert parallelism: predicted as if the experts of every rank got the same number of tokens"


class _EvenDispatcher(AllToAllDispatcher):
    """Sends the same number of rows to each rank, and one more to the first ranks if there is a remainder."""

    def __call__(self, tokens: Tensor, ends: Tensor, description: str) -> AllToAllExchange:
        pairs = len(tokens)
        counts, _ = self.exchange_counts(ends, description)  # fake, so the host cannot read the numbers
        sent = [pairs // self.num_ranks + (rank < pairs % self.num_ranks) for rank in range(self.num_ranks)]
        received = [sent[self.mesh.get_local_rank()]] * self.num_ranks
        return AllToAllExchange(pairs, ends, counts, sent, received, self.mesh.get_group(), self.grad_weight_from_codes)


def dispatch_tokens_evenly(model: nn.Module) -> None:
    """Let experts that are split over ranks get equally many tokens on each rank, whatever their routers choose."""
    for module in model.modules():
        if isinstance(module, RoutedExperts) and isinstance(module.dispatcher, AllToAllDispatcher):
            old = module.dispatcher
            module.dispatcher = _EvenDispatcher(
                old.mesh, old.num_experts, grad_weight_from_codes=old.grad_weight_from_codes
            )
