"""Tests that Llamas of Hugging Face keep their bits and logits when they are imported and exported."""

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

from quaver.export.files import StoredTensors
from quaver.lab.cli import main
from quaver.lab.data import load_data
from quaver.lab.huggingface.config import read_hf_config
from quaver.lab.model.llama import Llama
from quaver.lab.runs.checkpoint_folder import read_record
from quaver.lab.runs.dcp import load_state
from quaver.lab.runs.manifest import write_manifest
from quaver.lab.settings import Model
from quaver.lab.settings.config_file import load_config, parse_arguments
from quaver.lab.settings.parallel_dims import ParallelDims
from tests.command_line import TEXT, TINY
from tests.lab.trainer.runs import read_losses
from tests.steps import assert_same

pytestmark = pytest.mark.filterwarnings("error:torch.distributed is disabled")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 0}
MIXTURE |= {"moe_intermediate_size": 48, "intermediate_size": 48, "num_mtp_layers": 0}
MIXTURE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5, "partial_rotary_factor": 1.0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "eos_token_id": [5, 7], "num_key_value_heads": 1},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}, "bos_token_id": 3},
    "mixture": MIXTURE,
}
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


def make_hf(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **settings: Any) -> Path:
    """Save a Llama of transformers with random weights, norms included, and logits far from zero."""
    torch.manual_seed(3)
    shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    shape |= {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}, **settings}
    is_mixture = "n_routed_experts" in settings
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape)) if is_mixture else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.5, 0.5)
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.mul_(3)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a variant of the model, made once; tests copy what they change."""
    root = tmp_path_factory.mktemp("hf")

    def make_folder(variant: str) -> Path:
        path = root / variant
        return path if path.exists() else make_hf(path, **VARIANTS[variant])

    return make_folder


@pytest.fixture(scope="module")
def out(hf: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint that the plain model becomes; tests copy what they change."""
    path = tmp_path_factory.mktemp("out") / "out"
    convert("hf-to-quaver", hf("plain"), path)
    return path


