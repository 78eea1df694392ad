"""Makes memory reports for tests of pages: a small model's, ones with hostile names, and the tensors of a run's."""

import copy

import numpy as np
import torch

from quaver.lab.memory import predict_step_memory
from quaver.lab.recorder.recorder import CATEGORIES
from tests.lab.memory.models import build_stack
from tests.lab.report.records import make_alarm, make_layers, make_tensors

HOSTILE = "</script><script>document.title='taken'</script><!-- &amp; \"'` {{data}} \u2028"
"""A name that is markup, ends a script, opens a comment, is a placeholder, and breaks a line of JavaScript."""
MIB = 2**20
LAYERS = [f"layers.0.{HOSTILE}", *make_layers(1)]
TENSORS = make_tensors(LAYERS)
ALARMS = [make_alarm(240, TENSORS[6]), make_alarm(300, TENSORS[20], rule="underflow")]
WIDE, BAD_TENSOR, BAD_SAMPLE = 600, 411, 617


def predict_small_model(*, layers: int = 3, rows: int = 2048) -> dict:
    """Return a real prediction of a small model."""
    inputs = (torch.empty(rows, 256, device="meta"),)
    with torch.device("meta"):
        model = build_stack(layers=layers, width=256, hidden=1024)
    return predict_step_memory(model, inputs, optimizer=torch.optim.AdamW).to_dict(timeline=True)


def make_row(size_bytes: int, **what) -> dict:
    """Return a row of a report with every field that one can have."""
    mlp, gate = "model.layers.0.mlp", "model.layers.0.mlp.gate_proj"
    plain = {"category": "saved_activations", "bytes": size_bytes, "count": 1, "module": gate, "of": f"{gate}.weight"}
    plain |= {"operator": "quaver::gemm (quaver.exact_float8_mm)", "source": "quaver/linear/gemm.py:106"}
    plain |= {"phase": "forward", "shape": [2048, 768], "dtype": "bfloat16", "saved_in": mlp, "saved_by": "autograd"}
    first_use = {"operator": "aten.mm", "module": mlp, "source": "quaver/linear/module.py:123"}
    return plain | {"first_use": first_use} | what


def make_report() -> dict:
    """Return a prediction by hand: two layers, a hostile name, and an old row without the optional fields; 100 MiB.

    Gradients are there after the peak only.
    """
    layer = "model.layers.1.mlp.gate_proj"
    names = ("category", "bytes", "count", "operator", "phase", "shape", "dtype")
    old = {name: make_row(6 * MIB)[name] for name in names}
    hostile = dict.fromkeys(("module", "dtype", "saved_by"), HOSTILE)
    at_peak = [
        make_row(40 * MIB),
        make_row(40 * MIB, module=layer, of=f"{layer}.weight", saved_in="model.layers.1.mlp", first_use=None),
        make_row(10 * MIB, category="temporaries", operator=None, of="", **hostile),
        old | {"category": "parameters", "module": "", "operator": None},
        make_row(4 * MIB, category="communication", module="model.norm", operator="c10d.all_gather", shape=[4, 2]),
    ]
    by_category = dict.fromkeys(CATEGORIES, 0)
    for tensor in at_peak:
        by_category[tensor["category"]] += tensor["bytes"]
    resident = dict.fromkeys(CATEGORIES, 0) | {"parameters": 6 * MIB}
    start, peak, late = ([*sums.values()] for sums in (resident, by_category, resident | {"gradients": MIB}))
    report = {"schema": 1, "exact": True, "note": "", "peak_bytes": 100 * MIB, "peak_event": 2, "at_peak": at_peak}
    report |= {"saved_bytes": 80 * MIB, "saved_event": 1, "saved_for_backward": at_peak[:2], "resident_bytes": resident}
    report |= {"spans": [["forward", 0, 1], ["backward", 1, 3], ["optimizer", 3, 4]]}
    report |= {"columns": ["event", "t_us", *CATEGORIES]}
    rows = enumerate((start, start, peak, late, start))
    report |= {"timeline": [[event, float(event), *sizes] for event, sizes in rows]}
    about = {"peak_bytes": 100 * MIB, "step_peak_bytes": 94 * MIB, "saved_by_forward_bytes": 80 * MIB}
    about |= {"phase_of_peak": "backward", "module_of_peak": HOSTILE, "operator_of_peak": "aten.mul"}
    about |= {"resident_bytes": 6 * MIB, "reads_answered_by_1": 0, "notes": [HOSTILE], "report": report}
    return about | {"by_category": {name: size for name, size in by_category.items() if size}}


