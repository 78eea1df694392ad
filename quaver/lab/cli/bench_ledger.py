"""`quaver bench ledger [options]`: counts what one compiled block does on a GPU, without a GPU."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge, Le
from rich.table import Table

from quaver.lab.bench.ledger.counting import (
    DEFAULT_RECIPES,
    MODULE_PARTS,
    ModuleConfig,
    check_recipe,
    check_triton,
    is_multiplied,
    make_ledger,
)
from quaver.lab.bench.ledger.gpu_code import GPU_PROPERTIES
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.bench.ledger.machine_code import (
    MACHINE_COLUMNS,
    CodeBySource,
    add_machine_code,
    compile_kernels,
    iter_machine_rows,
)
from quaver.lab.bench.ledger.picture import draw_ledgers
from quaver.lab.bench.ledger.table import (
    KERNEL_COLUMNS,
    LEDGER_COLUMNS,
    iter_findings,
    iter_kernel_rows,
    iter_ledger_rows,
)
from quaver.lab.bench.ledger.times import list_constants, sum_milliseconds
from quaver.lab.bench.peer import is_peer_recipe
from quaver.lab.bench.shapes import MODEL_NAMES, make_model
from quaver.lab.cli.errors import report_bad_input
from quaver.lab.output_file import Output, check_outputs, replace_output, write_result
from quaver.lab.runs.provenance import describe_measurement
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.fields import OneOf, Settings, UserPath, setting
from quaver.lab.settings.flags import parse_options
from quaver.lab.settings.float8 import BFLOAT16, RecipeName
from quaver.lab.terminal.console import print_views
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.device_specs import DeviceSpec, require_device_spec


@dataclass(frozen=True)
class LedgerOptions(Settings):
    """Count what one compiled block launches, reads and writes on a GPU, forward and backward. Needs no GPU."""

    model: UserPath = setting("llama-8b", f"A model, {', '.join(MODEL_NAMES)}, or a TOML file of quaver train.")
    recipe: tuple[RecipeName, ...] = setting(
        (), f"Recipes, beside bfloat16; by default those of {', '.join(DEFAULT_RECIPES)} that the GPU multiplies."
    )
    gpu: Annotated[str, OneOf(tuple(name.lower() for name in GPU_PROPERTIES), has_aliases=True)] = setting(
        "h200", "The GPU that the code is for."
    )
    peer: Annotated[str, OneOf(("none", "torchao"))] = setting(
        "none", "Also count another library, for the recipes that it supports."
    )
    part: Annotated[str, OneOf(MODULE_PARTS)] = setting("block", "The whole block, or its up_proj alone.")
    sequences: Annotated[int, Ge(1), Le(10**6)] | None = setting(
        None, "Sequences; by default 2, or the local_batch_size of a TOML file."
    )
    seq_len: Annotated[int, Ge(1), Le(10**7)] | None = setting(
        None, "Tokens of a sequence; by default 8192, or the seq_len of a TOML file."
    )
    autocast: bool = setting(False, "Parameters and residual stream in float32 under autocast, not all in bfloat16.")
    kernels: bool = setting(False, "Print and save every kernel, with its source line and what it fuses.")
    machine_code: bool = setting(
        False, "Compile each Triton kernel: print registers, spills and instructions, and count the time to issue them."
    )
    output: UserPath = setting("runs/bench-ledger.json", "File of the JSON; the picture stands beside it.")

    @property
    def device(self) -> str:
        """The GPU's name in `GPU_PROPERTIES`."""
        return next((name for name in GPU_PROPERTIES if name.lower() == self.gpu.lower()), "")

    def check(self) -> None:
        """Raise InputError for an unknown GPU, a recipe that it does not multiply, or a peer that is not installed."""
        super().check()
        self.require(bool(self.device), "gpu", f"one of {', '.join(name.lower() for name in GPU_PROPERTIES)}")
        for recipe in self.recipe:
            check_recipe(canonicalize_recipe(recipe), self.device)
        expected = "a file whose name does not end with .png, as that of the picture does"
        self.require(not self.output.endswith(".png"), "output", expected)
        self.require(self.peer == "none" or find_spec("torchao") is not None, "peer", "a library that is installed")
        check_triton()

    def make_module_config(self) -> ModuleConfig:
        """Return the subject to compile. Raises InputError or OSError for an unknown model or an invalid TOML file."""
        options = {"autocast": self.autocast, "part": self.part}
        if self.model in MODEL_NAMES:
            sizes = self.sequences or 2, self.seq_len or 8192
            return ModuleConfig(make_model(self.model), *sizes, **options)  # type: ignore[arg-type]
        if not self.model.endswith(".toml"):
            self.require(False, "model", f"one of {', '.join(MODEL_NAMES)}, or a TOML file")
        config = load_config(Path(self.model))
        sizes = self.sequences or config.training.local_batch_size, self.seq_len or config.training.seq_len
        return ModuleConfig(config.model, *sizes, **options)  # type: ignore[arg-type]

    def list_contestants(self) -> list[str]:
        """Return bfloat16, quaver's recipes, then the peer's."""
        named = [canonicalize_recipe(recipe) for recipe in self.recipe]
        recipes = named or [recipe for recipe in DEFAULT_RECIPES if is_multiplied(recipe, self.device)]
        recipes = list(dict.fromkeys(recipes))
        peers = [f"{self.peer} {recipe}" for recipe in recipes if self.peer != "none" and is_peer_recipe(recipe)]
        return [BFLOAT16, *(f"quaver {recipe}" for recipe in recipes), *peers]


