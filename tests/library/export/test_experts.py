"""Tests that each expert is exported by itself, with the codes that the forward's grouped matmul reads."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from quaver import conversion_report, convert_to_float8_training
from quaver.experts.grouped_mm_method import to_float8_grouped_mm
from quaver.export import iter_float8_weights, load_float8, load_frozen, save_float8
from quaver.export import weights as weights_module
from quaver.recipes.scaling import dequantize, dynamic_cast_blocks
from tests.library.export.mixtures import EXPERTS, mixture, multiplied_experts, plain
from tests.mixture import GroupedExperts
from tests.recipes import NON_BLOCK_RECIPES
from tests.reference import assert_same_bits, sqnr_db
from tests.steps import assert_same

TOKENS = torch.arange(40).view(2, 20)
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MATRICES = [f"experts.{e}.{part}.weight" for parts in PARTS.values() for e in range(EXPERTS) for part in parts]
FORMATS = "compressed-tensors", "compressed-tensors-block"
HIGH_PRECISION = ["embed_tokens.weight", "lm_head.weight", "router.weight"]


def record_forward(model, monkeypatch):
    """Return for each stack the codes [N, K] and the scale of each expert, as a forward multiplies them."""
    return dict(zip(PARTS, multiplied_experts(lambda: model.eval()(TOKENS), monkeypatch), strict=True))


def get_leaf(format):
    return "weight_scale_inv" if format == "fp8" else "weight_scale"


def read_expert(tensors, expert, part):
    return [tensors[f"experts.{expert}.{part}.{leaf}"] for leaf in ("weight", "weight_scale")]


def assert_codes_of_forward(tensors, model, monkeypatch, leaf="weight_scale"):
    """The parts of each expert, one above the other, are what the forward multiplies."""
    forward = record_forward(model, monkeypatch)
    for stack, parts in PARTS.items():
        for expert, (codes, scale) in enumerate(forward[stack]):
            prefixes = [f"experts.{expert}.{part}" for part in parts]
            stored = torch.cat([tensors[f"{prefix}.weight"].view(torch.uint8) for prefix in prefixes])
            assert torch.equal(stored, codes.contiguous().view(torch.uint8))
            scales = [tensors[f"{prefix}.{leaf}"] for prefix in prefixes]
            if scale.dim() == 0:
                assert torch.cat(scales).tolist() == [scale.item()] * len(scales)
            elif scales[0].dtype is torch.uint8:  # MXFP8 has the scales of 32 x 32 blocks in each row
                rows = scale.repeat_interleave(32, 0)[: len(codes)]
                assert torch.equal(torch.cat(scales).view(torch.float8_e8m0fnu).float(), rows)
            else:
                assert torch.equal(torch.cat(scales), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
def test_codes_and_scales_are_those_of_the_forward(recipe, dtype, monkeypatch):
    model = mixture(recipe).to(dtype)
    exported = iter_float8_weights(model)
    tensors = dict(exported)
    assert_codes_of_forward(tensors, model, monkeypatch)
    assert not exported.requantized
    assert exported.plan.ignore == ["embed_tokens", "lm_head", "router"]
    assert exported.plan.matrix_count == 1 + len(MATRICES)
    names = [*HIGH_PRECISION, "o_proj.weight", "o_proj.weight_scale", *MATRICES]
    assert sorted(tensors) == sorted([*names, *(f"{name}_scale" for name in MATRICES)])


BLOCKS = [("blockwise", size, 128, format) for size in (256, 200) for format in (*FORMATS, "fp8")]


@pytest.mark.parametrize(("recipe", "size", "inner", "format"), [*BLOCKS, ("mxfp8", 64, 96, FORMATS[0])])
def test_blocks_of_a_training_are_exported_as_they_are(recipe, size, inner, format, monkeypatch):
    """Gate and up meet between two blocks, of 32 within one of 128. A last block of inputs may be cut."""
    model = mixture(recipe, size, inner)
    exported = iter_float8_weights(model, format=format)
    leaf, tensors = get_leaf(format), dict(exported)
    assert recipe == "mxfp8" or tensors[f"experts.0.gate_proj.{leaf}"].shape == (1, 2)
    assert_codes_of_forward(tensors, model, monkeypatch, leaf)
    assert not exported.requantized
    assert exported.plan.ragged == (["o_proj", "experts.gate_up_proj", "experts.down_proj"] if size == 200 else [])


def test_a_block_with_rows_of_gate_and_up_is_quantized_again(monkeypatch):
    """No checkpoint holds such a block; the export says what it costs, and keeps down_proj's codes."""
    model = mixture("blockwise", 128, 192)
    exported = iter_float8_weights(model)
    tensors = dict(exported)
    assert set(exported.requantized) == {"experts.gate_up_proj"}
    assert exported.plan.ragged == ["experts.gate_up_proj", "experts.down_proj"]
    for expert, codes_and_scale in enumerate(record_forward(model, monkeypatch)["down_proj"]):
        assert_same(read_expert(tensors, expert, "down_proj"), codes_and_scale)
    for expert, weight in enumerate(model.experts.gate_up_proj.detach()):
        for part, rows in zip(PARTS["gate_up_proj"], weight.chunk(2), strict=True):
            codes, _, scale = dynamic_cast_blocks(rows, torch.float8_e4m3fn, power_of_2=True)
            assert_same(read_expert(tensors, expert, part), (codes, scale))


