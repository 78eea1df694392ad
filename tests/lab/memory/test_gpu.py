"""Tests predictions of a GPU's memory without one: which operations run, what they save, and what is restored."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering

from benchmarks.memory_modules import Case, Size, predict
from quaver import convert_to_float8_training
from quaver.lab.memory.devices import autocast
from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.memory.predict_step import predict_step_memory
from quaver.lab.memory.train_step.predict_run import predict_run_memory
from quaver.lab.model.float8 import fuse_producers
from quaver.lab.model.llama import FeedForward, RMSNorm
from quaver.lab.settings import Model
from quaver.lab.settings.config_file import load_config, parse_arguments
from quaver.linear.backends import predict_backend
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import MATMULS
from quaver.runtime.devices import is_cpu, is_cuda
from tests.counting import CollectiveCounter
from tests.lab.memory.models import needs_gathers
from tests.thinned import at_night, first

aten = torch.ops.aten
SIZE = Size(sequences=2)
TOKENS = SIZE.sequences * SIZE.seq_len
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


def predict_block(recipe, checkpointing, ranks=1):
    return predict(Case("1 block", recipe, checkpointing, ranks=ranks), SIZE, "cuda")


@pytest.mark.parametrize(
    ("recipe", "checkpointing", "ranks"),
    [
        ("tensorwise", "full", 1),
        pytest.param("rowwise", "op", 2, marks=needs_gathers),
        pytest.param("rowwise", "op", 1, marks=pytest.mark.nightly),
        pytest.param("tensorwise", "op", 2, marks=[needs_gathers, pytest.mark.nightly]),
        pytest.param("rowwise_with_gw_hp", "full", 2, marks=[needs_gathers, pytest.mark.nightly]),
    ],
)
def test_a_recomputation_calls_no_operation_that_its_forward_did_not(recipe, checkpointing, ranks):
    """A policy of torch 2.13 refuses such an operation. A cast is one operation to it, and a transpose none."""
    assert predict_block(recipe, checkpointing, ranks).peak_bytes > 0


def test_norms_and_swiglu_of_a_gpu_save_their_inputs_and_a_number_for_each_row():
    saved = Counter()
    for row in predict_block("tensorwise", "none").saved_for_backward:
        if row["category"] == "saved_activations":
            saved[row["dtype"], row["module"].removeprefix("parts.0").lstrip(".")] += row["bytes"]
    elements = TOKENS * SIZE.dim
    assert saved["float32", "input_layernorm"] == TOKENS * 4  # 1 / rms of each row
    codes = sum(size for (dtype, _), size in saved.items() if dtype == "float8_e4m3fn")
    assert codes == 3 * elements + TOKENS * SIZE.hidden_dim  # the inputs of q, k and v; o; gate and up; down
    plain = [
        (row["operator"], row["bytes"])
        for row in predict_block("bfloat16", "none").saved_for_backward
        if row["module"].endswith("post_attention_layernorm") and row["category"] == "saved_activations"
    ]
    assert plain == [("aten._to_copy", elements * 2), ("aten.new_empty", TOKENS * 4)]


def list_autocast_rules(header, macro):
    """Return the operators of one of the lists in ATen/autocast_mode.h, without torch 2.11's for named dims."""
    entries = re.search(rf"define {macro}\(_\)((?:.*\\\n)*.*\n)", header).group(1)
    names = {".".join(entry.split(", ")) for entry in re.findall(r"_\(([\w, ]+)\)", entries)}
    return {name for name in names if "dimname" not in name.lower()}


def test_autocast_computes_in_float32_what_pytorch_lists_for_gpus():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    assert list_autocast_rules(header, "AT_FORALL_FP32") <= set(autocast.FLOAT32_INPUTS)
    assert list_autocast_rules(header, "AT_FORALL_FP32_SET_OPT_DTYPE") <= set(autocast.FLOAT32_RESULT)
    listed = {*autocast.FLOAT32_INPUTS, *autocast.FLOAT32_RESULT, *autocast.FLOAT32_OVERLOAD}
    assert all(map(autocast.has_gpu_rule, listed - {"rms_norm"}))  # torch 2.11 has none for rms_norm


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_of_a_gpu_keeps_softmax_and_norms_in_float32(compiled):
    class Attend(torch.nn.Module):
        def forward(self, scores):
            weights = torch.softmax(F.layer_norm(scores, (64,)), -1)
            return [weights, F.rms_norm(scores, (64,)), scores.norm(2, -1), scores.sum(), scores.double().exp()]

    module, dtypes = Attend(), {}
    if compiled:
        module.compile()

    def note_dtypes(results):
        dtypes[device] = [result.dtype for result in results]
        return sum(result.sum() for result in results)

    for device in ("cpu", "cuda"):
        scores = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
        predict_step_memory(module, (scores,), autocast=torch.bfloat16, device=device, loss=note_dtypes)
    norm = torch.float32 if autocast.has_gpu_rule("rms_norm") else torch.bfloat16
    assert dtypes["cuda"] == [torch.float32, norm, torch.float32, torch.float32, torch.float64]
    assert dtypes["cpu"] == [*[torch.bfloat16] * 4, torch.float64]


