"""Tests the origin of a row of a memory report: source line, operand, the mechanism that saved it, its first reader."""

import inspect
from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from quaver import Float8Linear
from quaver.activations import apply_activation_checkpointing
from quaver.lab.memory import record_timeline
from quaver.lab.recorder.callers import NOT_MODEL_CODE
from quaver.lab.recorder.timeline_report import merge_blocks
from tests.ranks import on_ranks

ROWS, WIDTH = 32, 64
HERE = "tests/lab/recorder/test_origins.py"


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input):
        scaled = input * self.weight
        return scaled.pow(2)


class Sinks(nn.Module):
    """Holds a tensor itself, without autograd."""

    def forward(self, input):
        self.held = input.detach() + 1
        return input * 2


def find_lines(cls, text):
    """Return the lines of a class's source that contain `text`, as reports write them."""
    lines, first = inspect.getsourcelines(cls)
    return [f"{HERE}:{first + number}" for number, line in enumerate(lines) if text in line]


def record_step(model, input):
    """Return the allocations of a step, and its report."""
    with record_timeline(model) as timeline:
        model(input).sum().backward()
    report = timeline.report()
    return [timeline.get_allocation(event) for event in range(1, len(report["timeline"]))], report


def select_saved(report, **values):
    return [row for row in report["saved_for_backward"] if row.items() >= values.items()]


def test_the_modules_that_are_not_model_code_exist():
    assert all(find_spec(prefix.removesuffix(".")) for prefix in NOT_MODEL_CODE)


def test_a_saved_result_has_its_line_its_operand_and_its_first_reader():
    model = nn.Sequential(Squares(), nn.Linear(WIDTH, 1))
    _, report = record_step(model, torch.randn(ROWS, WIDTH))
    (row,) = select_saved(report, operator="aten.mul.Tensor", category="saved_activations")
    assert [row["source"]] == find_lines(Squares, "input *")
    assert (row["of"], row["saved_by"], row["saved_in"]) == ("an input", "autograd", "0")
    use = row["first_use"]
    assert use["operator"] == "aten.pow.Tensor_Scalar"  # the derivative of a square asks for its first power
    assert use["module"] == "0"
    assert [use["source"]] == [f"backward of {line}" for line in find_lines(Squares, "pow(2)")]


def test_allocations_of_cpp_nodes_have_the_line_of_their_forward():
    allocations, _ = record_step(nn.Sequential(nn.Linear(WIDTH, WIDTH), Squares()), torch.randn(ROWS, WIDTH))
    sources = {event.source for event in allocations if event.phase == "backward"}
    assert {f"backward of {line}" for line in find_lines(Squares, "pow(2)")} <= sources
    assert not any(source.startswith(HERE) for source in sources)  # the call of `backward` explains nothing


def test_a_float8_cast_is_of_the_parameter_by_its_name():
    model = nn.Sequential(Float8Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))
    input = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    allocations, report = record_step(model, input)
    casts = [event for event in allocations if (event.operator or "").startswith("quaver::cast")]
    assert "0.weight" in {cast.operand.parameter for cast in casts if cast.operand is not None}
    assert all(row["source"] for row in report["at_peak"] if row["operator"])


def test_layers_that_are_alike_are_one_row():
    names = ["model.layers.0.up2", "model.layers.1.up2", "10 rows"]
    rows = [{"module": name, "bytes": size, "count": 2, "shape": [2]} for size, name in enumerate(names, 5)]
    merged = [(row["module"], row["bytes"], row["count"]) for row in merge_blocks(rows)]
    assert merged == [("model.layers.*.up2", 11, 4), ("10 rows", 7, 2)]


def test_rows_name_the_mechanism_that_saved_them():
    input = torch.randn(ROWS, WIDTH)
    rows = {}
    for mode, mechanism in (("selective", "selective policy"), ("full", "checkpoint")):
        linears = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        apply_activation_checkpointing([linears], mode=mode)
        _, report = record_step(nn.Sequential(nn.Linear(WIDTH, WIDTH), linears), input)
        rows[mode] = select_saved(report, saved_by=mechanism)
    assert "recompute" in [phase for phase, _, _ in report["spans"]]
    assert [row["operator"] for row in rows["selective"]] == ["aten.mm", "aten.mm"]
    (row,) = rows["full"]
    assert (row["operator"], row["module"], row["first_use"]["operator"]) == ("aten.addmm", "0", "aten.mm")
    _, report = record_step(nn.Sequential(nn.Linear(WIDTH, WIDTH), Sinks()), input)
    (row,) = select_saved(report, saved_by="other code")
    assert (row["operator"], row["first_use"]) == ("aten.add.Tensor", None)


@on_ranks(2)
def test_gathered_weights_have_names_and_buffers_of_collectives_a_category():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.SiLU(), nn.Linear(WIDTH, 1, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with record_timeline(model, optimizer) as timeline:
            model(torch.randn(ROWS, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = timeline.report()
    assert "communication" in report["columns"]
    alive = [sum(columns) for _, _, *columns in report["timeline"]]
    log = [(timeline.get_allocation(event), alive[event] - alive[event - 1]) for event in range(1, len(alive))]
    gathered = {(event.parameter, size) for event, size in log if event.category == "gathered_weights" and size > 0}
    assert gathered == {("0.weight", WIDTH * WIDTH * 4), ("2.weight", 2 * WIDTH * 4)}  # one row, and one of padding
    sizes = {size for event, size in log if event.is_collective_buffer and event.category is None}
    assert WIDTH * WIDTH * 4 in sizes  # what is gathered into, and what is reduced