@pytest.mark.parametrize("format", ["compressed-tensors-block", "fp8"])
def test_codes_of_rows_are_quantized_again_in_blocks(format):
    """The report has the loss of one expert of each stack: the largest."""
    model = mixture("rowwise", 128, 128)
    with torch.no_grad():
        model.experts.down_proj[::2] = 1  # exact in float8
    exported = iter_float8_weights(model, format=format)
    leaf, tensors, decibels = get_leaf(format), dict(exported), []
    assert set(exported.requantized) == {"o_proj", "experts.gate_up_proj", "experts.down_proj"}
    for expert, weight in enumerate(model.experts.down_proj.detach()):
        prefix = f"experts.{expert}.down_proj"
        decibels.append(sqnr_db(weight, dequantize(tensors[f"{prefix}.weight"], tensors[f"{prefix}.{leaf}"])))
    cost = exported.requantized["experts.down_proj"]
    assert cost.stored_db == pytest.approx(min(decibels), abs=1e-3)
    assert decibels.index(min(decibels)) == 1


def test_experts_are_quantized_one_at_a_time(monkeypatch):
    store, shapes = weights_module.store_matrix, []
    record = lambda weight, *args: shapes.append(weight.shape) or store(weight, *args)  # noqa: E731
    monkeypatch.setattr(weights_module, "store_matrix", record)
    for name, _ in iter_float8_weights(mixture()):
        if name.startswith("experts."):
            before = 1 + (EXPERTS if "down_proj" in name else 0)
            assert len(shapes) == before + int(name.split(".")[1]) + 1
    assert shapes == [(64, 64), *[(96, 64)] * EXPERTS, *[(64, 48)] * EXPERTS]


def test_experts_that_a_filter_left_out_stay_in_high_precision():
    model = mixture(filtered=("experts",))
    exported = iter_float8_weights(model, dtype=torch.bfloat16)
    tensors = dict(exported)
    assert [name for name in tensors if name.endswith("weight_scale")] == ["o_proj.weight_scale"]
    weight = model.experts.gate_up_proj.detach()[2].bfloat16()
    gate_up = [tensors[f"experts.2.{part}.weight"] for part in PARTS["gate_up_proj"]]
    assert_same_bits(torch.cat(gate_up), weight)
    modules = ["experts", *(name.removesuffix(".weight") for name in MATRICES)]
    assert exported.plan.ignore == sorted(["embed_tokens", "lm_head", "router", *modules])
    only_experts = iter_float8_weights(mixture(filtered=("o_proj",)))
    assert sum(name.endswith("weight_scale") for name, _ in only_experts) == len(MATRICES)


@pytest.mark.parametrize("layout", ["stacks", "matrices"])
def test_weights_may_be_given_as_stacks_or_as_matrices(layout):
    model = mixture()
    expected = dict(iter_float8_weights(model))
    given = dict(iter_float8_weights(model, format="high-precision")) if layout == "matrices" else model.state_dict()
    exported = dict(iter_float8_weights(model.to("meta"), weights=given))
    assert_same(exported, expected)
    given.pop("experts.1.up_proj.weight" if layout == "matrices" else "experts.gate_up_proj")
    with pytest.raises(ValueError, match=r"weights: .*, got none for experts\.(1\.up_proj\.weight|gate_up_proj)$"):
        iter_float8_weights(model, weights=given)