def make_unseen() -> dict:
    """Return a report of compiled code: what stays between steps, and nothing else."""
    peaks = dict.fromkeys(("peak_bytes", "step_peak_bytes", "saved_by_forward_bytes"))
    prediction = make_report() | peaks | {"by_category": {}}
    blind = {name: [] for name in ("timeline", "at_peak", "saved_for_backward", "spans")}
    unknown = dict.fromkeys(("peak_bytes", "peak_event", "saved_bytes", "saved_event"))
    prediction["report"] |= blind | unknown | {"exact": False, "note": "compiled code: not attributed"}
    return prediction


def make_wide(events: int, rows: int) -> dict:
    """A prediction of a run with many events, one of them a peak among zeros, and many rows that are all different."""
    prediction = make_report()
    report = prediction["report"]
    low = 100 * MIB // 3 // len(CATEGORIES)
    sizes = np.random.default_rng(0).integers(low, size=(events, len(CATEGORIES))).tolist()
    timeline = [[event, event / 3, *columns] for event, columns in enumerate(sizes)]
    report["peak_event"] = event = events // 3
    timeline[event] = [event, event / 3, *report["timeline"][2][2:]]
    report["timeline"] = timeline
    report["spans"] = [["forward", 0, events // 2], ["backward", events // 2, events - 1]]
    names = [f"model.layers.{at}.mlp.gate_proj" for at in range(rows)]
    table = [make_row(1000 + at, module=name, of=f"{name}.weight") for at, name in enumerate(names)]
    return prediction | {"report": report | {"at_peak": table, "saved_for_backward": copy.deepcopy(table)}}


def make_comparison() -> dict:
    """What `make_report` and another run differ in: one row of more, one of less, one at the peak."""
    names = ("category", "operator", "of", "shape", "dtype", "source", "saved_by")
    plain = {"count_a": 32, "count_b": 0, "num_layers": 32} | {name: make_row(0)[name] for name in names}
    more = {"module": "model.layers.*.more", "bytes_a": 0, "bytes_b": 3 * MIB, "difference_bytes": 3 * MIB}
    less = {"module": HOSTILE, "bytes_a": 8 * MIB, "bytes_b": 2 * MIB, "difference_bytes": -6 * MIB}
    rows = [
        plain | less | {"table": "saved", "sentence": f"-6 MiB: {HOSTILE}"},
        plain | more | {"table": "saved", "sentence": "+3 MiB: more of it"},
        plain | more | {"table": "peak", "sentence": "+3 MiB: at the peak"},
    ]
    peaks = {"peak_bytes_a": 100 * MIB, "peak_bytes_b": 97 * MIB}
    return {"label_a": f"first {HOSTILE}", "label_b": "second", **peaks, "rows": rows}


def make_advice() -> dict:
    """Two changes, of which the second fits."""
    plain = {"recomputed_flops": 0, "step_flops": 2 * 10**12, "note": "", "fits": False, "flags": ""}
    cheap = {"change": HOSTILE, "peak_bytes": 100 * MIB, "difference_bytes": 0}
    full = {"change": "full checkpointing", "peak_bytes": 60 * MIB, "difference_bytes": -40 * MIB}
    full |= {"recomputed_flops": 5 * 10**11, "fits": True, "flags": "--activation_checkpoint.mode full"}
    return {"rows": [plain | cheap, plain | full], "fit_bytes": 64 * MIB, "fastest_index": 1}
