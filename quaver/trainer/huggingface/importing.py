"""A Hugging Face Llama becomes a checkpoint that `checkpoint.initial_load_path` takes.

One tensor is in memory at a time.

OUT/checkpoint.json     as in a run's checkpoint, of step 0; the [model] section is its whole config
OUT/model/              a torch.distributed.checkpoint folder with the keys model.<name>; one file per tensor
OUT/model.toml          the [model] section, for quaver train
"""

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from quaver.trainer.checkpoints.checkpointer import Progress
from quaver.trainer.checkpoints.folder import FORMAT, RECORD
from quaver.trainer.checkpoints.new_folder import check_new, new_folder
from quaver.trainer.checkpoints.single_process import first_line, single_process
from quaver.trainer.config import Model
from quaver.trainer.errors import OutputError
from quaver.trainer.huggingface.config import kept_fields, model_from_hf, read_hf_config
from quaver.trainer.huggingface.files import DTYPES, HFWeights, torch_dtype
from quaver.trainer.huggingface.names import EMBEDDING, HEAD, all_shapes, file_shapes, listed
from quaver.trainer.run_folder import provenance

_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old versions of transformers saved; the config says what is in them."""


@dataclass(frozen=True)
class Import:
    """A Hugging Face folder that was checked and fits `model`."""

    folder: Path
    config: dict[str, Any]
    model: Model
    weights: HFWeights

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of one of the model's names, as it is stored."""
        tied = name == HEAD and self.model.tie_word_embeddings
        return self.weights.tensor(EMBEDDING if tied else name)


def open_hf(folder: Path) -> Import:
    """Read config.json and the headers of the files, and check that they fit.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the files are damaged or do not fit.
        NotImplementedError: quaver's Llama does not do this.
    """
    config = read_hf_config(folder)
    model = model_from_hf(config)
    found = Import(folder, config, model, HFWeights.open(folder))
    _check_tensors(found)
    return found


def import_hf(folder: Path, out: Path, dtype: str = "float32") -> Import:
    """Write the Hugging Face model in `folder` as the new checkpoint `out`.

    Args:
        dtype: float32 or bfloat16; of the stored weights.
    Raises:
        FileExistsError: `out` exists.
        OSError, ValueError, NotImplementedError: as `open_hf`; OSError where `out` cannot be made, too.
        OutputError: the weights cannot be written.
    """
    check_new(out)
    found = open_hf(folder)
    with new_folder(out) as partial:
        _save_weights(found, partial / "model", torch_dtype(dtype))
        (partial / RECORD).write_text(json.dumps(_record(found, dtype), indent=2) + "\n", encoding="utf-8")
        (partial / "model.toml").write_text(_toml(found), encoding="utf-8")
    return found


def _check_tensors(found: Import) -> None:
    weights, tied = found.weights, found.model.tie_word_embeddings
    expected = all_shapes(found.model)
    missing = [name for name in file_shapes(found.model) if name not in weights.shapes]
    if missing:
        raise ValueError(f"{str(found.folder)!r} lacks tensors that its config.json calls for: {listed(missing)}")
    unexpected = [name for name in weights.shapes if name not in expected and not _DERIVED.fullmatch(name)]
    if unexpected:
        raise ValueError(f"{str(found.folder)!r} has tensors that a Llama has not: {listed(unexpected)}")
    for name in expected.keys() & weights.shapes.keys():
        if weights.dtypes[name] not in DTYPES:
            raise NotImplementedError(
                f"{name} must be one of {', '.join(DTYPES.values())}, got {weights.dtypes[name]}; convert the model "
                "that was quantized"
            )
    misfits = [name for name, shape in expected.items() if weights.shapes.get(name, shape) != shape]
    if misfits:
        wrong = [f"{name} {list(weights.shapes[name])} instead of {list(expected[name])}" for name in misfits]
        raise ValueError(f"tensors do not have the shapes of config.json: {listed(wrong)}")
    if tied and HEAD in weights.shapes and not torch.equal(weights.tensor(HEAD), weights.tensor(EMBEDDING)):
        raise ValueError(
            f"config.json says tie_word_embeddings, but {HEAD} and {EMBEDDING} differ; say false there to keep both"
        )


class _StreamingPlanner(DefaultSavePlanner):
    """Reads each tensor when it is written; the state dict that is saved has only shapes, on the meta device."""

    def __init__(self, found: Import, dtype: torch.dtype) -> None:
        super().__init__()
        self._found, self._dtype = found, dtype

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        stored = self._found.tensor(write_item.index.fqn.removeprefix("model."))
        return stored.to(self._dtype, copy=True)  # else it is a view of the whole file


def _save_weights(found: Import, path: Path, dtype: torch.dtype) -> None:
    shapes = all_shapes(found.model)
    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    # A file for each tensor: torch keeps all that go into one file until it is written.
    writer = FileSystemWriter(path, single_file_per_rank=False, sync_files=False)
    try:
        with single_process():
            save({"model": state}, storage_writer=writer, planner=_StreamingPlanner(found, dtype), no_dist=True)
    except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeErrors
        raise OutputError(f"cannot write the weights to {str(path)!r}: {first_line(error)}") from error


def _record(found: Import, dtype: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "models": ["model"],
        "world_size": 1,
        "progress": asdict(Progress()),
        "config": {"model": asdict(found.model)},
        "provenance": provenance(torch.device("cpu")),
        "huggingface": {"folder": str(found.folder.resolve()), "dtype": dtype, **kept_fields(found.config)},
    }


def _toml(found: Import) -> str:
    return "# Made by quaver convert hf-to-quaver.\n" + tomli_w.dumps({"model": asdict(found.model)})
