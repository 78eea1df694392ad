"""Writes run folders by hand: a record of numerics of any size, metrics, provenance and a conversion report."""

import base64
import json
import math
import re

import numpy as np

from quaver.numerics.record import Histogram, Record

OPERANDS = ("input", "weight", "grad_output")
RESULTS = ("output", "grad_input", "grad_weight")
STATISTICS = ("amax", "underflow", "saturated", "sqnr_db", "nonfinite")
LINEARS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.w1", "ffn.w2", "ffn.w3")
BINS, LOW = 40, -30


def make_tensors(layers):
    """Three operands and three results of each layer, as a header has them."""
    plain = {"granularity": "tensorwise", "block": None, "recipe": "tensorwise"}
    return [
        plain
        | {"layer": layer, "operand": operand, "cast": "result" if operand in RESULTS else "both"}
        | {"dtype": "float8_e5m2" if operand == "grad_output" else "float8_e4m3fn"}
        for layer in layers
        for operand in (*OPERANDS, *RESULTS)
    ]


def split_casts(tensors):
    """`tensors` as rowwise scaling has them: two casts of each operand."""
    casts = {"result": ("result",), "both": ("row", "column")}
    return [tensor | {"cast": cast} for tensor in tensors for cast in casts[tensor["cast"]]]


def make_header(tensors, **fields):
    about = {"quaver": "0.1.0", "torch": "2.13.0", "recipe": "tensorwise", "every": 10, "step": 10, "ranks": 1}
    return {"kind": "header", "schema": 1, **about, "statistics": list(STATISTICS), "tensors": tensors, **fields}


def make_sample(step, values, **more):
    """Return a sample of `values`: a list of one number per tensor by statistic; a record spells what is not finite."""
    spell = lambda value: value if value is None or math.isfinite(value) else str(float(value))  # noqa: E731
    columns = {name: list(map(spell, values[name])) for name in STATISTICS}
    return {"kind": "sample", "step": step, **columns, **more}


