"""Tests the roofline: layers of models, sums, files, pictures, the command, and its page."""

import csv
import json

import pytest
from matplotlib.figure import Figure

from benchmarks.performance import DEVICES, DOCS, read, read_rows
from benchmarks.performance import ROOFLINE as FOLDER
from benchmarks.record import ROOT
from quaver.lab.bench.roofline import (
    RooflineSettings,
    canonicalize_recipes,
    merge_equal_layers,
    predict_roofline,
    require_device_specs,
)
from quaver.lab.bench.roofline_layers import (
    ExpertGroup,
    LinearGroup,
    ModelLayers,
    list_config_layers,
    list_model_layers,
)
from quaver.lab.bench.roofline_map import draw_panels
from quaver.roofline.cost import predict_linear_cost
from quaver.roofline.device_specs import find_device_spec

H200 = find_device_spec("H200")
RECIPES = ("tensorwise", "rowwise", "delayed")
REMOVED_COLUMNS = ("measured_speedup", "measured_mode", "error_percent")


@pytest.fixture(scope="module")
def llama_8b():
    return list_model_layers("llama-8b")


@pytest.fixture(scope="module")
def small(llama_8b):
    return predict_roofline(RooflineSettings((H200,), ("tensorwise", "delayed"), 16384, (llama_8b,)))


def predict_one(model, tokens):
    return predict_roofline(RooflineSettings((H200,), ("tensorwise",), tokens, (model,)))


def read_predictions(folder):
    with (folder / "roofline.csv").open(newline="") as file:
        return [{name: row[name] for name in row if name not in REMOVED_COLUMNS} for row in csv.DictReader(file)]


def test_the_linears_of_llama_3_8b_are_listed(llama_8b):
    assert llama_8b.layers == (
        LinearGroup("q_proj", 4096, 4096, 32, True, 3),
        LinearGroup("k_proj", 4096, 1024, 32, True, 3),
        LinearGroup("v_proj", 4096, 1024, 32, True, 3),
        LinearGroup("o_proj", 4096, 4096, 32, True, 1),
        LinearGroup("gate_proj", 4096, 14336, 32, True, 2),
        LinearGroup("up_proj", 4096, 14336, 32, True, 2),
        LinearGroup("down_proj", 14336, 4096, 32, True, 1),
        LinearGroup("lm_head", 4096, 128256, 1, False, 1),
    )
    weights = sum(layer.count * layer.k * layer.n for layer in llama_8b.layers)
    attention = 12 * 32 * 4096 * 8192
    assert llama_8b.linear_flops_share == pytest.approx(6 * weights / (6 * weights + attention))


def test_the_trainers_config_gives_the_same_model(llama_8b):
    assert list_config_layers(ROOT / "train_configs" / "llama3_8b.toml").layers == llama_8b.layers


