"""Goes from training to serving and to fine-tuning: trains in float8, exports, imports, adapts, exports again.

Each step is one command or one line of docs/export.md.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from quaver import convert_to_float8_training
from quaver.export import load_float8, load_frozen, save_float8
from quaver.export.files import StoredTensors
from quaver.lab.cli import main
from quaver.lab.huggingface.convert import open_checkpoint_model
from quaver.lab.model.llama import Llama
from quaver.lab.runs.checkpoint_folder import find_checkpoint, read_record, write_record
from tests.command_line import TEXT, quaver
from tests.steps import assert_same

TINY = [
    *("--model.dim=128", "--model.n_layers=3", "--model.n_heads=4", "--model.n_kv_heads=4", "--model.hidden_dim=256"),
    *("--training.seq_len=32", "--training.local_batch_size=2", "--training.device=cpu", "--training.steps=2"),
    *("--validation.freq=1000000", "--validation.steps=1", "--float8.skip_first_layers=1", "--job.compare"),
]
TOKENS = torch.arange(40).view(2, 20)
QUANTIZED = [
    f"model.layers.{layer}.{name}"
    for layer in (1, 2)
    for name in (*(f"self_attn.{letter}_proj" for letter in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return finished runs with their bfloat16 baselines, by recipe."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text(TEXT)
    argv = ["train", *TINY, f"--data={root / 'text.txt'}", f"--job.dump_folder={root}"]
    recipes = ("rowwise", "delayed")
    processes = [quaver([*argv, f"--job.name={recipe}", f"--float8.recipe_name={recipe}"]) for recipe in recipes]
    for process in [process.finished() for process in processes]:
        assert process.returncode == 0, process.stderr
    return {recipe: root / recipe for recipe in recipes}


def load_in_float8(folder: Path) -> nn.Module:
    """Return the model of transformers on a float8 checkpoint, without high-precision weights at any time."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    return load_frozen(model, folder).eval()


def load_dequantized(folder: Path) -> nn.Module:
    """Return the model of transformers on a float8 checkpoint, with high-precision weights."""
    config = CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def load_trained(run: Path, name: str) -> Llama:
    """Return the model of a run's last checkpoint, in high precision."""
    checkpoint = open_checkpoint_model(find_checkpoint(run), name)
    model = Llama(checkpoint.model)
    model.load_state_dict(dict(checkpoint.open_weights()))
    return model.eval()


def convert(model: nn.Module) -> nn.Module:
    return convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda module, name: name in QUANTIZED)


@torch.no_grad()
def compute_logits(model: nn.Module) -> Tensor:
    output = model(TOKENS)
    return output if isinstance(output, Tensor) else output.logits