@pytest.mark.parametrize("change", [{"has_bias": True}, {"is_concatenated": False}, {"is_transposed": True}])
def test_experts_that_checkpoints_hold_as_one_tensor_stay_in_high_precision(change, tmp_path, caplog):
    """Such experts stay in high precision under the model's names, and the export says so."""
    model = plain(64, 32)
    for name, value in change.items():
        setattr(model.experts, name, value)
    convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda _, name: name in ("o_proj", "experts"))
    caplog.set_level(logging.WARNING)
    plan = save_float8(model, tmp_path / "out", config={}).plan
    assert plan.whole_stacks == ["experts.gate_up_proj", "experts.down_proj"]
    served = [f"experts.0.{leaf}" for leaf in ("down_proj", "gate_proj", "up_proj")]  # vLLM and SGLang ask for these
    assert plan.ignore == ["embed_tokens", "experts", *served, "lm_head", "router"]
    assert "experts are float8 in training and in high precision in the export" in caplog.text
    assert "Experts that were float8 in training stay in high precision" in (tmp_path / "out/README.md").read_text()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["experts.gate_up_proj"], model.experts.gate_up_proj)


def test_experts_of_torchtitan_stay_in_high_precision():
    model = mixture()
    model.titan = to_float8_grouped_mm(GroupedExperts(), model.o_proj.config)
    exported = iter_float8_weights(model)
    assert exported.plan.whole_stacks == ["titan.w1"]
    assert "titan" in exported.plan.ignore
    assert dict(exported)["titan.w1"] is not None


def test_the_bias_of_a_router_is_not_rounded():
    model = mixture()
    model.router.register_buffer("e_score_correction_bias", torch.full((EXPERTS,), 1 / 3))
    tensors = dict(iter_float8_weights(model, dtype=torch.bfloat16))
    assert tensors["router.e_score_correction_bias"].dtype is torch.float32
    assert tensors["router.weight"].dtype is torch.bfloat16


def test_experts_without_a_gate_are_exported(monkeypatch):
    model = plain()
    experts = model.experts
    experts.has_gate, experts.act_fn = False, torch.nn.functional.relu
    experts.up_proj = torch.nn.Parameter(experts.gate_up_proj.detach()[:, :48].clone())
    del experts.gate_up_proj
    convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda _, name: name == "experts")
    tensors = dict(iter_float8_weights(model))
    first_stack = record_forward(model, monkeypatch)["gate_up_proj"]
    for expert, codes_and_scale in enumerate(first_stack):
        assert_same(read_expert(tensors, expert, "up_proj"), codes_and_scale)
    assert not [name for name in tensors if "gate" in name]


def test_a_diverged_expert_and_experts_of_one_rank_are_refused():
    model = mixture()
    with torch.no_grad():
        model.experts.down_proj[1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"expert 1 of experts\.down_proj has an inf or a NaN"):
        dict(iter_float8_weights(model))
    model.experts._is_expert_parallel = True
    with pytest.raises(NotImplementedError, match="experts: expected all experts of a layer, got those of one rank"):
        iter_float8_weights(model)


@pytest.fixture
def folder(tmp_path):
    save_float8(mixture(), tmp_path / "out", config={"model_type": "tiny"})
    return tmp_path / "out"


