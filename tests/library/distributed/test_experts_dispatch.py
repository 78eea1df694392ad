"""Tests expert parallelism against one process with all experts and tokens, and counts the bytes that travel."""

import copy
import functools
import pkgutil
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from quaver import (
    Float8LinearConfig,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    freeze_to_float8,
    serving_config,
)
from quaver.distributed import (
    Float8ColwiseParallel,
    Float8ExpertParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
from quaver.parallel import expert_parallel
from quaver.runtime import collectives
from tests.library.distributed.expert_models import (
    DIM,
    EXPERTS,
    INNER,
    Experts,
    concatenate,
    convert,
    make_tokens,
    parallelize,
    step,
)
from tests.ranks import get_cached_mesh, on_ranks, refusal
from tests.recipes import DYNAMIC_RECIPES
from tests.reference import BACKEND, assert_same_bits, sqnr_db
from tests.steps import assert_same
from tests.thinned import at_night, by_day

SCALE_KINDS = ("tensorwise", "blockwise", "mxfp8", "rowwise")
RECIPE = pytest.mark.parametrize("recipe", by_day(SCALE_KINDS, DYNAMIC_RECIPES))


def step_one_process(experts, parts):
    """Run a step on the tokens of all ranks, and return this rank's part of the results."""
    whole = step(experts, *concatenate(parts))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = [len(part[0]) for part in parts]
    return {
        name: value.split(sizes)[rank] if name in ("out", "hidden", "weights") else get_rank_part(value, ranks, rank)
        for name, value in whole.items()
        if value is not None
    }


def get_rank_part(value, ranks, rank):
    return value.chunk(ranks)[rank] if len(value) == EXPERTS else value


def assert_parts_same(results, expected):
    for name, value in expected.items():
        actual = results[name].to_local() if isinstance(results[name], DTensor) else results[name]
        assert_same_bits(actual.contiguous(), value.contiguous())


TRANSPOSED, WITHOUT_GATE = {"has_bias": True, "is_transposed": True}, {"has_gate": False}
CASES = [(2, 2, recipe, {}) for recipe in DYNAMIC_RECIPES]
CASES += [(2, 2, serving_config("vllm-per-token"), {"trained": False})]
CASES += [(4, 1, "tensorwise", {}), (4, 2, "rowwise", {}), (4, 1, "blockwise", {})]
CASES += [(2, 2, recipe, {"trained": False}) for recipe in ("tensorwise", "rowwise_with_gw_hp", "mxfp8")]
CASES += [(2, 2, recipe, {"dtype": torch.float32}) for recipe in ("tensorwise", "mxfp8")]
CASES += [(2, 2, "rowwise:dequantized", {}), (2, 2, "tensorwise:dequantized", {}), (2, 2, "mxfp8:high_precision", {})]
CASES += [(2, 2, "rowwise", {"recomputed": True}), (2, 2, "blockwise", TRANSPOSED), (2, 2, "tensorwise", WITHOUT_GATE)]
CASES += at_night((4, top_k, recipe, {}) for top_k in (1, 2) for recipe in DYNAMIC_RECIPES)
CASES += at_night((2, 2, recipe, {"trained": False}) for recipe in DYNAMIC_RECIPES)
CASES += at_night([(2, 2, "rowwise", {"dtype": torch.float32}), (2, 2, "tensorwise", {"recomputed": True})])
CASES += at_night([(2, 2, "tensorwise", TRANSPOSED), (2, 2, "blockwise", WITHOUT_GATE)])


@pytest.mark.parametrize(("ranks", "top_k", "recipe", "options"), CASES, ids=str)
@on_ranks()
def test_results_and_gradients_are_those_of_one_process(ranks, top_k, recipe, options):
    recomputed = options.pop("recomputed", False)
    experts = convert(recipe, **options)
    parts = make_tokens(ranks, top_k, options.get("dtype", torch.bfloat16))
    expected = step_one_process(experts, parts)
    split = parallelize(copy.deepcopy(experts))
    mine = parts[dist.get_rank()]
    call = functools.partial(checkpoint, split, use_reentrant=False) if recomputed else split
    for _ in range(2):
        assert_parts_same(step(split, *mine, call=call), expected)
    with torch.no_grad():
        assert_same_bits(split(*mine[:3]), expected["out"].contiguous())
    assert len(expected) == 3 + options.get("trained", True) * len(list(experts.parameters()))


@RECIPE
@on_ranks(2)
def test_zeros_and_values_that_are_not_finite_travel(recipe):
    """Rank 1 has all of them, so that the ranks agree on scales that rank 0 alone would not have."""
    experts, parts = convert(recipe, trained=False), make_tokens(2, 2)
    hidden = parts[1][0]
    hidden[11], hidden[12], hidden[13, 7], hidden[14, 8] = 0, 1e-38, torch.inf, torch.nan
    expected = step_one_process(experts, parts)
    assert_parts_same(step(parallelize(experts), *parts[dist.get_rank()]), expected)


@pytest.mark.parametrize("name", ["mixtral.modeling_mixtral.MixtralExperts", "gpt_oss.modeling_gpt_oss.GptOssExperts"])
@on_ranks(2)
def test_experts_of_transformers_are_split_over_ranks(name):
    from tests.library.third_party.experts import build_experts, route_tokens

    experts = build_experts(pkgutil.resolve_name(f"transformers.models.{name}"))
    convert_to_float8_training(experts, config="tensorwise")
    hidden, index, weights = route_tokens()
    parts = [(hidden[start:stop], index[start:stop], weights[start:stop]) for start, stop in ((0, 20), (20, 50))]
    expected = experts(hidden, index, weights).split([20, 30])[dist.get_rank()]
    assert_same_bits(parallelize(experts)(*parts[dist.get_rank()]).detach(), expected.detach())


@on_ranks(2)
def test_a_norm_after_the_experts_has_parts_of_its_gradients():
    """The norm's parameters are whole on each rank, and their gradients are parts of a sum."""
    experts, parts = convert("rowwise", has_norm=True), make_tokens(2, 2)
    expected = step_one_process(experts, parts)
    results = step(parallelize(copy.deepcopy(experts)), *parts[dist.get_rank()])
    grad, expected_grad = (tensors.pop("post_expert_norm.weight").float() for tensors in (results, expected))
    dist.all_reduce(grad)
    torch.testing.assert_close(grad, expected_grad, rtol=2e-2, atol=0.5)
    assert_parts_same(results, expected)


@BACKEND
@on_ranks(2)
def test_compiled_experts_have_the_results_of_one_process(backend):
    """Inductor sums the gradient of a routing weight in another order."""
    experts, parts = convert("rowwise"), make_tokens(2, 1)
    expected = step_one_process(experts, parts)
    split, mine = parallelize(copy.deepcopy(experts)), parts[dist.get_rank()]
    results = step(split, *mine, call=torch.compile(split, backend=backend))
    weights, expected_weights = results.pop("weights"), expected.pop("weights")
    assert not len(weights) or sqnr_db(expected_weights, weights) > 40
    assert_parts_same(results, expected)


@pytest.mark.parametrize(
    ("recipe", "gathers", "dim"), [("tensorwise", False, 0), ("rowwise", True, 0), ("mxfp8", True, 1)]
)
@on_ranks(4)
def test_experts_under_fsdp_have_the_gradients_of_one_process(recipe, gathers, dim):
    """On 2 x 2 ranks each pair of ranks has all experts, and FSDP2 averages the gradients of the pairs."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=gathers)
    experts, parts, rank = convert(recipe, torch.float32), make_tokens(4, 2, torch.float32), dist.get_rank()
    steps = [step(experts, *concatenate(pair)) for pair in (parts[:2], parts[2:])]
    mesh = get_cached_mesh((2, 2), ("dp", "ep"))
    split = parallelize_module(convert(config, torch.float32), mesh["ep"], Float8ExpertParallel())
    results = step(fully_shard(split, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim)), *parts[rank])
    assert gathers == isinstance(split.down_proj.to_local(), Float8AllGatherWeight)
    sizes = [len(part[0]) for part in parts[rank // 2 * 2 :][:2]]
    assert_same_bits(results["out"], steps[rank // 2]["out"].split(sizes)[rank % 2])
    for name in ("gate_up_proj", "down_proj"):
        assert_same_bits(results[name].full_tensor(), (steps[0][name] + steps[1][name]) / 2)


class Block(nn.Module):
    """A feed-forward and experts. With integers up to 1 as tokens and weights, the feed-forward's sums are exact."""

    def __init__(self):
        super().__init__()
        self.ff = nn.Sequential(nn.Linear(DIM, INNER, bias=False), nn.ReLU(), nn.Linear(INNER, DIM, bias=False))
        self.experts = Experts()
        with torch.no_grad():
            for weight in self.ff.parameters():
                weight.copy_(torch.randint(-1, 2, weight.shape))

    def forward(self, hidden, index, weights):
        hidden = hidden + self.ff(hidden)
        return hidden + self.experts(hidden, index, weights)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(4)
def test_sequence_and_expert_parallelism_on_one_mesh_have_the_gradients_of_one_process(recipe):
    torch.manual_seed(0)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), round_scales_to_power_of_2=True)
    block = convert_to_float8_training(Block(), config=config)
    tokens = torch.randint(-1, 2, (40, DIM)).float(), torch.rand(40, EXPERTS).topk(2).indices, torch.rand(40, 2)
    grad = torch.randn(40, DIM)
    expected = step(block, *tokens, grad)
    shared = PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    down = Float8RowwiseParallel(output_layouts=Shard(0))
    plan = {"ff": shared, "ff.0": Float8ColwiseParallel(), "ff.2": down, "experts": Float8ExpertParallel()}
    split = parallelize_module(block, get_cached_mesh((4,)), plan)
    *mine, out = (tensor.chunk(4)[dist.get_rank()] for tensor in (*tokens, grad, expected["out"]))
    results = step(split, *mine)
    assert_same_bits(results["out"], out)
    for name, _ in block.named_parameters():
        assert_same_bits(results[name].full_tensor(), expected[name])