@pytest.fixture
def copy(hf: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a variant with other tensors and keys of config.json; None removes a tensor, "absent" a key."""

    def copy(variant: str = "plain", config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(hf(variant), folder)
        settings = {**json.loads((folder / "config.json").read_text()), **(config or {})}
        settings = {name: value for name, value in settings.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(settings))
        stored = {**load_file(folder / "model.safetensors"), **{name: tensors[name] for name in tensors}}
        stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return copy


def load_with_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def load_with_quaver(checkpoint: Path, name: str | None = None) -> Llama:
    """Return the model of a checkpoint, in float32."""
    record = read_record(checkpoint)
    datetime.fromisoformat(record["saved_at"])
    model = Llama(Model(**record["config"]["model"]))
    state = {"model": model.state_dict()}
    load_state(state, FileSystemReader(checkpoint / (name or record["models"][0])))
    model.load_state_dict(state["model"])
    return model


def assert_same_logits(model: Any, reference: Any, vocab: int = 300) -> None:
    tokens = torch.randint(0, vocab, (2, 200))
    with torch.no_grad():
        outputs = [model(tokens), reference(tokens)]
    logits, expected = (output if isinstance(output, Tensor) else output.logits for output in outputs)
    assert expected.std() > 0.1  # otherwise atol alone would pass
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def convert(*argv: object) -> None:
    assert main(["convert", *map(str, argv)]) == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_import_and_export_keep_every_bit(hf, variant, tmp_path):
    convert("hf-to-quaver", hf(variant), tmp_path / "out")
    before, imported = load_with_transformers(hf(variant)), load_with_quaver(tmp_path / "out")
    assert_same(imported.state_dict(), before.state_dict())
    assert_same_logits(imported, before)
    convert("quaver-to-hf", tmp_path / "out", tmp_path / "back", "--dtype", "float32")
    after = load_with_transformers(tmp_path / "back")
    assert_same(*(load_file(folder / "model.safetensors") for folder in (tmp_path / "back", hf(variant))))
    ignored = ("_name_or_path", "transformers_version", "initializer_range", "use_cache", "head_dim")
    configs = [{k: v for k, v in model.config.to_dict().items() if k not in ignored} for model in (before, after)]
    assert configs[0] == configs[1]
    assert_same_logits(after, before)
    assert not list(tmp_path.glob(".*"))


def test_a_mixture_without_shared_experts_is_converted_both_ways(tmp_path):
    """GLM-4.5 has one of no width then."""
    settings = MIXTURE | {"n_shared_experts": 0}
    convert("hf-to-quaver", make_hf(tmp_path / "hf", **settings), tmp_path / "out")
    imported = load_with_quaver(tmp_path / "out")
    assert not [name for name in imported.state_dict() if "shared" in name]
    convert("quaver-to-hf", tmp_path / "out", tmp_path / "back")
    stored = load_file(tmp_path / "back" / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert stored[bias].equal(imported.state_dict()[bias])  # in float32 among bfloat16
    assert_same_logits(load_with_transformers(tmp_path / "back"), imported.bfloat16().float())


@pytest.mark.parametrize(("shard", "dtype"), [("60KB", "float32"), ("5GB", "bfloat16"), ("60KB", "float16")])
def test_import_of_shards_and_of_16_bits_is_exact_in_float32(tmp_path, shard, dtype):
    folder = make_hf(tmp_path / "hf", getattr(torch, dtype), shard)
    assert len(list(folder.glob("*.safetensors"))) == (1 if shard == "5GB" else 4 if dtype == "float16" else 7)
    convert("hf-to-quaver", folder, tmp_path / "out")
    weights = load_with_transformers(folder, getattr(torch, dtype)).state_dict()
    stored = {name: tensor.float() for name, tensor in weights.items()}
    assert_same(load_with_quaver(tmp_path / "out").state_dict(), stored)


def test_import_in_bfloat16_rounds_and_stores_half_as_much(hf, tmp_path):
    convert("hf-to-quaver", hf("plain"), tmp_path / "out", "--dtype", "bfloat16")
    convert("quaver-to-hf", tmp_path / "out", tmp_path / "back", "--dtype=float32")
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(hf("plain") / "model.safetensors").items()}
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), rounded)
    stored = sum(path.stat().st_size for path in (tmp_path / "out" / "model").glob("*.distcp"))
    assert stored < 1.3 * 2 * sum(tensor.numel() for tensor in rounded.values())  # the format adds 1.4 KB a tensor


def test_import_reads_what_older_versions_of_transformers_wrote(copy, hf, tmp_path):
    old = {"rope_theta": 10000.0, "rope_scaling": LLAMA3, "rope_parameters": "absent", "head_dim": "absent"}
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = copy("llama3", {**old, "attention_bias": None}, **buffer)
    convert("hf-to-quaver", folder, tmp_path / "old")
    convert("hf-to-quaver", hf("llama3"), tmp_path / "new")
    configs = [read_record(tmp_path / name)["config"] for name in ("old", "new")]
    assert configs[0] == configs[1]
    assert configs[0]["model"]["rope_scaling_factor"] == 8


def test_import_takes_a_tied_projection_that_is_stored_and_refuses_another(copy, hf, tmp_path, run_refused):
    embedding = load_file(hf("tied") / "model.safetensors")[EMBEDDING]
    folder = copy("tied", **{HEAD: embedding.clone()})
    convert("hf-to-quaver", folder, tmp_path / "out")
    shutil.rmtree(folder)
    folder = copy("tied", **{HEAD: embedding + 1})
    line = run_refused("convert", "hf-to-quaver", folder, tmp_path / "other")
    assert "but lm_head.weight and model.embed_tokens.weight differ" in line


def test_import_holds_one_tensor_at_a_time(hf, tmp_path, monkeypatch):
    storages: list[StorageWeakRef] = []
    alive: list[int] = []
    read = StoredTensors.__getitem__

    def read_and_count(stored: StoredTensors, name: str) -> Tensor:
        tensor = read(stored, name)
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in storages))
        return tensor

    monkeypatch.setattr(StoredTensors, "__getitem__", read_and_count)
    convert("hf-to-quaver", hf("plain"), tmp_path / "out")
    assert len(alive) == 21
    assert max(alive) <= 2  # the one before, until the next one is there


def test_training_begins_with_the_loss_of_the_imported_model(hf, tmp_path, text_folder):
    out = tmp_path / "out"
    convert("hf-to-quaver", hf("llama3"), out)
    argv = [str(out / "model.toml"), f"--checkpoint.initial_load_path={out}", "--job.name=run"]
    argv += [f"--job.dump_folder={tmp_path / 'runs'}", f"--data={text_folder}", "--training.device=cpu"]
    argv += ["--training.seq_len=100", "--training.local_batch_size=2", "--training.steps=1", "--validation.steps=1"]
    argv += ["--float8.no-enable_float8_linear", "--training.mixed_precision_param=float32"]
    argv += ["--lr_scheduler.warmup_steps=0", "--metrics.log_freq=1", "--checkpoint.no-enable"]
    assert main(["train", *argv]) == 0
    (loss,) = read_losses(tmp_path / "runs" / "run" / "metrics.jsonl")
    config = load_config(*parse_arguments(argv))
    batch = load_data(config).make_step_batches(config.training, 0, ParallelDims())[0]
    with torch.no_grad():
        logits = load_with_transformers(hf("llama3"))(batch.tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_shards_of_an_export_are_within_their_size_and_in_the_index(hf, out, tmp_path):
    convert("quaver-to-hf", out, tmp_path / "back", "--dtype=float32", "--max-shard-size=60KB")
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == [f"model-{n:05d}-of-00007.safetensors" for n in range(1, 8)]
    for file in files:
        tensors = load_file(file)
        assert {name for name, where in index["weight_map"].items() if where == file.name} == tensors.keys()
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 60_000 or len(tensors) == 1
        assert file.stat().st_mode == (tmp_path / "back" / "config.json").stat().st_mode
    reference = load_with_transformers(hf("plain"))
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in reference.parameters())
    assert_same(load_with_transformers(tmp_path / "back").state_dict(), reference.state_dict())


@pytest.fixture(scope="module")
def float8_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the last checkpoint of a run of two steps in float8 and bfloat16, with tied weights and scaled rope."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT)
    argv = [*TINY, f"--data={folder / 'text.txt'}", f"--job.dump_folder={folder}", "--job.name=run", "--job.compare"]
    argv += ["--model.dim=64", "--model.tie_word_embeddings", "--training.steps=2", "--lr_scheduler.warmup_steps=1"]
    argv += ["--model.rope_scaling_factor=32", "--model.rope_original_max_position=128"]
    assert main(["train", *argv]) == 0
    return folder / "run" / "checkpoint" / "step-00000002"


def test_both_models_of_a_float8_run_are_exported_with_their_weights(float8_run, tmp_path, capsys):
    convert("quaver-to-hf", float8_run, tmp_path / "first", "--dtype=float32")
    convert("quaver-to-hf", float8_run.parents[1], tmp_path / "baseline", "--model=bfloat16")
    assert "the model tensorwise of step 2 in float32" in capsys.readouterr().out

    assert HEAD not in load_file(tmp_path / "first" / "model.safetensors")
    first, baseline = load_with_transformers(tmp_path / "first"), load_with_transformers(tmp_path / "baseline", "auto")
    expected, expected_baseline = load_with_quaver(float8_run), load_with_quaver(float8_run, "bfloat16")
    assert_same(first.state_dict(), expected.state_dict())
    assert_same(baseline.state_dict(), expected_baseline.bfloat16().state_dict())
    assert not torch.equal(first.lm_head.weight.bfloat16(), baseline.lm_head.weight)
    assert_same_logits(first, expected, vocab=256)

    config = first.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 0, None)
    assert config.max_position_embeddings == 32 * 128
    assert read_hf_config(config.to_dict()) == Model(**read_record(float8_run)["config"]["model"])
    text = first.generate(torch.tensor([[116, 111]]), max_new_tokens=5, do_sample=False)
    assert text.shape[1] <= 7


def test_export_copies_the_files_of_a_tokenizer(out, tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    copied = ["chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    for name in (*copied, "notes.txt", "config.json"):
        (source / name).write_text(json.dumps({"name": name}))
    convert("quaver-to-hf", out, tmp_path / "back", "--tokenizer", source)
    written = {path.name for path in (tmp_path / "back").iterdir()}
    assert written == {"config.json", "model.safetensors", *copied}
    assert json.loads((tmp_path / "back" / "tokenizer.json").read_text()) == {"name": "tokenizer.json"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"


GLM = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "describe a LlamaForCausalLM"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "describe a LlamaForCausalLM"),
    "dense blocks": (GLM, "first_k_dense_replace in config.json must be 0, got 1"),
    "attention_bias": ({"attention_bias": True}, "attention_bias in config.json must be false, got True"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias in config.json must be false, got True"),
    "head_dim": ({"head_dim": 32}, "hidden_size / num_attention_heads = 64 / 4, got 32"),
    "hidden_act": ({"hidden_act": "gelu"}, "hidden_act in config.json must be \"silu\", got 'gelu'"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout in config.json must be 0.0, got 0.1"),
    "rope_type": ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "must be 'default' or 'llama3', got 'yarn'"),
    "rope_setting": ({"rope_scaling": {"full_attention": {}}}, "must be those of Llama, got full_attention"),
    "rope_missing": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor in config.json must"),
    "rope_part": ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor in config.json must be 1.0"),
    "rope_values": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be above model.rope_low_freq_factor"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "must have no quantization_config"),
    "missing": ({"hidden_size": "absent"}, "hidden_size in config.json must be a positive integer, but is"),
    "type": ({"num_hidden_layers": 2.0}, "num_hidden_layers in config.json must be a positive integer, got 2.0"),
    "heads": ({"num_key_value_heads": 3}, "does not make a model: model.n_heads must be a multiple of"),
    "shapes": ({"intermediate_size": 80}, "gate_proj.weight must be [80, 64], is [96, 64]"),
    "too_few": ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight must be [64, 64], is missing"),
    "too_many": ({"num_hidden_layers": 1}, "has tensors that a Llama does not have: model.layers.1."),
}
BAD_TENSORS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no_head": ({HEAD: None}, "tensors that its config requires: lm_head.weight must be [300, 64], is missing"),
    "bias": ({"lm_head.bias": torch.zeros(300)}, "has tensors that a Llama does not have: lm_head.bias"),
    "norm_shape": ({NORM: torch.ones(65)}, "model.norm.weight must be [64], is [65]"),
    "float8": ({NORM: torch.ones(64).to(torch.float8_e4m3fn)}, "float32, bfloat16 or float16, got F8_E4M3"),
}


@pytest.mark.parametrize("case", [*BAD_CONFIGS, *BAD_TENSORS])
def test_folders_that_do_not_fit_are_refused_in_one_line(copy, case, tmp_path, run_refused):
    config, message = BAD_CONFIGS.get(case, ({}, ""))
    tensors, message = BAD_TENSORS.get(case, ({}, message))
    assert message in run_refused("convert", "hf-to-quaver", copy(config=config, **tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_are_missing_or_damaged_are_refused_in_one_line(copy, tmp_path, run_refused):
    def refuse(folder: Path) -> str:
        return run_refused("convert", "hf-to-quaver", folder, tmp_path / "out")

    assert "has no config.json" in refuse(tmp_path / "nowhere")
    folder = copy()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "is damaged" in refuse(folder)
    weights.rename(folder / "pytorch_model.bin")
    assert "expected model.safetensors, or shards" in refuse(folder)
    (folder / "full.safetensors").write_bytes(whole)
    for text, message in {
        "[]": "has no weight_map",
        '{"weight_map": {}}': "names no tensors",
        '{"weight_map": {"a": "part.safetensors"}}': "part.safetensors', which is not there",
        '{"weight_map": {"a": "../copy/full.safetensors"}}': "which is not there",
        '{"weight_map": {"lm_head.weight": "full.safetensors"}}': "files it names differ: model.embed_tokens.weight,",
    }.items():
        (folder / "model.safetensors.index.json").write_text(text)
        assert message in refuse(folder)
    for text, message in (("[1]", "expected a JSON object, got a list"), ("{", "expected a JSON object: Expecting")):
        (folder / "config.json").write_text(text)
        assert message in refuse(folder)


COMMANDS = {
    "up": "unknown conversion 'up'; choose from hf-to-quaver, quaver-to-hf",
    "hf-to-quaver {hf} {out}": "exists already",
    "hf-to-quaver {hf} {tmp}/file/out": "Not a directory",
    "quaver-to-hf {out} {hf}": "exists already",
    "quaver-to-hf {hf} {tmp}/back": "is not a checkpoint",
    "quaver-to-hf {out} {tmp}/back --dtype=int8": "--dtype must be one of float32, bfloat16, got 'int8'",
    "quaver-to-hf {out} {tmp}/back --model=rowwise": "--model must be one of model, the models of",
    "quaver-to-hf {out} {tmp}/back --max-shard-size=5XB": "--max-shard-size must be a size above 0",
    "quaver-to-hf {out} {tmp}/back --max-shard-size=0GB": "such as 80GiB, 80GB, 512MiB",
    "quaver-to-hf {out} {tmp}/back --tokenizer={out}": "expected files of a tokenizer",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_arguments_and_places_are_refused_in_one_line(command, hf, out, tmp_path, run_refused):
    (tmp_path / "file").touch()
    assert COMMANDS[command] in run_refused("convert", *command.format(hf=hf("plain"), out=out, tmp=tmp_path).split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checkpoints_that_are_damaged_are_refused_in_one_line(out, tmp_path, run_refused):
    checkpoint = Path(shutil.copytree(out, tmp_path / "out"))
    record = json.loads((checkpoint / "checkpoint.json").read_text())

    def refuse(**changes: Any) -> str:
        config = {"model": {**record["config"]["model"], **changes}} if changes else record["config"]
        (checkpoint / "checkpoint.json").write_text(json.dumps({**record, "config": config}))
        write_manifest(checkpoint, {})
        return run_refused("convert", "quaver-to-hf", checkpoint, tmp_path / "back")

    assert "does not have the tensors that its config requires: model.layers.2." in refuse(n_layers=3)
    assert "lm_head.weight must be [256, 64], is [300, 64]" in refuse(vocab_size=256)
    assert "model settings that this version does not know: experts" in refuse(experts=4)
    part = next((checkpoint / "model").glob("*_0.distcp"))
    part.write_bytes(part.read_bytes()[:64])
    assert f"'{part.name}' has 64 bytes, expected " in refuse()
    part.unlink()
    assert f"'{part.name}' is missing" in refuse()
    (checkpoint / "model" / ".metadata").write_bytes(b"nothing")
    assert "cannot read" in refuse()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_nothing_and_says_so(hf, out, tmp_path, capsys, monkeypatch):
    create_stream = FileSystem.create_stream

    def fill_disk(self: FileSystem, path: Path, mode: str) -> Any:
        if "w" in mode:
            raise OSError(28, "No space left on device")
        return create_stream(self, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", fill_disk)
    monkeypatch.setattr("safetensors.torch.save_file", lambda *args, **kwargs: fill_disk(FileSystem(), tmp_path, "w"))
    for argv in (("hf-to-quaver", hf("plain")), ("quaver-to-hf", out)):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="4"):
            main(["convert", *map(str, argv), str(tmp_path / "other")])
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot write the weights" in line
        assert line.endswith("No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_is_stored_twice_is_refused(tmp_path):
    folder = make_hf(tmp_path / "hf", shard="60KB")
    parts = sorted(folder.glob("*.safetensors"))
    save_file({**load_file(parts[1]), **load_file(parts[0])}, parts[0])
    with pytest.raises(ValueError, match="has tensors in two files"):
        StoredTensors(folder)
