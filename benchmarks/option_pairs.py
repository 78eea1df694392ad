"""Tests pairs of the trainer's options: compares each row of a pairwise array with a plain run in one process.

    python -m benchmarks.option_pairs                 # all rows: some 15 minutes on two idle cores
    python -m benchmarks.option_pairs --first 10 --rows 5 --seed 2
    python -m benchmarks.option_pairs --only layout=fsdp_experts,checkpoint=selective

Every possible pair of values of two options is in some row. A row trains three steps; every third row trains two,
resumes and trains one more. The reference has the same numeric options, in eager code of one process, without float8
gathers. It has no activation checkpointing either, unless activations are stored in float8: recomputed activations are
not stored.

In the first step only the order of float32 sums differs (`SUMS`). Then parameters differ in their last bits. A cast
amplifies this to one code, or the scale of a block to a power of two (`CODES`); Muon's Newton-Schulz iteration computes
in bfloat16 (`MUON`; without float8, too, losses differ by up to 5e-4). Only split experts cast with other scales: in
tensorwise recipes the tokens of an expert have one scale for all ranks. Two such casts differ as float8 does from
float32: losses by 3e-4 in the first step and 2.4e-3 later, norms by 2.5e-2 (`CASTS`).

A row that the trainer refuses is printed with its error. The exit code is 1 if a row differs or fails.
"""

import argparse
import itertools
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from quaver.lab.cli import main
from quaver.lab.model.llama import Block
from quaver.lab.runs.json_lines import read_json_lines
from tests.lab.integration.train_on_ranks import compile_quickly, train_on_ranks

BASE = [
    *("--model.dim=128", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.hidden_dim=128"),
    *("--training.seq_len=64", "--training.local_batch_size=1", "--training.global_batch_size=4"),
    *("--training.device=cpu", "--training.mixed_precision_param=float32", "--lr_scheduler.warmup_steps=1"),
    *("--lr_scheduler.schedule=constant", "--validation.freq=3", "--validation.steps=4", "--metrics.log_freq=1"),
]
GATHER = "--float8.enable_fsdp_float8_all_gather"
CHECKPOINT, OPTION = "--activation_checkpoint.mode=", "--activation_checkpoint.selective_ac_option="
KEEP = "--activation_checkpoint.selective_ac_also_save="
EXPERTS = "--model.n_experts=4"
TENSOR, SPLIT, REPLICATE = (
    f"--parallelism.{name}_degree=2" for name in ("tensor_parallel", "expert_parallel", "data_parallel_replicate")
)

WHOLE_BLOCKS = [f"--model.{name}=256" for name in ("dim", "hidden_dim")] + ["--model.n_kv_heads=4"]
"""Sizes with which each of two tensor parallel ranks has whole blocks of 128."""

LAYOUTS = {
    "one": (1, []),
    "fsdp": (2, []),
    "hsdp": (4, [REPLICATE]),
    "tensor": (2, [TENSOR]),
    "fsdp_tensor": (4, [TENSOR]),
    "experts": (2, [SPLIT]),
    "fsdp_experts": (4, [SPLIT]),
}
"""The number of ranks and the flags, by name."""

FREE = {
    "layout": {name: flags for name, (_, flags) in LAYOUTS.items()},
    "gather": {
        "high_precision": [],
        "float8": [GATHER],
        "precomputed": [GATHER, "--float8.precompute_float8_dynamic_scale_for_fsdp"],
        "once": [GATHER, "--float8.cast_weights_once"],
    },
    "checkpoint": {
        "none": [],
        "full": [f"{CHECKPOINT}full"],
        "selective": [f"{CHECKPOINT}selective"],
        "second": [f"{CHECKPOINT}selective", f"{OPTION}2"],
        "kept": [f"{CHECKPOINT}selective", f"{KEEP}aten.silu,aten.mul,aten.add"],
        "memory_budget": [f"{CHECKPOINT}memory_budget"],
    },
    "compile": {"eager": [], "compiled": ["--training.compile"]},
    "reshard": {"default": [], "always": ["--parallelism.fsdp_reshard_after_forward=always"]},
}
"""Options that must not change the results."""

NUMERIC = {
    "recipe": {
        name: [f"--float8.recipe_name={name}"]
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "mxfp8")
    }
    | {"blockwise": ["--float8.recipe_name=blockwise", *WHOLE_BLOCKS]},
    "model": {
        "dense": [],
        "tied": ["--model.tie_word_embeddings"],
        "mixture": [EXPERTS],
        "shared": [EXPERTS, "--model.n_shared_experts=1"],
    },
    "optimizer": {name: [f"--optimizer.name={name}"] for name in ("AdamW", "Float8AdamW", "Muon", "Float8Muon")},
    "besides": {
        "nothing": [],
        "compare": ["--job.compare"],
        "tail": ["--float8.high_precision_schedule=all: last 1 steps"],
        "mask": ["--data.document_mask"],
        "monitor": ["--numerics.every=1"],
        "stored": ["--activation_checkpoint.store_in_float8"],
        "layers": ["--float8.layer_recipes=model.layers.0.self_attn.o_proj=rowwise"],
    },
}
OPTIONS = {**FREE, **NUMERIC}


