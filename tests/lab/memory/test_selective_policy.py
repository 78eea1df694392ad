"""The field's story: float8 with a per-operator policy took more memory than bfloat16, because the policy saved `abs`.

A feed-forward of 4096 x 16384 under FSDP2, 16 tokens, bfloat16. Its policy saves one matmul in two; one that saves the
results of `abs`, too, saves the magnitudes of a whole gathered weight, of which the backward reads one number a row.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from quaver.activations import apply_activation_checkpointing
from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.memory.predict_step import record_fake_step
from quaver.lab.memory.reports.compare import compare
from quaver.lab.model.parallelize import open_fake_mesh
from quaver.lab.settings.parallel_dims import ParallelDims
from tests.lab.memory.models import needs_gathers

pytestmark = needs_gathers

DIM, HIDDEN, TOKENS, BFLOAT16 = 4096, 16384, 16, 2
SAVED = TOKENS * (DIM + HIDDEN) * BFLOAT16
WEIGHT = DIM * HIDDEN * BFLOAT16
FAULTY = {"also_save": ["aten.abs"], "never_save": ["aten.amax"]}


class ScaledLinear(nn.Linear):
    """Multiplies with rows that are scaled by their largest magnitudes, as a cast to float8 row by row does."""

    def forward(self, rows):
        magnitudes = self.weight.detach().abs()
        largest = magnitudes.amax(dim=1, keepdim=True)
        return F.linear(rows, self.weight / largest) * largest.t()


def predict_network(second, **policy):
    with open_fake_mesh(ParallelDims(dp_shard=2)) as mesh, fake_tensors() as fake_mode:
        first = nn.Linear(DIM, HIDDEN, bias=False, dtype=torch.bfloat16)
        last = second(HIDDEN, DIM, bias=False, dtype=torch.bfloat16)
        feed_forward = nn.Sequential(OrderedDict(w1=first, silu=nn.SiLU(), w3=last))
        network = nn.Sequential(OrderedDict(feed_forward=feed_forward))
        apply_activation_checkpointing([feed_forward], preserve_rng_state=False, **policy)
        fully_shard(feed_forward, mesh=mesh)
        fully_shard(network, mesh=mesh)
        source = torch.empty(TOKENS, DIM, dtype=torch.bfloat16, requires_grad=True)

        def step():
            network(source * 1.5).mul(1 / source.numel()).sum().backward()
            network.zero_grad(set_to_none=True)
            source.grad = None

        return record_fake_step(step, network, None, fake_mode)


def test_a_policy_that_saves_abs_costs_a_weight():
    high, own = predict_network(nn.Linear), predict_network(ScaledLinear)
    faulty = predict_network(ScaledLinear, **FAULTY)
    assert high.saved_by_forward_bytes - SAVED in range(16)  # the loss
    assert faulty.saved_by_forward_bytes - SAVED - WEIGHT in range(16)
    assert own.saved_by_forward_bytes - SAVED - DIM * BFLOAT16 in range(16)

    rows = compare(high, faulty, label_a="bfloat16", label_b="scaled").list_rows("saved")
    assert [(row.operator, row.difference_bytes) for row in rows] == [("aten.abs", WEIGHT)]
    assert rows[0].of == "feed_forward.w3.weight, unsharded"
    assert (rows[0].saved_by, rows[0].shape, rows[0].dtype) == ("selective policy", (DIM, HIDDEN), "bfloat16")
    assert rows[0].sentence.startswith(
        "+128 MiB: `abs` of feed_forward.w3.weight, unsharded, bfloat16 (4096, 16384), made at "
    )
    assert "saved by the selective policy, first used in backward by amax at " in rows[0].sentence
    assert rows[0].sentence.endswith("; saving the amax instead would cost at most 32 KiB")

    (row, *_) = compare(own, faulty, label_a="own policy", label_b="faulty").list_rows("saved")
    assert row.difference_bytes == WEIGHT
    assert row.hint == "saving the amax instead, as the other run does, costs 8 KiB"

    rows = compare(high, own, label_a="bfloat16", label_b="own policy").list_rows("saved")
    assert [(row.operator, row.difference_bytes) for row in rows] == [("aten.amax", DIM * BFLOAT16)]