@on_ranks(2)
def test_ranks_with_equal_tokens_are_warned():
    parts = make_tokens(2, 2)
    for tokens, expected in ((parts[dist.get_rank()], [0, 0]), (parts[0], [1, 0])):
        experts, counts = parallelize(convert("rowwise")), []
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                step(experts, *tokens)
            counts.append(sum("have the same tokens" in str(warning.message) for warning in caught))
        assert counts == (expected if dist.get_rank() == 0 else [0, 0])


@on_ranks(2)
def test_tokens_need_no_gradients():
    experts, parts = convert("rowwise"), make_tokens(2, 2)
    split, (hidden, index, weights, grad) = parallelize(copy.deepcopy(experts)), parts[dist.get_rank()]
    split(hidden, index, weights).backward(grad)
    *tokens, whole_grad = concatenate(parts)
    experts(*tokens).backward(whole_grad)
    for parameter, expected in zip(split.parameters(), experts.parameters(), strict=True):
        assert_same_bits(parameter.grad.to_local(), get_rank_part(expected.grad, 2, dist.get_rank()))


SCALE_BYTES = {"tensorwise": 0, "rowwise": 4, "blockwise": 8, "mxfp8": 5}
"""For a row of 160: none, a float32, one for each 128, and a byte for each 32."""