def main(argv: list[str]) -> int:
    """Count, print the tables, save the JSON and the picture; returns 0 when done, 2 for bad input."""
    with report_bad_input():
        options = parse_options(LedgerOptions, argv, prog="quaver bench ledger")
        module_config, output = options.make_module_config(), Path(options.output)
        check_outputs(Output(output))  # refuses a folder, whose name may be empty
        picture = output.with_suffix(".png")
        check_outputs(Output(output), Output(picture, kind="PNG picture"))
        spec = require_device_spec(options.device, option="--gpu")
    ledgers, codes = [], CodeBySource()
    with show_progress("compiling") as set_activity:
        for name in options.list_contestants():
            set_activity(f"compiling {name} for {options.device}")
            ledger = make_ledger(module_config, name, options.device)
            if options.machine_code:
                set_activity(f"compiling kernels of {name} to machine code")
                codes |= compile_kernels(ledger, GPU_PROPERTIES[options.device].capability, codes)
                ledger = add_machine_code(ledger, codes)
            ledgers.append(ledger)
        set_activity(f"drawing {picture}")
        with replace_output(picture) as image:
            draw_ledgers(ledgers, spec, image)
    rows = list(iter_ledger_rows(ledgers, spec))
    result = {
        "environment": describe_measurement(torch.device("cpu"))
        | ({"torchao": version("torchao")} if options.peer != "none" else {}),
        "options": {name: value for name, value in asdict(options).items() if name != "output"},
        "constants": list_constants(spec),
        "table": [dict(zip(map(_remove_line_breaks, LEDGER_COLUMNS), row, strict=True)) for row in rows],
        "ledgers": [
            {**ledger.to_json(kernels=options.kernels), "milliseconds": sum_milliseconds(ledger, spec)}
            for ledger in ledgers
        ],
    }
    write_result(result, output)
    print_views(iter_views(options, ledgers, codes, spec, module_config))
    print(f"saved {output}, {picture}")
    return 0


def _remove_line_breaks(title: str) -> str:
    return title.replace("-\n", "").replace("\n", " ")


def iter_views(
    options: LedgerOptions, ledgers: list[Ledger], codes: CodeBySource, spec: DeviceSpec, module_config: ModuleConfig
) -> Iterator[str | Table]:
    """Yield the table of the ledgers, what they say, and their kernels and machine code if asked for."""
    parameters = "autocast" if options.autocast else "bfloat16 parameters"
    tokens = f"{module_config.sequences} x {module_config.seq_len} tokens"
    title = f"{options.part} of {options.model}, {tokens}, {parameters}, on {spec.name}"
    yield make_table(
        title,
        LEDGER_COLUMNS,
        rows=iter_ledger_rows(ledgers, spec),
        right=LEDGER_COLUMNS[1:],
        wrapped=LEDGER_COLUMNS[:1],
    )
    for ledger in ledgers:
        yield from iter_findings(ledger)
    if options.kernels:
        for ledger in ledgers:
            rows = iter_kernel_rows(ledger, spec)
            yield make_table(ledger.name, KERNEL_COLUMNS, rows=rows, right=("us", "MB"), wrapped=KERNEL_COLUMNS[4:])
    if options.machine_code:
        for ledger in ledgers:
            rows = iter_machine_rows(ledger, codes)
            yield make_table(
                ledger.name, MACHINE_COLUMNS, rows=rows, right=MACHINE_COLUMNS[1:], wrapped=MACHINE_COLUMNS[:1]
            )
    yield (
        "Counted: launches, bytes, copies (in brackets), saved bytes, from the code that Inductor compiles. "
        "hp: norms, SwiGLU, RoPE, residual. Modeled: ms, and speed against the first row. "
        + "; ".join(f"{name} {text}" for name, text in list_constants(spec).items())
    )
