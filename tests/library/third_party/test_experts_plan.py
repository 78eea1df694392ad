"""Tests transformers' own expert parallelism with float8 experts on 2 and 4 ranks against one process."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from quaver import Float8LinearConfig, conversion_report, convert_to_high_precision
from quaver.conversion.check import assert_float8_training
from quaver.experts.module import Float8Experts
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
from quaver.integrations.transformers import QuaverConfig, prepare_model_for_float8
from quaver.runtime import collectives
from tests.ranks import refusal, run
from tests.reference import assert_same_bits
from tests.steps import to_plain
from tests.thinned import first

SIZES = {"vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS)).save_pretrained(path)
    return path


def load(folder, config=None, **layout):
    """Load a model split as `layout` says, or without it a whole one, by a QuaverConfig."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, launched if layout else {}):
        plan = {"distributed_config": DistributedConfig(**layout)} if layout else {}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config, **plan)


def assert_same_gradients(split, expected, copies):
    """Of experts, whose gradients of `copies` groups of ranks FSDP2 averages."""
    for name in ("gate_up_proj", "down_proj"):
        assert_same_bits(to_plain(getattr(split, name).grad), getattr(expected, name).grad / copies)


def check_ranks_with_tokens_of_their_own(folder, recipe, ep, gather, out):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(64, (2 * ranks, 16), generator=torch.Generator().manual_seed(1))
    mine, one = tokens.chunk(ranks)[rank], prepare_model_for_float8(load(folder), recipe)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=gather)
    layout = {"fsdp_size": ranks, "ep_size": ep, "ep_implementation": "float8"}
    split = load(folder, QuaverConfig(config) if gather else None, **layout)
    before = None if gather else split(input_ids=mine).logits.detach()
    prepare_model_for_float8(split, config)  # which leaves converted layers alone
    assert_float8_training(split, torch.optim.SGD(split.parameters(), 1.0))
    experts, expected = (model.model.layers[0].mlp.experts for model in (split, one))
    assert isinstance(experts, Float8Experts)
    for group in tokens.chunk(ranks // ep):
        one(input_ids=group, labels=group).loss.backward()
    split(input_ids=mine, labels=mine).loss.backward()
    assert_same_gradients(experts, expected, ranks // ep)
    with torch.no_grad():
        logits = one(input_ids=tokens.chunk(ranks // ep)[rank // ep]).logits
        assert_same_bits(split(input_ids=mine).logits, logits.chunk(ep)[rank % ep].contiguous())
    assert gather == isinstance(experts.down_proj.to_local(), Float8AllGatherWeight)
    split.save_pretrained(out)
    dist.barrier()
    for name, saved in load_file(out / "model.safetensors").items():
        assert_same_bits(saved, load_file(folder / "model.safetensors")[name])
    if before is not None:
        convert_to_high_precision(split)
        assert_same_bits(split(input_ids=mine).logits.detach(), before)


@pytest.mark.parametrize(
    ("ranks", "ep", "recipe", "gather"),
    # test_experts_dispatch.py has experts on 2 x 2 ranks in each run
    first(2, [(2, 2, "rowwise", False), (2, 2, "mxfp8", True), (4, 2, "mxfp8", True), (4, 4, "blockwise", False)]),
)
def test_ranks_may_have_tokens_of_their_own(folder, ranks, ep, recipe, gather, tmp_path):
    run(ranks, check_ranks_with_tokens_of_their_own, folder, recipe, ep, gather, tmp_path)


def check_ranks_with_the_same_tokens(folder, recipe, implementation):
    """Each of two ranks sends its half of the tokens, as float8 codes, and has all results."""
    pairs, pair = dist.get_world_size() // 2, dist.get_rank() // 2
    tokens, generator = 6 * pairs, torch.Generator().manual_seed(1)
    hidden, index = torch.randn(tokens, 64, generator=generator), torch.randint(8, (tokens, 2), generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    layout = {"tp_size": 2, "fsdp_size": pairs, "ep_size": 2 * pairs, "ep_implementation": implementation}
    one, split = (prepare_model_for_float8(load(folder, **options), recipe) for options in ({}, layout))
    expected, experts = (model.model.layers[0].mlp.experts for model in (one, split))
    results, dtypes = [], []
    exchange = collectives.functional.all_to_all_single
    record = lambda rows, *to: dtypes.append(rows.dtype) or exchange(rows, *to)  # noqa: E731
    record_dtypes = mock.patch.object(collectives.functional, "all_to_all_single", record)
    for module, part in ((expected, slice(None)), (experts, slice(6 * pair, 6 * pair + 6))):
        inputs = hidden[part].clone().requires_grad_()
        with record_dtypes:
            output = module(inputs, index[part], weights[part])
        output.square().sum().backward()
        results.append((output.detach(), inputs.grad))
    assert dtypes == [torch.int64, torch.uint8, torch.float32]
    for whole, part in zip(*results, strict=True):
        assert_same_bits(part, whole.split(6)[pair])
    if implementation == "float8":
        assert_same_gradients(experts, expected, pairs)
    (note,) = [note for note in conversion_report(split).notes if "parallelism" in note]
    assert note.endswith("tokens travel to experts in float8 codes, and gradients of their results in float8 codes")


@pytest.mark.parametrize(
    ("ranks", "recipe", "implementation"),
    first(2, [(2, "tensorwise", "float8"), (2, "mxfp8", "float8_grad_weight_from_codes"), (4, "tensorwise", "float8")]),
)
def test_ranks_may_have_the_same_tokens(folder, ranks, recipe, implementation):
    run(ranks, check_ranks_with_the_same_tokens, folder, recipe, implementation)


def check_refusals(folder):
    layout, tokens = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "float8"}, torch.zeros(1, 4, dtype=torch.int64)
    split = load(folder, **layout)
    split(tokens)
    gathers = replace(Float8LinearConfig.from_recipe_name("rowwise"), enable_fsdp_float8_all_gather=True)
    assert "convert before its first forward" in refusal(prepare_model_for_float8, split, gathers)
    prepare_model_for_float8(split, ["rowwise", "mxfp8"][dist.get_rank()])
    assert "ranks disagree about the tokens that they send to experts: rank 0 has" in refusal(split, tokens)
    message = refusal(lambda: load(folder, QuaverConfig(frozen=True), **layout))
    assert "QuaverConfig with a distributed_config: expected a folder in high precision" in message
    error = NotImplementedError("not implemented")
    with mock.patch.object(collectives.functional, "all_to_all_single", side_effect=error):
        message = refusal(lambda: load(folder, **layout))
    assert "use gloo or nccl, got a process group of cpu:gloo" in message


def test_late_conversions_and_unlike_ranks_are_refused(folder):
    run(2, check_refusals, folder)


def check_transformers_own_parallelism(folder):
    split = load(folder, QuaverConfig("rowwise"), fsdp_size=2, ep_size=2)
    (reason,) = {layer.reason for layer in conversion_report(split).skipped if "experts" in layer.name}
    assert 'load the model with DistributedConfig(ep_implementation="float8")' in reason
    assert not isinstance(split.model.layers[0].mlp.experts, Float8Experts)


def test_other_implementations_stay_in_high_precision(folder):
    run(2, check_transformers_own_parallelism, folder)