def test_a_norm_of_a_bfloat16_residual_saves_no_float32_copy():
    source = torch.randn(TOKENS, 256, dtype=torch.bfloat16, requires_grad=True)
    norm = RMSNorm(256, 1e-5)
    prediction = predict_step_memory(norm, (source,), autocast=torch.bfloat16, device="cuda")
    assert prediction.saved_by_forward_bytes < TOKENS * 256 * 2  # the bytes of such a copy in bfloat16


class NormAndSwiGLU(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(256, 1e-5)
        self.mlp = FeedForward(Model(dim=256, hidden_dim=512, n_heads=4, n_kv_heads=4))

    def forward(self, hidden):
        return self.mlp(self.norm(hidden))


def list_stored_buffers(graph):
    """Return the buffers of a lowered graph that something reads."""
    read = {name.removesuffix("_start") for name in graph.get_output_names()}
    for operation in reversed(graph.operations):
        if operation.is_extern():
            read |= {buffer.get_name() for buffer in operation.inputs}
        elif any(output.get_name() in read for output in operation.get_outputs()):
            read |= set(operation.get_read_names())
    return [buffer for buffer in graph.buffers if buffer.has_tensor_output() and buffer.get_name() in read]


@pytest.mark.parametrize(("recipe", "codes"), first(1, [("tensorwise", 16), ("rowwise_with_gw_hp", 11), ("mxfp8", 16)]))
def test_compiled_code_multiplies_for_all_gradients_and_stores_what_a_gpu_stores(recipe, codes, monkeypatch):
    """No gradient is left out or of zeros, and nothing lies in memory in float32 between SwiGLU and casts, as on a CPU.

    `codes`: each layout of each operand is stored once, though gate and up read one. No kernel stores one conversion
    twice, which could lose the second: see [Note: ptxas before 13].
    """
    module = convert_to_float8_training(NormAndSwiGLU(), config=recipe)
    fuse_producers(module)
    module.compile()
    matmuls, buffers, copies, run = Counter(), [], [], GraphLowering.run

    def inspect_and_run(graph, *arguments):
        result = run(graph, *arguments)
        called = [node for node in graph.module.graph.nodes if node.op == "call_function"]
        matmuls.update(name for name in map(str, (node.target for node in called)) if "mm" in name)
        copies.extend(node for node in called if node.target in (aten.copy.default, aten.full.default))
        converted = [node for node in called if "convert" in str(node.target) and node.meta["val"].dtype in FLOAT8]
        for node in converted:
            assert len({aten.clone.default in {user.target for user in reader.users} for reader in node.users}) < 2
        buffers.extend((buffer.get_dtype(), buffer.get_numel()) for buffer in list_stored_buffers(graph))
        return result

    monkeypatch.setattr(GraphLowering, "run", inspect_and_run)
    source = torch.randn(TOKENS, 256, requires_grad=True)
    predict_step_memory(module, (source,), autocast=torch.bfloat16, device="cuda")
    assert sum(matmuls.values()) == 9, matmuls  # output, grad_input and grad_weight of each linear
    assert (torch.float32, TOKENS * 512) not in buffers
    assert not [node for node in copies if node.meta["val"].numel() > 1], copies
    assert sum(dtype in FLOAT8 for dtype, _ in buffers) == codes


@pytest.mark.parametrize(
    ("recipe", "cast", "matmul"),
    [
        ("tensorwise", "cast_tensorwise", "aten._scaled_mm"),
        ("rowwise", "cast_rowwise", "aten._scaled_mm"),
        ("delayed", "cast_with_persistent_scale", "aten._scaled_mm"),
        ("blockwise", "cast_blockwise", "quaver.native_block_mm"),
        ("mxfp8", "cast_blockwise", "quaver.native_block_mm"),
    ],
)
def test_a_linear_casts_and_multiplies_as_on_a_gpu(recipe, cast, matmul):
    with fake_tensors("cuda"):
        linear = torch.nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
        linear = convert_to_float8_training(linear, config=recipe)
        input = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
        with CollectiveCounter() as counter:
            linear(input).sum().backward()
    assert counter.operations[f"quaver.{cast}.default"] >= (2 if recipe == "delayed" else 3)
    assert counter.operations[f"{matmul}.default"] == 3
    assert counter.operations["aten.abs.default"] == counter.operations["quaver.exact_float8_mm.default"] == 0


def test_all_is_put_back_afterwards():
    casts = Float8LinearConfig.from_recipe_name("rowwise").casts
    pair, device = [casts.get(*operand) for operand in MATMULS["output"]], torch.device("cpu")
    before = predict_backend(*pair, device, emulate=False), F.rms_norm
    with pytest.raises(ZeroDivisionError), fake_tensors("cuda"):
        assert is_cuda(torch.empty(2))
        assert not is_cpu(torch.empty(2))
        assert predict_backend(*pair, device, emulate=False) is not before[0]
        raise ZeroDivisionError
    assert (predict_backend(*pair, device, emulate=False), F.rms_norm) == before
    with fake_tensors():
        assert is_cpu(torch.empty(2))


def predict_run(words, ranks, device="cuda"):
    """Predict a small run of the trainer."""
    small = "train_configs/llama3_debug.toml --model.n_layers 1 --training.seq_len 64"
    return predict_run_memory(load_config(*parse_arguments([*small.split(), *words.split()])), ranks, device).prediction


@needs_gathers
@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_code_saves_no_copy_of_a_gathered_weight(recipe):
    """grad_input reads the codes in another layout. Copied before the backward, they would be saved."""
    float8 = f"--float8.recipe_name {recipe} --float8.enable_fsdp_float8_all_gather true"
    rows = predict_run(f"{float8} --training.compile true --activation_checkpoint.mode selective", 2).saved_for_backward
    weights = {(768, 256), (256, 768), (256, 256), (128, 256)}
    saved = [row for row in rows if row["category"] == "saved_activations" and row["dtype"].startswith("float8")]
    assert not [row for row in saved if {tuple(row["shape"]), tuple(row["shape"][::-1])} & weights], saved
    assert "compiled graph" in {row["saved_by"] for row in rows}


SPLIT = (
    "--float8.enable_fsdp_float8_all_gather true --float8.precompute_float8_dynamic_scale_for_fsdp true "
    "--parallelism.tensor_parallel_degree 2 --model.n_kv_heads 4"
)
"""Each rank has whole blocks of 128 of the weights."""


@needs_gathers
@pytest.mark.nightly
def test_tensor_parallel_runs_are_predicted():
    on_gpu, on_cpu = (predict_run(SPLIT, 4, device) for device in ("cuda", "cpu"))
    assert on_gpu.by_category["parameters"] == on_cpu.by_category["parameters"]
    assert on_cpu.by_category["gathered_weights"] > 0
    assert on_gpu.peak_bytes == pytest.approx(on_cpu.peak_bytes, rel=0.2)


RECIPES = ["tensorwise", "rowwise", "delayed", "rowwise_with_gw_hp", "blockwise", "mxfp8"]


@needs_gathers
@pytest.mark.parametrize(
    ("recipe", "in_high_precision"),
    [("tensorwise", "lm_head,self_attn,gate_proj"), *at_night((recipe, "lm_head") for recipe in RECIPES)],
)
def test_compiled_tensor_parallel_code_multiplies_columns_as_the_gpu_reads_them(recipe, in_high_precision):
    """Inductor refuses a float8 matmul whose second operand is not contiguous along columns.

    up_proj and down_proj are split in the two ways that there are.
    """
    words = f"--float8.recipe_name {recipe} --float8.filter_fqns {in_high_precision} --training.compile true"
    prediction = predict_run(f"{SPLIT} {words}", 4)
    assert prediction.by_category["gathered_weights"] > 0
    saved = {row["module"] for row in prediction.saved_for_backward if row["saved_by"] == "compiled graph"}
    assert "model.layers.0.mlp.gate_proj" in saved