def test_tensor_parallelism_splits_the_linears():
    split = list_config_layers(ROOT / "train_configs" / "llama3_70b.toml")
    whole = list_model_layers("llama-70b")
    for part, layer in zip(split.layers, whole.layers, strict=True):
        by_columns = part.name not in ("o_proj", "down_proj")
        assert (part.k, part.n) == ((layer.k, layer.n // 8) if by_columns else (layer.k // 8, layer.n))
    assert split.linear_flops_share == whole.linear_flops_share


def test_a_configs_filters_decide_what_is_in_float8(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nn_layers = 4\n[float8]\nfilter_fqns = ["lm_head", "k_proj"]\nskip_first_layers = 1\n')
    model = list_config_layers(path)
    assert model.name == "mine"
    counts = {(layer.name, layer.in_float8): layer.count for layer in model.layers}
    assert (counts["q_proj", True], counts["q_proj", False]) == (3, 1)
    assert (counts["k_proj", False], counts["lm_head", False]) == (4, 1)
    assert ("k_proj", True) not in counts
    assert "k" not in ",".join(merge_equal_layers(model)).split(",")


def test_no_mixture_multiplies_faster_than_the_peak():
    model = list_config_layers(ROOT / "train_configs" / "mixture_30b_a3b.toml")
    (total,) = predict_one(model, 16384).totals
    weights = sum(layer.count * layer.k * layer.n * getattr(layer, "top_k", 1) for layer in model.layers)
    assert 0.5 < 6 * weights * 16384 / total.bfloat16_s / 1e12 / H200.bfloat16_tflops < 1
    assert [layer.name for layer in model.layers[4:7]] == ["gate", "experts.gate_up_proj", "experts.down_proj"]


def test_a_stack_of_experts_is_as_many_linears_in_one_launch():
    stack = ExpertGroup("experts.up", 1024, 2048, 1, True, 1, experts=8, top_k=2)
    roofline = predict_one(ModelLayers("stack", (stack,), 0.9), 4096)
    (layer,) = roofline.layers
    one = predict_linear_cost(1024, 1024, 2048, "tensorwise", H200)
    assert (layer.m, layer.k, layer.n) == (1024, 1024, 2048)
    for stacked, alone in ((layer.cost.bfloat16, one.bfloat16), (layer.cost.float8, one.float8)):
        assert stacked.weight_casts_s == pytest.approx(8 * alone.weight_casts_s)
        assert stacked.total_s == pytest.approx(8 * (alone.total_s - alone.launches_s) + alone.launches_s)
    assert roofline.totals[0].shared_s == pytest.approx(layer.cost.float8.total_s)


def test_the_sum_of_a_model_equals_arithmetic():
    layers = (LinearGroup("a", 1024, 2048, 3, True, 2), LinearGroup("b", 1024, 2048, 1, False, 1))
    (total,) = predict_one(ModelLayers("two", layers, 0.9), 4096).totals
    alone = predict_linear_cost(4096, 1024, 2048, "tensorwise", H200)
    shared = predict_linear_cost(4096, 1024, 2048, "tensorwise", H200, input_readers=2)
    in_bfloat16 = alone.bfloat16.total_s
    assert total.bfloat16_s == pytest.approx(4 * in_bfloat16)
    assert total.alone_s == pytest.approx(3 * alone.float8.total_s + in_bfloat16)
    assert total.shared_s == pytest.approx(3 * shared.float8.total_s + in_bfloat16)
    assert total.speedup == pytest.approx(total.bfloat16_s / total.shared_s)


def test_predicted_speedups_are_near_those_that_transformer_engine_published():
    """Linears of a block on an H200: 1.58 with current scaling, 1.69 with delayed."""
    for recipe, published in (("tensorwise", 1.58), ("delayed", 1.69)):
        assert predict_linear_cost(16384, 8192, 8192, recipe, H200).speedup == pytest.approx(published, rel=0.1)


def test_the_csv_adds_up(small, tmp_path):
    small.write(tmp_path)
    with (tmp_path / "roofline.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:8] == ["m", "k", "n", "device", "recipe", "bf16_us", "fp8_us", "speedup"]
    assert len(rows) == len(small.layers)
    assert [row["layer"] for row in rows if row["layer"]] == 2 * ["q,o", "k,v", "gate,up", "down"]
    for row in rows:
        for precision in ("bf16", "fp8"):
            total = f"{precision}_us"
            parts = [float(row[name]) for name in row if name.startswith(f"{precision}_") and name != total]
            assert sum(parts) == pytest.approx(float(row[total]), abs=0.05)
        assert float(row["speedup"]) == pytest.approx(float(row["bf16_us"]) / float(row["fp8_us"]), rel=2e-3)


def test_the_picture_marks_the_border(llama_8b):
    figure = Figure()
    draw_panels(figure, predict_one(llama_8b, 16384), H200)
    by_tokens, bar = figure.axes
    assert "H200" in figure.get_suptitle()
    assert "not measured" in figure.get_suptitle()
    assert by_tokens.get_title() == "tensorwise"
    (border,) = [contour for contour in by_tokens.collections if list(getattr(contour, "levels", [])) == [1.0]]
    vertices = border.get_paths()[0].vertices
    assert len(vertices) > 20
    for size, tokens in vertices[::10]:
        cost = predict_linear_cost(round(tokens), round(size), round(size), "tensorwise", H200)
        assert cost.speedup == pytest.approx(1, 0.02)
    assert bar.get_title() == "speedup"


def test_the_command_writes_and_prints(tmp_path, run_quaver):
    output = tmp_path / "new"
    words = ["--device", "h200", "A100", "--recipes", "all_axiswise", "--model", "llama-8b", "--pictures"]
    printed = run_quaver("bench", "roofline", *words, "--output", output)
    assert "Predictions from data sheets" in printed
    assert sorted(path.name for path in output.iterdir()) == ["roofline.csv", "roofline.json"]
    result = json.loads((output / "roofline.json").read_text())
    assert [total["device"] for total in result["totals"]] == ["H200", "A100"]
    assert {row["recipe"] for row in read_rows(output)} == {"rowwise"}


def test_the_recorded_predictions_are_the_models(tmp_path):
    models = tuple(list_model_layers(name) for name in ("llama-8b", "llama-70b"))
    roofline = predict_roofline(
        RooflineSettings(require_device_specs(DEVICES), canonicalize_recipes(RECIPES), 16384, models)
    )
    roofline.write(tmp_path)
    expected, recorded = (read_predictions(folder) for folder in (tmp_path, FOLDER))
    assert recorded == expected, "run python -m benchmarks.performance --predict --update-docs"
    result, recorded_result = json.loads(json.dumps(roofline.to_json())), read(FOLDER / "roofline.json")
    assert all(recorded_result[name] == result[name] for name in ("settings", "constants", "totals"))


def test_the_sentences_of_the_page_are_predictions():
    """Where float8 begins to pay on an H200, and which recipe gains by reading less."""
    for tokens, features in ((65536, 1000), (8192, 1600), (1024, 5300)):
        assert predict_linear_cost(tokens, features, features, "tensorwise", H200).speedup == pytest.approx(1, abs=0.01)
        assert f"{features:,}" in DOCS.read_text()
    h100 = find_device_spec("H100")
    tensorwise, delayed = (
        predict_linear_cost(16384, 4096, 1024, recipe, h100).speedup for recipe in ("tensorwise", "delayed")
    )
    assert tensorwise < 1.05 < 1.1 < delayed
    shares = [list_model_layers(name).linear_flops_share for name in ("llama-8b", "llama-70b")]
    assert "they are {:.0%} in Llama 3 8B and {:.0%} in 70B".format(*shares) in DOCS.read_text()
    assert "results/roofline/roofline_h200.png" in DOCS.read_text()
    assert (FOLDER / "roofline_h200.png").read_bytes().startswith(b"\x89PNG")