def count_sent_bytes(experts, hidden, index, weights, grad):
    """Return the bytes of each all_to_all_single in the forward and in the backward, per pair of a token and an expert.

    Every rank has the same tokens.
    """
    sent, exchange = [], collectives.functional.all_to_all_single
    pairs = int((index < EXPERTS).sum()) * dist.get_world_size()

    def spy(payload, *args):
        if payload.dtype is not torch.int64:
            sent.append(payload.numel() * payload.itemsize)
        else:
            assert payload.numel() == dist.get_world_size() + EXPERTS
        return exchange(payload, *args)

    with mock.patch.object(collectives.functional, "all_to_all_single", spy):
        out = experts(hidden.clone().requires_grad_(torch.is_grad_enabled()), index, weights)
        forward = len(sent)
        if out.requires_grad:
            out.backward(grad)
    per_pair = torch.tensor(sent)
    dist.all_reduce(per_pair)
    per_pair = (per_pair / pairs).tolist()
    return per_pair[:forward], per_pair[forward:]


@RECIPE
@on_ranks(2)
def test_a_token_travels_in_the_documented_bytes(recipe):
    """A result and a gradient of a token travel in two bytes per element, and in one what [Note: what is sent as codes]
    says, with scales."""
    tokens = make_tokens(2, 2)[0]
    kind = next(name for name in SCALE_KINDS if recipe.startswith(name))
    codes, hp = [DIM + SCALE_BYTES[kind], 2 * DIM], [2 * DIM, 2 * DIM]
    trained = codes if recipe == "tensorwise" else hp
    # The gradient of a biased result is read by more than matmuls.
    for options, flags, expected in (
        ({}, {}, (trained, trained)),
        ({"grad_weight_from_codes": True}, {}, (codes, codes)),
        ({}, {"trained": False}, (codes, codes)),
        ({}, {"trained": False, "has_bias": True}, (codes, hp)),
    ):
        experts = parallelize(convert(recipe, **flags), **options)
        assert count_sent_bytes(experts, *tokens) == expected
        words = ["float8 codes" if sizes is codes else "high precision" for sizes in expected]
        said = f"over 2 ranks: tokens travel to experts in {words[0]}, and gradients of their results in {words[1]}"
        assert any(note.endswith(said) for note in conversion_report(experts).notes)
    with torch.no_grad():
        assert count_sent_bytes(parallelize(convert(recipe)), *tokens) == (codes, [])


