"""Output of `quaver memory`: the prediction, and optionally a comparison, advice and a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from quaver.lab.memory import CATEGORIES
from quaver.lab.memory.predict_step import Prediction
from quaver.lab.memory.reports.compare import Comparison, TensorDifference
from quaver.lab.memory.reports.pitfalls import strip_phase
from quaver.lab.memory.train_step.predict_run import RunMemory
from quaver.lab.memory.train_step.traffic import StepTraffic
from quaver.lab.plan.advise import Advice, AdvisedSetting
from quaver.lab.recorder.timeline_report import merge_blocks
from quaver.lab.terminal.byte_sizes import choose_unit, format_bytes, format_change
from quaver.lab.terminal.counts import format_count
from quaver.lab.terminal.tables import make_table

_DEVICE_NAMES = {"cuda": "an NVIDIA GPU that multiplies float8", "cpu": "a CPU"}


def iter_prediction_views(memory: RunMemory, device: str, top: int) -> Iterator[str | Table]:
    """Yield where and when the peak is, a table of categories, and one of the `top` largest tensors."""
    training, prediction = memory.config.training, memory.prediction
    batch = (
        f"{format_count(memory.micro_batches, 'microbatch')} of {format_count(training.local_batch_size, 'sequence')} "
        f"of {format_count(training.seq_len, 'token')}"
    )
    place = f"of {prediction.module_of_peak}" if prediction.module_of_peak else "outside of modules"
    moment = f"{prediction.phase_of_peak} {place}, by {prediction.operator_of_peak or 'nothing'}"
    lines = [
        ("model", f"{memory.parameters:,} parameters in {training.dtype}, trained in {memory.name}"),
        ("ranks", f"{memory.dims}; what follows is of one"),
        ("device", _DEVICE_NAMES[device]),
        ("step", batch),
        ("peak", f"{_format_long_size(prediction.peak_bytes)}, in the {moment}"),
        ("between", f"{_format_long_size(prediction.resident_bytes)} stay between steps"),
        (
            "saved",
            f"{_format_long_size(prediction.saved_by_forward_bytes)} are saved by the first forward for its backward",
        ),
        *(("note", note) for note in (*memory.notes, *prediction.notes)),
    ]
    yield from (_format_line(name, text) for name, text in lines)
    yield make_category_table(prediction)
    if top:
        yield make_tensor_table(prediction, top)


def iter_traffic_views(traffic: StepTraffic, checkpoint_bytes_per_s: int | None) -> Iterator[str | Table]:
    """Yield a table of the collectives of a step by mesh dims, its sums, and the size and seconds of a checkpoint.

    The sizes are rounded; the JSON has bytes.
    """
    yield _format_line("model", f"{traffic.parameters:,} parameters, trained in {traffic.name}")
    yield _format_line(
        "ranks",
        f"{traffic.dims}; what follows is of one, in a step of {format_count(traffic.micro_batches, 'microbatch')}",
    )
    columns, numbers = ("mesh dims", "ranks\n/ stride", "collective", "dtype"), ("number", "tensors", "sent")
    rows: list[tuple[str, ...]] = []
    for collective in traffic.collectives:
        place = (collective.mesh_dims, f"{collective.ranks} / {collective.stride}", collective.kind, collective.dtype)
        sizes = map(format_bytes, (collective.tensor_bytes, collective.sent_bytes))
        rows.append((*place, f"{collective.count:,}", *sizes))
    for mesh_dims, (count, sent_bytes) in traffic.sums.items():
        rows.append((mesh_dims, "", "all", "", f"{count:,}", "", format_bytes(sent_bytes)))
    yield make_table("Collectives of one rank in a step", (*columns, *numbers), rows=rows, right=numbers)
    size = _format_long_size(traffic.checkpoint_bytes)
    if checkpoint_bytes_per_s is not None:
        size += f", {traffic.checkpoint_bytes / checkpoint_bytes_per_s:.3g} s at {checkpoint_bytes_per_s:,} bytes/s"
    yield _format_line("checkpoint", f"{size}, of all ranks")


def _format_line(name: str, text: str) -> str:
    return f"{name:<11}{text}"


def make_category_table(prediction: Prediction) -> Table:
    """Return the bytes alive at the peak by category."""
    sizes = {**prediction.by_category, "sum": prediction.peak_bytes}
    rows = [(_replace_underscores(name), *_format_peak_numbers(prediction, size)) for name, size in sizes.items()]
    numbers = _name_peak_columns(prediction)
    return make_table("Alive at the peak", ("what", *numbers), rows=rows, right=numbers)


def make_tensor_table(prediction: Prediction, top: int) -> Table:
    """Return the `top` largest tensors alive at the peak, equal ones of all layers in one row."""
    rows = []
    for row in merge_blocks(prediction.at_peak)[:top]:
        tensors = f"{row['count']} x {row['dtype']} {row['shape']}" if row["dtype"] else str(row["count"])
        producer = (
            f"{strip_phase(row['operator'])} in the {row['phase']}" if row["operator"] else "from before the step"
        )
        places = [place for place in (row["module"], row["source"]) if place]
        description = f"{_replace_underscores(row['category'])}: {tensors}, {producer}" + "".join(
            f"\n  {place}" for place in places
        )
        rows.append((*_format_peak_numbers(prediction, row["bytes"])[1:], description))
    title, numbers = f"The largest {top} of it; * is the number of a layer", _name_peak_columns(prediction)[1:]
    return make_table(title, (*numbers, "what, and where"), rows=rows, right=numbers, wrapped=("what, and where",))


def _name_peak_columns(prediction: Prediction) -> tuple[str, str, str]:
    return "bytes", choose_unit(prediction.peak_bytes)[1], "share"


def _format_peak_numbers(prediction: Prediction, size_bytes: int) -> tuple[str, str, str]:
    peak_bytes = prediction.peak_bytes
    return f"{size_bytes:,}", f"{size_bytes / choose_unit(peak_bytes)[0]:.3f}", f"{size_bytes / peak_bytes:.1%}"


def iter_comparison_views(
    comparison: Comparison, prediction: Prediction, other: Prediction, top: int
) -> Iterator[str | Table]:
    """Yield the categories at both peaks, then the lines of `iter_comparison_lines`."""
    names = [name for name in CATEGORIES if name in prediction.by_category or name in other.by_category]
    sizes = {name: (prediction.by_category.get(name, 0), other.by_category.get(name, 0)) for name in names}
    sizes["sum"] = prediction.peak_bytes, other.peak_bytes
    sizes["saved for backward"] = prediction.saved_by_forward_bytes, other.saved_by_forward_bytes
    rows = [
        (
            _replace_underscores(name),
            f"{size:,}",
            f"{other_size:,}",
            f"{other_size - size:+,}",
            f"{other_size / size:.3f}" if size else "",
        )
        for name, (size, other_size) in sizes.items()
    ]
    numbers = ("bytes", "bytes there", "difference", "ratio")
    yield make_table("Compared with the other run, at the peaks", ("what", *numbers), rows=rows, right=numbers)
    yield from iter_comparison_lines(comparison, top)


def iter_comparison_lines(comparison: Comparison, top: int = 8) -> Iterator[str]:
    """Yield the lines of both runs, and at most `top` differences in saved and in live tensors."""
    runs = (
        ("first", comparison.label_a, comparison.peak_bytes_a, comparison.peak_at_a, comparison.saved_bytes_a),
        ("other", comparison.label_b, comparison.peak_bytes_b, comparison.peak_at_b, comparison.saved_bytes_b),
    )
    for name, label, peak, where, saved in runs:
        yield _format_line(name, label)
        yield _format_line("", f"peak {_format_long_size(peak)}, in the {where}")
        yield _format_line("", f"saved {_format_long_size(saved)}, by the first forward for its backward")
    peak_difference = comparison.peak_bytes_b - comparison.peak_bytes_a
    saved_difference = comparison.saved_bytes_b - comparison.saved_bytes_a
    yield _format_line("more", f"peak {format_change(peak_difference)}, saved {format_change(saved_difference)}")
    yield from ("", *_iter_differences("Differences in what is saved for backward", comparison.list_rows("saved"), top))
    yield from ("", *_iter_differences("Differences in what is alive at the peaks", comparison.list_rows("peak"), top))


def _iter_differences(title: str, rows: tuple[TensorDifference, ...], top: int) -> Iterator[str]:
    if not rows:
        yield f"{title}: nothing"
        return
    yield f"{title}:"
    yield from (f"    {row.sentence}" for row in rows[:top])
    omitted = rows[top:]
    if omitted:
        difference = format_change(sum(row.difference_bytes for row in omitted))
        yield f"    and {format_count(len(omitted), 'more row')}, {difference} in all"


def make_advice_table(advice: Advice) -> Table:
    """Return the settings that were tried and are possible, in that order; the best one is marked by a star."""
    has_limit = advice.fit_bytes is not None
    rows = []
    for index, row in enumerate(advice.rows):
        if row.peak_bytes is not None:
            fits = [{True: "yes", False: "no", None: ""}[row.fits]] if has_limit else []
            rows.append(("*" if index == advice.fastest_index else "", row.change, *_format_advice_numbers(row), *fits))
    columns = ("", "setting", "peak", "difference", "computed\nagain", "step", *(["fits"] if has_limit else []))
    title = "What changing a setting would do to the peak"
    return make_table(title, columns, rows=rows, wrapped=("setting",), right=columns[2:6])


def _format_advice_numbers(row: AdvisedSetting) -> tuple[str, str, str, str]:
    peak = "" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    difference = format_change(row.difference_bytes) if row.difference_bytes else ""
    cost = row.cost
    recomputed = (
        "" if cost is None or cost.recomputed_flops is None else f"{cost.recomputed_flops / cost.step_flops:.1%}"
    )
    step = "" if cost is None or cost.simulated_s is None else f"{cost.simulated_s:.3g} s"
    return peak, difference, recomputed, step


def summarize_advice(advice: Advice) -> list[str]:
    """Return the flags of the fastest setting that fits, or of the smallest; then impossible settings, and notes."""

    def describe(index: int) -> str:
        row = advice.rows[index]
        peak = "" if row.peak_bytes is None else f", {format_bytes(row.peak_bytes)}"
        return f"{row.change}{peak}" + (f": {row.flags}" if row.flags else "")

    lines = []
    if advice.fit_bytes is not None:
        size = format_bytes(advice.fit_bytes)
        if advice.fastest_index is not None:
            lines.append(f"fastest that fits {size}: {describe(advice.fastest_index)}")
        elif advice.smallest_index is not None:
            lines.append(f"nothing that was tried fits {size}; the smallest: {describe(advice.smallest_index)}")
    lines += [f"{row.change}: {row.note}" for row in advice.rows if row.note]
    notes = advice.notes if advice.device is None else [*advice.notes, f"times are simulated for {advice.device}"]
    return lines + notes


def make_side_by_side_table(compared: list[dict[str, Any]]) -> Table:
    """Return the rows of `tabulate_side_by_side` as a table; what was not measured stays empty."""
    rows = []
    for row in compared:
        measured, ratio = row["measured_bytes"], row["ratio"]
        cells = ("" if measured is None else f"{measured:,}", "" if ratio is None else f"{ratio:.4f}")
        rows.append((row["what"], f"{row['predicted_bytes']:,}", *cells))
    numbers = ("predicted bytes", "measured bytes", "ratio")
    return make_table("Predicted and measured, at the peak", ("what", *numbers), rows=rows, right=numbers)


def _replace_underscores(category: str) -> str:
    return category.replace("_", " ")


def _format_long_size(size_bytes: int) -> str:
    return f"{size_bytes:,} bytes = {format_bytes(size_bytes)}"
