"""Tests ranks with virtual GPUs over gloo: under FSDP2 and tensor parallelism a GPU's branches have one card's losses.

Casts are the reference's, in a GPU's layouts; kernels of Triton are tested in one process.
"""

import itertools

import pytest
import torch

from tests.library.distributed.fsdp_models import STEPS, Case, train_cases
from tests.library.distributed.models import compute_single_process_losses
from tests.library.distributed.parallel_models import ARRANGEMENTS, check_results
from tests.ranks import run
from tests.recipes import NON_BLOCK_RECIPES, make_recipe_config
from tests.thinned import at_night
from tests.virtual_gpu import virtual_gpu


def _on_card(function, *args):
    """Return the function's result, and how often the vendor's matmuls ran on this rank."""
    with virtual_gpu("h100") as card:
        result = function(*args)
    return result, card.calls.total()


FSDP = [
    Case(recipe, gather, precompute, compiled, torch.bfloat16)
    for recipe in ("rowwise", "tensorwise", "rowwise_with_tensorwise_weight", "blockwise")
    for gather, precompute in ((True, True), (True, False), (False, False))
    for compiled in (None, "aot_eager")
]


@pytest.mark.parametrize("case", [FSDP[0], *at_night((case,) for case in FSDP[1:])], ids=str)
def test_fsdp_computes_what_one_card_does(case):
    """As test_fsdp.py of tests/library/distributed, with the same bound on the order of sums."""
    options = {"param_dtype": case.param_dtype, "float8_all_gather": case.gather, "compiled": None}
    expected, _ = _on_card(lambda: compute_single_process_losses(make_recipe_config(case.recipe), STEPS, 2, **options))
    for losses, calls in run(2, _on_card, train_cases, [case], STEPS):
        assert calls > 3 * 3 * STEPS
        assert losses[0] == pytest.approx(expected, rel=1e-5)


TP = [
    ("rowwise by sequence", "tensorwise", "aot_eager"),
    *itertools.product(ARRANGEMENTS, NON_BLOCK_RECIPES, (None, "aot_eager")),
]


@pytest.mark.parametrize("case", [TP[0], *at_night((case,) for case in TP[1:])], ids=str)
def test_tensor_parallel_computes_what_one_card_does(case):
    """As test_tensor_parallel.py of tests/library/distributed, with its bounds."""
    name, recipe, backend = case
    for _, calls in run(2, _on_card, check_results, name, recipe, torch.bfloat16, backend):
        assert calls >= 2 * 2  # one device's and this rank's
