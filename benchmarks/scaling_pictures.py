"""The pictures of docs/scaling.md, from benchmarks/results/scaling.json, which benchmarks/scaling.py draws."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

_STYLE: dict[str, dict[str, Any]] = {
    "dynamic": {"color": "0.55", "linewidth": 4, "zorder": 1},
    "delayed": {"color": "tab:blue"},
    "delayed, max": {"color": "tab:blue"},
    "delayed, most_recent": {"color": "tab:green", "linestyle": (0, (5, 2))},
    "delayed, headroom 2": {"color": "tab:purple", "linestyle": (0, (4, 1, 1, 1))},
    "delayed, window (0, 1.5)": {"color": "tab:orange", "marker": "o", "markersize": 4, "linestyle": "none"},
    "delayed, max, window (1/64, 1.5)": {"color": "tab:orange", "marker": "o", "markersize": 4, "linestyle": "none"},
    "static": {"color": "tab:red", "linestyle": (0, (1, 1))},
    "e4m3, Gaussian": {"color": "tab:blue"},
    "e5m2, Gaussian": {"color": "tab:green", "linestyle": (0, (5, 2))},
    "e4m3, Gaussian with outliers": {"color": "tab:orange", "linestyle": (0, (1, 1))},
}
_LABELS = {
    "sqnr_db": "SQNR of the cast, dB",
    "saturated": "saturated elements, %",
    "used_over_ideal": "used_over_ideal",
}


def draw(results: dict[str, Any], folder: Path) -> None:
    """Write every picture to `folder`: the same bytes for the same results and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    style = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "lines.linewidth": 1.8, "legend.frameon": False}
    with matplotlib.rc_context(style):
        for name, make in _PICTURES.items():
            figure = make(results)
            figure.savefig(folder / name, dpi=110, metadata={"Software": None})
            plt.close(figure)


def _stationary(results: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained", sharex=True)
    series = results["stationary"]
    for axis, result in zip(axes[0], ("output", "grad_input", "grad_weight"), strict=True):
        axis.plot(series["tensorwise"][result], label="dynamic", **_STYLE["dynamic"])
        axis.plot(series["delayed"][result], label="delayed", **_STYLE["delayed"])
        middle = series["tensorwise"][result][0]
        axis.set(title=result, ylim=(middle - 0.5, middle + 0.5))
    for axis, operand in zip(axes[1], ("input", "weight", "grad_output"), strict=True):
        axis.plot(series["delayed"][f"{operand}.used_over_ideal"], **_STYLE["delayed"])
        axis.axhline(1, color="0.3", linewidth=0.8)
        axis.set(title=f"{operand}, delayed", ylim=(0.7, 1.3), xlabel="step")
    axes[0, 0].set_ylabel("SQNR, dB")
    axes[1, 0].set_ylabel("used_over_ideal")
    axes[0, 0].legend(loc="lower right")
    figure.suptitle("Gaussian operands of a constant deviation: delayed scales lose no SQNR")
    return figure


def _columns(results: dict[str, Any], columns: dict[str, str], title: str) -> Figure:
    """One column a scenario, one row a measure."""
    figure, axes = plt.subplots(
        len(_LABELS), len(columns), figsize=(11, 8.2), layout="constrained", sharex="col", sharey="row", squeeze=False
    )
    for column, (scenario, heading) in enumerate(columns.items()):
        for row, (measure, label) in enumerate(_LABELS.items()):
            axis: Axes = axes[row, column]
            for contestant, series in results["scenarios"][scenario].items():
                values = series[measure]
                values = [100 * value for value in values] if measure == "saturated" else values
                axis.plot(values, label=contestant, drawstyle="steps-mid", **_STYLE[contestant])
            if measure == "saturated":
                axis.set_ylim(-4, 104)
            if measure == "sqnr_db":
                axis.set_ylim(-1.5, 35)
            if measure == "used_over_ideal":
                axis.set_yscale("log", base=2)
                axis.yaxis.set_major_locator(LogLocator(base=2**8, numticks=12))
                axis.axhline(1, color="0.3", linewidth=0.8)
                axis.set_xlabel("step")
            if column == 0:
                axis.set_ylabel(label)
        axes[0, column].set_title(heading)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    figure.suptitle(title)
    return figure


def _growth(results: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(3, 1, figsize=(9, 9), layout="constrained", sharex=True)
    for axis, (measure, label) in zip(axes, _LABELS.items(), strict=True):
        for contestant, series in results["scenarios"]["growth"].items():
            values = [100 * value for value in series[measure]] if measure == "saturated" else series[measure]
            if contestant != "delayed, most_recent":
                axis.plot(values, label=contestant, drawstyle="steps-mid", **_STYLE[contestant])
        axis.axvspan(9.5, 19.5, color="0.92", zorder=0)
        axis.set_ylabel(label)
    axes[0].set_ylim(14, 34)
    axes[0].text(14.5, 33, "grows", ha="center", va="top", color="0.35")
    axes[0].annotate("static: 0 dB", xy=(11.2, 14), xytext=(22, 16), arrowprops={"arrowstyle": "->"}, va="center")
    axes[1].set_ylim(-0.2, 4)
    axes[1].annotate("static: 99.6 %", xy=(10.2, 4), xytext=(22, 3.6), arrowprops={"arrowstyle": "->"}, va="center")
    axes[2].set_yscale("log", base=2)
    axes[2].set(ylim=(2**-2, 2**4), xlabel="step")
    axes[2].axhline(1, color="0.3", linewidth=0.8)
    axes[2].annotate("static: 1000", xy=(12.9, 16), xytext=(22, 11), arrowprops={"arrowstyle": "->"}, va="center")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    figure.suptitle("The input doubles at each of ten steps, then stays")
    return figure


def _spike(results: dict[str, Any]) -> Figure:
    columns = {"spike_1e3": "1,000 times as large", "spike_1e6": "1,000,000 times as large"}
    return _columns(results, columns, "One step (10) with a larger input, history_len=16")


def _drift(results: dict[str, Any]) -> Figure:
    columns = {"drift_up": "8 % larger each step", "drift_down": "25 % smaller each step"}
    return _columns(results, columns, "A slow drift, static scales calibrated before step 0")


def _wrong_scale(results: dict[str, Any]) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    measures = {"sqnr_db": "SQNR of the cast, dB", "saturated": "saturated elements, %", "zero": "became zero, %"}
    for axis, (measure, label) in zip(axes, measures.items(), strict=True):
        for name, series in results["wrong_scales"].items():
            values = [100 * value for value in series[measure]] if measure != "sqnr_db" else series[measure]
            axis.plot(series["power"], values, label=name, **_STYLE[name])
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set(xlabel="log2(used_over_ideal)", title=label, xticks=range(-28, 9, 4), xlim=(-30, 8))
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    figure.suptitle("A scale too large saturates at once; one too small costs little until values become zero")
    return figure


_PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "scaling_wrong_scale.png": _wrong_scale,
    "scaling_stationary.png": _stationary,
    "scaling_growth.png": _growth,
    "scaling_spike.png": _spike,
    "scaling_drift.png": _drift,
}
PICTURES = tuple(_PICTURES)