def change_tensors(folder, change):
    """Replace the tensors of a folder by those that `change` returns for them, as another tool would."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)
    (folder / "quaver_export.json").unlink()
    return folder


def test_an_export_that_is_loaded_has_the_logits_of_the_exporter(folder):
    """Scales are powers of two: the dequantized values have the codes that they came from."""
    model = plain()
    model.load_state_dict(dict(load_float8(folder, dtype=torch.float32, model=model)))
    admits = lambda _, name: name not in ("router", "lm_head")  # noqa: E731
    again = convert_to_float8_training(model, config="rowwise", module_filter_fn=admits)
    assert_same_bits(again(TOKENS).detach(), mixture()(TOKENS).detach())


def keep_first_rows(*names):
    leaves = [f"{name}.{leaf}" for name in names for leaf in ("weight", "weight_scale")]
    return lambda tensors: tensors | {leaf: tensors[leaf][:1].clone() for leaf in leaves}


def leave_out(tensors):
    return {name: tensor for name, tensor in tensors.items() if LACKING not in name}


GATES = [f"experts.{index}.gate_proj" for index in range(3)]
LACKING = "experts.1.up_proj.weight"
BAD = {
    rf"lacks matrices of experts of the model: {LACKING}; it has": leave_out,
    r"down_proj\.weight: expected \[\[64, 48\]\], .*, got \[\[1, 48\]\]": keep_first_rows("experts.2.down_proj"),
    r"expected \[.*\], .*, got \[\[1, 64\], \[48, 64\]\]": keep_first_rows(*GATES),
}


@pytest.mark.parametrize("message", BAD)
def test_missing_matrices_and_those_of_other_shapes_are_refused(message, folder):
    """Gate and up have equal shapes, or the rows of one would be those of the other."""
    change_tensors(folder, BAD[message])
    with pytest.raises(ValueError, match=message):
        load_float8(folder, model=plain())


def test_more_experts_than_the_model_has_are_unexpected_keys(folder):
    model = plain()
    fourth = lambda tensors: {key.replace(".2.", ".3."): tensor.clone() for key, tensor in tensors.items()}  # noqa: E731
    change_tensors(folder, lambda tensors: tensors | fourth(tensors))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts\.3\.down_proj\.weight"):
        model.load_state_dict(dict(load_float8(folder, model=model)))


def test_what_the_class_of_a_model_ignores_is_left_out(folder):
    model = plain()
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\."]
    change_tensors(folder, lambda tensors: tensors | {"mtp.weight": torch.ones(2)})
    assert set(load_float8(folder, model=model)) == set(model.state_dict())


class RecordLargest(TorchDispatchMode):
    """Records the number of elements of the largest high-precision tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if type(leaf) is torch.Tensor and not leaf.is_meta and leaf.dtype in (torch.float32, torch.bfloat16):
                self.elements = max(self.elements, leaf.numel())
        return out


FROZEN = [("rowwise", FORMATS[0], 48), ("tensorwise", FORMATS[0], 48), ("blockwise", "fp8", 128)]


@pytest.mark.parametrize(("recipe", "format", "inner"), [*FROZEN, ("mxfp8", FORMATS[0], 96)])
def test_a_frozen_model_has_the_codes_of_the_file(recipe, format, inner, tmp_path, monkeypatch):
    trained, folder = mixture(recipe, inner=inner), tmp_path / "out"
    save_float8(trained, folder, config={"model_type": "tiny"}, format=format)
    model = plain(inner=inner).to("meta")
    with RecordLargest() as largest:
        load_frozen(model, folder)
    assert 0 < largest.elements < model.experts.down_proj.numel()
    stored, exported = load_file(folder / "model.safetensors"), iter_float8_weights(model, format=format)
    assert_same(dict(exported), stored)
    assert not exported.requantized
    assert_codes_of_forward(stored, model, monkeypatch, get_leaf(format))
    assert torch.equal(model(TOKENS), trained.eval()(TOKENS))
    reasons = {layer.name: layer.reason for layer in conversion_report(model).layers}
    assert reasons["experts.down_proj"].startswith("frozen, stored in")
    assert reasons["router"] == "in high precision in the checkpoint"


def test_gate_and_up_with_scales_of_their_own_are_dequantized(tmp_path):
    """A stack has one scale for gate and up, so two scales cannot be frozen."""
    name, folder = "experts.1.up_proj.weight_scale", tmp_path / "out"
    save_float8(mixture("tensorwise"), folder, config={"model_type": "tiny"})
    model = load_frozen(plain(), change_tensors(folder, lambda tensors: tensors | {name: tensors[name] * 2}))
    loaded = load_float8(folder, dtype=torch.float32, model=model)
    for stack in PARTS:
        assert torch.equal(getattr(model.experts, stack), loaded[f"experts.{stack}"])
    reasons = {layer.name: layer.reason for layer in conversion_report(model).layers}
    assert reasons["experts.down_proj"].startswith("experts, dequantized from the checkpoint: the scales of")


def test_a_frozen_model_stays_as_it_was_for_a_bad_expert(folder):
    model, name = plain(), "experts.2.down_proj.weight"
    nan = torch.full((64, 48), torch.nan).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=f"{name} has a NaN"):
        load_frozen(model, change_tensors(folder, lambda tensors: tensors | {name: nan}))
    assert type(model.o_proj) is torch.nn.Linear