class Tolerance(NamedTuple):
    """The largest relative differences of losses and of gradient norms from the reference."""

    loss: float
    grad_norm: float


SUMS, CODES, MUON, CASTS = Tolerance(1e-5, 1e-5), Tolerance(2e-4, 5e-3), Tolerance(2e-3, 5e-2), Tolerance(5e-3, 5e-2)
"""The top of the file says what differs by each."""


def choose_tolerances(row: dict[str, str]) -> tuple[Tolerance, Tolerance]:
    """Return the tolerances of a row in the first step and in later ones."""
    if "experts" in row["layout"] and row["recipe"] == "tensorwise":
        return CODES, CASTS
    return SUMS, MUON if "Muon" in row["optimizer"] else CODES


def is_possible(row: dict[str, str]) -> bool:
    """Whether the trainer accepts the row. The trainer's own tests cover its refusals."""
    layout, is_mixture = row["layout"], row["model"] in ("mixture", "shared")
    is_tensor, is_split = "tensor" in layout, "experts" in layout
    shards = layout in ("fsdp", "hsdp", "fsdp_tensor", "experts", "fsdp_experts")
    return not (
        (is_mixture and (is_tensor or row["recipe"] == "delayed"))
        or (is_tensor and row["model"] == "tied")
        or (is_split and not is_mixture)
        or (row["gather"] != "high_precision" and (not shards or row["besides"] == "tail"))
        or (row["reshard"] == "always" and not shards)
        or (is_tensor and row["besides"] in ("tail", "layers"))
        or (row["checkpoint"] == "memory_budget" and (row["compile"] == "eager" or is_tensor or is_split))
        or (row["besides"] == "stored" and row["compile"] == "compiled")  # aot_eager stores nothing
    )


def make_covering_array(seed: int) -> list[dict[str, str]]:
    """Return rows that cover each possible pair of values, chosen greedily among random rows."""
    rng = random.Random(seed)
    names = list(OPTIONS)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in OPTIONS[a] for y in OPTIONS[b]}
    rows, vain = [], 0
    while missing and vain < 20:
        best: dict[str, str] = {}
        wanted = sorted(missing)
        for _ in range(200):
            (a, x), (b, y) = rng.choice(wanted)
            row = {name: rng.choice(list(values)) for name, values in OPTIONS.items()} | {a: x, b: y}
            if is_possible(row) and len(missing & _list_pairs(row)) > len(missing & _list_pairs(best)):
                best = row
        vain = 0 if best else vain + 1
        if best:
            missing -= _list_pairs(best)
            rows.append(best)
    return rows


def _list_pairs(row: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(row.items(), 2))