@RECIPE
@on_ranks(2)
def test_grad_weight_from_codes_changes_the_gradients_of_weights_only(recipe):
    """The gradients of weights alone may differ, by the elements that are subnormal in their row's codes.

    Where grad_weight is in high precision, by the rounding of both its operands: 28.4 dB each.
    """
    experts, parts = convert(recipe), make_tokens(2, 2)
    split, floor = parallelize(copy.deepcopy(experts), grad_weight_from_codes=True), 24 if recipe.endswith("hp") else 60
    for outlier in (1, 2.0**12):
        for hidden, *_ in parts:
            hidden[:, 0] *= outlier
        expected, results = step_one_process(experts, parts), step(split, *parts[dist.get_rank()])
        for name in ("down_proj", "gate_up_proj"):
            grad, exact = results.pop(name).to_local(), expected.pop(name)
            assert grad.equal(exact) or (recipe != "tensorwise" and sqnr_db(exact, grad) > floor)
        assert not grad.equal(exact) or outlier == 1 or recipe == "tensorwise" or not exact.any()
        assert_parts_same(results, expected)


@pytest.mark.parametrize("grad_enabled", [True, False])
@on_ranks(2)
def test_all_ranks_raise_when_they_disagree_about_tokens_or_experts(grad_enabled):
    experts, tokens = parallelize(convert("rowwise")), make_tokens(2, 2)[0][:3]
    with torch.set_grad_enabled(grad_enabled or dist.get_rank() == 0):
        experts.down_proj.requires_grad_(dist.get_rank() == 0)
        message = refusal(experts, *tokens)
    assert message.startswith("RuntimeError: ranks disagree about the tokens that they send to experts: rank 0 has")
    assert "'down_proj': False" in message or "gradients: none" in message
    others = convert("rowwise" if dist.get_rank() else "blockwise")
    assert refusal(parallelize, others).startswith("RuntimeError: ranks disagree about experts: rank 0 has")


@on_ranks(4)
def test_experts_that_cannot_be_split_are_refused():
    message = refusal(parallelize, convert("rowwise", experts=6))
    assert "the same number of experts on each rank, got 6 on 4 ranks" in message
    assert "expects a Float8Experts, got Experts; call convert_to" in refusal(parallelize, Experts())
    local = convert("rowwise")
    local.num_experts = EXPERTS // 4  # as transformers' own expert parallelism leaves it
    assert "all its experts, got num_experts 2 with weights of 8 experts" in refusal(parallelize, local)
    lacking = "NotImplementedError: expert parallelism sends codes by all_to_all_single of uint8"
    for error, expected in (
        (NotImplementedError("all_to_all_single of uint8"), lacking),
        (RuntimeError("Connection closed by peer"), "RuntimeError: Connection closed by peer"),
        (dist.DistBackendError("NCCL error: an unsupported driver"), "DistBackendError: NCCL error"),
    ):
        with mock.patch.object(collectives.functional, "all_to_all_single", side_effect=error):
            assert refusal(parallelize, convert("rowwise")).startswith(expected)
    assert "got a process group of cpu:gloo" in refusal(
        expert_parallel.check_backend, get_cached_mesh((4,)), torch.device("meta")
    )
    message = refusal(parallelize, freeze_to_float8(Experts(), config="rowwise"))
    assert "expected weights in high precision, got gate_up_proj stored in float8" in message
    split = parallelize(convert("rowwise"))
    assert "a call with top_k_index" in refusal(split, torch.randn(8, DIM))
    assert "convert a model back before it is parallelized" in refusal(convert_to_high_precision, split)


@on_ranks(2)
def test_the_state_dict_has_all_experts():
    experts = convert("rowwise")
    before = copy.deepcopy(experts.state_dict())
    split = parallelize(experts)
    assert split.down_proj.to_local().shape[0] == EXPERTS // 2
    assert_same(split.state_dict(), before)