def test_train_export_load_import(runs, tmp_path, capsys):
    run, exported, imported = runs["rowwise"], tmp_path / "exported", tmp_path / "imported"
    argv = ["export", str(run), str(exported), "--dtype=float32", "--max-shard-size=300KB", "--measure-tokens=32"]
    assert main(argv) == 0
    assert "14 float8 weights of the recipe rowwise" in capsys.readouterr().out
    record = json.loads((exported / "quaver_export.json").read_text())
    assert (record["recipe"], record["step"], record["requantized"]) == ("rowwise", 2, {})
    assert record["logits"]["sqnr_db"] > 15
    assert "float8.skip_first_layers = 1" in (exported / "README.md").read_text()
    ignore = json.loads((exported / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignore) == {"lm_head", "model.embed_tokens"} | {name.replace("s.1.", "s.0.") for name in QUANTIZED[:7]}

    served = load_dequantized(exported)
    weights = load_float8(exported, dtype=torch.float32)
    assert all(torch.equal(served.get_parameter(name), tensor) for name, tensor in weights.items())
    dequantized = load_trained(run, "rowwise")
    dequantized.load_state_dict(dict(weights))
    torch.testing.assert_close(compute_logits(served), compute_logits(dequantized), rtol=1e-5, atol=1e-5)

    assert main(["import", str(exported), str(imported), "--dtype=float32"]) == 0
    checkpoint = tmp_path / "checkpoint"
    assert main(["convert", "hf-to-quaver", str(imported), str(checkpoint)]) == 0
    again = compute_logits(convert(load_trained(checkpoint, "model")))
    exporter = compute_logits(convert(load_trained(run, "rowwise")))
    assert torch.equal(again, exporter)
    assert not torch.equal(again, compute_logits(dequantized))

    assert torch.equal(compute_logits(load_frozen(load_trained(run, "bfloat16"), exported)), exporter)
    model = load_in_float8(exported)
    torch.testing.assert_close(compute_logits(model), exporter, rtol=0.02, atol=0.02)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(model(input_ids=TOKENS, labels=TOKENS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    merged = model.eval().merge_and_unload()
    assert not save_float8(merged, tmp_path / "merged").requantized
    assert torch.equal(compute_logits(load_in_float8(tmp_path / "merged")), compute_logits(merged))
    served = load_dequantized(tmp_path / "merged")
    assert torch.equal(served.get_parameter(f"{QUANTIZED[0]}.weight"), merged.get_submodule(QUANTIZED[0]).weight + 0)


def test_an_export_notes_nothing_of_gathering(runs, tmp_path, caplog):
    checkpoint = Path(shutil.copytree(find_checkpoint(runs["rowwise"]), tmp_path / "checkpoint"))
    record = read_record(checkpoint)
    record["config"]["float8"]["enable_fsdp_float8_all_gather"] = True
    write_record(checkpoint, record)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert "are gathered" not in caplog.text


def test_delayed_scales_and_the_baseline(runs, tmp_path, capsys):
    assert main(["export", str(runs["delayed"]), str(tmp_path / "delayed"), "--own-scales"]) == 0
    assert "codes and scales are bit-identical to those of a training forward" in capsys.readouterr().out
    stored = StoredTensors(tmp_path / "delayed")
    lines = (runs["delayed"] / "float8_scales.jsonl").read_text().splitlines()
    for name in QUANTIZED:
        for operand, leaf in (("weight", "weight_scale"), ("input", "input_scale")):
            amaxes = [json.loads(line)["amax"].get(f"{name}.{operand}") for line in lines]
            if None not in amaxes:  # an input that linears share has the name of the first
                assert stored[f"{name}.{leaf}"].item() == pytest.approx(max(amaxes) / 448, rel=1e-6)

    export = ["export", str(runs["delayed"])]
    baseline = [*export, "--model=bfloat16"]
    assert main([*baseline, str(tmp_path / "blocks"), "--recipe=rowwise", "--format=fp8"]) == 0
    assert "21 float8 weights of the recipe rowwise in the format fp8" in capsys.readouterr().out
    formats = "compressed-tensors, compressed-tensors-block, compressed-tensors-mxfp8, fp8"
    comfyui = [*export, "x", "--format=comfyui"]
    for argv, message in {
        (*baseline, "x"): "was trained in high precision: give the recipe whose codes to export",
        (*export, "x", "--filter-fqns=q_proj"): "--filter-fqns must be its default, ['lm_head'], for a float8 run",
        (*export, "x", "--model=rowwise"): "--model must be one of delayed, bfloat16",
        (*export, "x", "--format=gguf"): f"--format must be one of {formats}",
        (*comfyui,): "x': expected a name that ends in .safetensors; the format comfyui is one file",
        (*comfyui, "--tokenizer=."): "--tokenizer must not be given unless --format is that of a folder",
        (*export, "x", "--recipe=int8"): "--recipe: unknown recipe 'int8'",
        (*export, "x", "--tokenizer=."): "expected files of a tokenizer",
        ("export", str(tmp_path / "blocks"), "x"): "--recipe must be one of tensorwise, rowwise",
        ("export", ".", "x"): "'.', which has neither config.toml nor config.json",
        ("export", "nowhere", "x", "--recipe=rowwise"): "SOURCE must be a run, a step-... folder of it, or a Hugging",
        ("export", ".", str(tmp_path / "blocks")): "exists already",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path / word) if word == "x" else word for word in argv])
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not [path for path in tmp_path.iterdir() if path.name.endswith("x") or "partial" in path.name]


def test_a_mixture_is_trained_exported_and_trained_on(tmp_path):
    """transformers reads the experts of the export; quaver reads them back to train, in the same values."""
    (tmp_path / "text.txt").write_text(TEXT)
    settings = [option for option in TINY if option not in ("--job.compare", "--float8.skip_first_layers=1")]
    argv = ["train", *settings, "--model.n_experts=4", "--model.top_k=2", f"--data={tmp_path / 'text.txt'}"]
    argv += [f"--job.dump_folder={tmp_path}", "--job.name=run", "--float8.recipe_name=rowwise"]
    process = quaver(argv).finished()
    assert process.returncode == 0, process.stderr
    run, exported, imported = tmp_path / "run", tmp_path / "exported", tmp_path / "imported"
    assert main(["export", str(run), str(exported), "--dtype=float32", "--measure-tokens=32"]) == 0
    record = json.loads((exported / "quaver_export.json").read_text())
    assert record["requantized"] == {}
    assert record["logits"]["sqnr_db"] > 15
    served = load_dequantized(exported)
    weights = load_float8(exported, dtype=torch.float32, model=served)
    assert_same(dict(weights), dict(served.state_dict()))
    assert main(["import", str(exported), str(imported), "--dtype=float32"]) == 0
    checkpoint = tmp_path / "checkpoint"
    assert main(["convert", "hf-to-quaver", str(imported), str(checkpoint)]) == 0
    assert main(["export", str(checkpoint), str(tmp_path / "again"), "--dtype=float32", "--recipe=rowwise"]) == 0
    first, again = StoredTensors(exported), StoredTensors(tmp_path / "again")
    assert set(first) == set(again)
    assert any(first.get_dtype(name) == "F8_E4M3" for name in first if ".experts.3." in name)
    values = load_float8(tmp_path / "again", dtype=torch.float32, model=served)
    assert all(torch.equal(values[name], tensor) for name, tensor in weights.items())