def draw_samples(tensors, samples, *, seed=0, every=10, histograms=4):
    """Samples of a plausible run: each layer has its own level, amaxes grow, one operand gets worse in the middle."""
    numbers, count = np.random.default_rng(seed), len(tensors)
    is_result = np.array([tensor["cast"] == "result" for tensor in tensors])
    level, drift = numbers.uniform(24, 31, count), numbers.normal(0, 1.5, count)
    for at in range(samples):
        part = at / max(1, samples - 1)
        sqnr = level + drift * part + numbers.normal(0, 0.5, count)
        saturated = np.where(numbers.random(count) < 0.05, 10 ** numbers.uniform(-6, -4, count), 0.0)
        bad = len(tensors) // 2 // 6 * 6
        if part > 0.5:
            sqnr[bad] -= 40 * (part - 0.5)
            saturated[bad] = 0.02 * (part - 0.5)
        underflow = 10 ** numbers.uniform(-5, -2, count)
        values = {"amax": 2.0 ** (numbers.normal(2, 1, count) + 3 * part), "underflow": underflow}
        values |= {"saturated": saturated, "sqnr_db": sqnr, "nonfinite": np.zeros(count)}
        values = {name: column.round(9).tolist() for name, column in values.items()}
        for name in ("underflow", "saturated"):
            values[name] = np.where(is_result, None, values[name]).tolist()  # type: ignore[attr-defined]
        more = {}
        if histograms and at % max(1, samples // histograms) == 0:
            what_if = np.where(is_result, None, np.array(values["sqnr_db"]) + 1.5).tolist()
            more = {"histogram": make_histogram(count, part), "whatif": {"rowwise": what_if}}
        yield make_sample((at + 1) * every, values, **more)


def make_histogram(count, shift=0.0):
    """Bell-shaped counts before the cast; the cast empties the lowest bins."""
    bins = np.arange(BINS)
    counts = 1e6 * np.exp(-(((bins - 24 - 4 * shift) / 4) ** 2))
    before = np.round(8 * np.log2(1 + counts)).astype(np.uint8)
    after = np.where(bins < 16, 0, before).astype(np.uint8)
    before, after = (base64.b64encode(counts.tobytes()).decode() for counts in (before, after))
    return {"low": LOW, "bins": BINS, "before": [before] * count, "after": [after] * count}


def make_alarm(step, tensor, **fields):
    about = {"since": step - 20, "rule": "saturation", "rank": None, "value": 0.01, "threshold": 0.001}
    remedies = [{"recipe": "rowwise", "sqnr_db": 27.1, "gain_db": 14.0}]
    remedies += [{"recipe": "high precision", "flops_share": 0.008}]
    message = f"{tensor['layer']} {tensor['operand']}: 1% are clipped since step {step - 20}. rowwise gives 27.1 dB"
    where = {"layer": tensor["layer"], "operand": tensor["operand"]}
    event = {"kind": "alarm", "step": step, **about, **where, "message": message, "remedies": remedies, "action": "log"}
    return event | fields


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_metrics(steps, models=("tensorwise",), *, seed=0):
    """A falling loss, a gradient norm, tokens/s and resident memory."""
    numbers = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        for model in models:
            loss = 2 + 3.5 * math.exp(-step / (steps / 5)) + numbers.normal(0, 0.03)
            record = {"kind": "step", "step": step, "model": model, "precision": model, "loss": loss}
            yield record | {
                "loss_spike": False,
                "grad_norm": 1 + 4 * math.exp(-step / 20) + abs(numbers.normal(0, 0.2)),
                "tokens_per_s": 50_000 + numbers.normal(0, 1000),
                "memory_active_bytes": 3 * 2**30 + step * 1000,
                "memory_active_share": 0.1,
            }
            if step % max(1, steps // 4) == 0:
                yield {"kind": "validation", "step": step, "model": model, "validation_loss": loss + 0.1}


def make_conversion(layers):
    row = {"in_features": 64, "out_features": 64, "converted": True, "reason": "", "backend": "exact"}
    rows = [{"name": name, **row} for name in layers]
    rows.append({"name": "lm_head", "in_features": 64, "out_features": 256, "converted": False, "reason": "filtered"})
    about = {"config": "output: tensorwise", "notes": [], "convolutions": 0, "float8_flops_fraction": 0.9}
    return about | {"layers": rows}


START = {
    "started_at": "2026-11-25T12:00:00+0000",
    "command": ["quaver", "train", "a.toml"],
    "working_folder": "/w",
    "host": "node",
    "quaver": "0.1.0",
    "git": {"commit": "a" * 40, "is_modified": True},
    "from_step": 0,
    "environment": {"device": "NVIDIA H100", "torch": "2.13.0", "python": "3.11.7"},
    "changes": {},
}


def make_layers(blocks):
    return [f"layers.{block}.{linear}" for block in range(blocks) for linear in LINEARS]


def write_run(folder, *, layers, samples=40, alarms=(), models=("tensorwise",), steps=400, seed=0, tensors=None):
    """Return a run folder with everything."""
    tensors = tensors or make_tensors(layers)
    write_lines(folder / "metrics.jsonl", make_metrics(steps, models, seed=seed))
    write_lines(folder / "provenance.jsonl", [START])
    (folder / "conversion_report.json").write_text(json.dumps(make_conversion(layers)))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "reason": None, "steps": steps}))
    write_lines(folder / "numerics.jsonl", [make_header(tensors), *draw_samples(tensors, samples, seed=seed), *alarms])
    return folder


def make_wide_record(tensors, samples):
    """A record with random statistics and histograms, without its file, which takes seconds to write and read."""
    numbers = np.random.default_rng(0)
    shape = samples, len(tensors)
    values = {"sqnr_db": numbers.uniform(0, 50, shape), "amax": 2 ** numbers.uniform(-20, 20, shape)}
    values |= {name: 10 ** numbers.uniform(-7, 0, shape) for name in ("underflow", "saturated")}
    counts = numbers.integers(0, 2**20, (len(tensors), BINS)).astype(np.float64)
    histograms = {at: Histogram(LOW, counts, counts) for at in range(0, samples, 50)}
    return Record(make_header(tensors), np.arange(1, samples + 1) * 10, values, histograms=histograms)


def read_data(page):
    """Return the data that a page embeds."""
    text = page.read_text(encoding="utf-8")
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[0])