class Runs:
    """Trains rows and their references below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, folder / "text"
        self.text.mkdir()
        for number in range(400):
            (self.text / f"{number}.txt").write_text(f"{number} bottles of beer on the wall, {number} bottles\n")

    def check(self, index: int, row: dict[str, str]) -> str:
        """Train a row, and return how it differs from its reference or fails, or ""."""
        name, ranks = f"row_{index}", LAYOUTS[row["layout"]][0]
        flags = [flag for option, value in row.items() for flag in OPTIONS[option][value]]
        launches = [[*self._make_flags(name), *flags, "--training.steps=3"]]
        if index % 3 == 0:
            resumed = [f"--resume={self.folder / 'runs' / name}", "--training.steps=3"]
            launches = [[*launches[0][:-1], "--training.steps=2", "--checkpoint.enable"], resumed]
            if row["besides"] == "tail":  # the length of a run says where its tail begins
                launches[0][-1:] = ["--checkpoint.enable", "--checkpoint.interval=2", "--training.steps=3"]
                launches.pop()
        else:
            launches[0].append("--checkpoint.no-enable")
        for launch in launches:
            if error := self._train(ranks, launch):
                return error
        return self._find_difference(row, name, self._train_reference(row))

    def _make_flags(self, name: str) -> list[str]:
        return [*BASE, f"--data={self.text}", f"--job.dump_folder={self.folder / 'runs'}", f"--job.name={name}"]

    def _train_reference(self, row: dict[str, str]) -> str:
        options = [*NUMERIC, *(["checkpoint"] if row["besides"] == "stored" else [])]
        name = "one_" + "_".join(row[option] for option in options)
        if not (self.folder / "runs" / name).exists():
            flags = [flag for option in options for flag in OPTIONS[option][row[option]]]
            error = self._train(1, [*self._make_flags(name), *flags, "--training.steps=3", "--checkpoint.no-enable"])
            if error:
                raise RuntimeError(f"the reference {name}: {error}")
        return name

    def _train(self, ranks: int, flags: list[str]) -> str:
        try:
            if ranks == 1:
                with mock.patch.object(Block, "compile", compile_quickly):
                    code = main(["train", *flags])
                return f"exit code {code}" if code else ""
            done = train_on_ranks(ranks, [("row", flags)])
        except SystemExit as stopped:
            return f"exit code {stopped.code}"
        except Exception as error:  # noqa: BLE001 - whatever ends a row is its finding
            lines = [line for line in str(error).splitlines() if line and not line.startswith((" ", "rank "))]
            raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Unsupported)\b", line)]
            return f"{type(error).__name__}: {[str(error), *lines, *raised][-1]}"
        lines = [line for line in done.stderr.splitlines() if "error:" in line]
        return "; ".join(lines) if any(end["row"][0] for end in done.ended) else ""

    def _find_difference(self, row: dict[str, str], name: str, reference: str) -> str:
        first, later = choose_tolerances(row)
        for key, kind in (("loss", "loss"), ("grad_norm", "grad_norm"), ("validation_loss", "loss")):
            ours, theirs = (self._read_numbers(run, key) for run in (name, reference))
            limits = [later if key == "validation_loss" or step else first for step in range(len(theirs))]
            pairs = zip(ours, theirs, limits, strict=False)
            if len(ours) != len(theirs) or any(
                abs(a - b) > getattr(tolerance, kind) * abs(b) for a, b, tolerance in pairs
            ):
                return f"{key} {ours[:6]}, expected {theirs[:6]}"
        return ""

    def _read_numbers(self, name: str, key: str) -> list[float]:
        """Return the values of `key` of the first model in the metrics; of validation_loss only the last."""
        records = read_json_lines(self.folder / "runs" / name / "metrics.jsonl")
        values = [line[key] for line in records if key in line and line["model"] == records[0]["model"]]
        return values[-1:] if key == "validation_loss" else values


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="the seed of the random choice of rows")
    parser.add_argument("--first", type=int, default=0, help="the row to begin with")
    parser.add_argument("--rows", type=int, help="the number of rows; by default all from --first on")
    parser.add_argument("--only", default="", help="run only rows with these values: option=value,...")
    return parser.parse_args()


def _main() -> int:
    options, wrong = _parse_options(), 0
    only = dict(pair.partition("=")[::2] for pair in options.only.split(",") if pair)
    rows = [(index, row) for index, row in enumerate(make_covering_array(options.seed)) if only.items() <= row.items()]
    rows = rows[options.first :][: options.rows]
    if not rows:
        raise SystemExit("no row has these options and numbers; OPTIONS in benchmarks/option_pairs.py has all values")
    folder = Path(tempfile.mkdtemp(prefix="option_pairs_"))
    runs = Runs(folder)
    try:
        for index, row in rows:
            finding = runs.check(index, row)
            wrong += bool(finding)
            print(f"{index:3} {' '.join(row.values())}: {finding or 'right'}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    print(f"{len(rows)} rows, {wrong} wrong", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(_main())
