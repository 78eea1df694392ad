"""The options of `quaver plan`, and what they ask for."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from quaver.lab.output_file import check_option_files
from quaver.lab.plan.device_file import read_device_spec
from quaver.lab.plan.layouts import round_step_batch_size
from quaver.lab.plan.search import USABLE_MEMORY_SHARE
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.fields import AtLeast1, RankCount, Settings, UserPath, setting
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.terminal.byte_sizes import parse_bytes
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.device_specs import DEVICE_NAMES, DeviceSpec, require_device_spec
from quaver.runtime.errors import InputError, reraise_as_input_error

_NETWORK_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([Gg]bps|Gb/s|Gbit/s|GBps|GB/s)")
_TOKEN_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmb]?)(?:\s*tokens)?", re.IGNORECASE)
_TOKEN_UNITS = {"": 1, "k": 1000, "m": 1000**2, "b": 1000**3}


@dataclass(frozen=True)
class PlanOptions(Settings):
    """Find the layouts and recipes with which a run is fastest on a cluster, and what limits them. Memory is
    estimated, the time of a step is simulated. Needs no GPU. The flags of quaver train are accepted too.
    """

    gpus: RankCount = setting(8, "Number of GPUs of the run.")
    gpu: str = setting("h100", f"Kind of the GPUs: {DEVICE_NAMES.lower()}.")
    spec: UserPath | None = setting(None, "TOML file with the numbers of another GPU; see docs/plan.md.")
    gpus_per_node: AtLeast1 = setting(8, "Number of GPUs that the links of a node connect.")
    network: str = setting(
        "400gbps", "Rate of the network between nodes, for each GPU: 400gbps or 400Gb/s are bits, 50GB/s bytes."
    )
    storage: float = setting(1.0, "GB/s that each node writes to the folder of checkpoints while all of them do.")
    global_batch: str | None = setting(
        None, 'Tokens of a step, such as "4M", rounded so that the ranks divide it. Default: the configured batch.'
    )
    recipes: tuple[str, ...] = setting((), "Recipes to try besides the configured run; bfloat16 is one.")
    memory: str | None = setting(
        None, f"Bytes that a peak may have, such as 75GiB; {USABLE_MEMORY_SHARE:.0%} of the GPU's by default."
    )
    less_precise_storage: bool = setting(
        False,
        "Also try a bfloat16 residual stream, and optimizer states and saved activations in float8, which change "
        "a run's numbers.",
    )
    top: AtLeast1 = setting(3, "Fastest layouts to print.")
    explain: AtLeast1 | None = setting(
        None, "Row to explain: its links and limits, and with --png a picture of its step."
    )
    png: UserPath | None = setting(None, "File of the picture, with --explain.")
    ledger: bool = setting(
        False, "Compile the block of the explained row for the GPU, count its kernels, and simulate their times."
    )
    write: UserPath | None = setting(None, "TOML file to write the run of a row to; launch files stand beside it.")
    row: AtLeast1 = setting(1, "Row to write, with --write.")
    output: UserPath | None = setting(None, "File of the result as JSON.")

    def check(self) -> None:
        """Raise InputError for numbers without units, and for options that do not fit together."""
        super().check()
        rates = "a rate of 0.001 to 1,000,000 Gb/s with its unit: 400gbps or 400Gb/s for bits, 50GB/s for bytes"
        self.require(1e-3 <= self.network_gbit_per_s <= 1e6, "network", rates)
        self.require(1e-6 <= self.storage <= 1e6, "storage", "a rate of 0.000001 to 1,000,000 GB/s")
        with reraise_as_input_error("--recipes: "):
            for name in self.recipes:
                if name != BFLOAT16:
                    canonicalize_recipe(name)
        if self.spec is not None:
            self.require_default("gpu", beside="--spec")
        if self.memory is not None:
            parse_bytes(self.memory, "--memory")
        self.require(self.png is None or self.png.endswith(".png"), "png", "a file whose name ends with .png")
        if self.explain is None:
            self.require_default("png", "ledger", unless="--explain names a row")
        if self.write is None:
            self.require_default("row", unless="--write names a file")
        else:
            self.require(self.write.endswith(".toml"), "write", "a file whose name ends with .toml")

    def check_files(self) -> None:
        """Raise InputError for files that `check_option_files` refuses."""
        check_option_files(self, output="JSON result", png="PNG picture", write="config")

    @property
    def network_gbit_per_s(self) -> float:
        """The rate of the network in Gb/s per GPU; 0 if `network` cannot be parsed."""
        match = _NETWORK_RATE.fullmatch(self.network.strip())
        return float(match[1]) * (8 if match[2].startswith("GB") else 1) if match else 0.0

    def read_device(self) -> DeviceSpec:
        """Return the specification of the GPU. Raises InputError."""
        if self.spec is not None:
            return read_device_spec(Path(self.spec))
        try:
            return require_device_spec(self.gpu, option="--gpu")
        except InputError as error:
            raise InputError(f"{error}; or give --spec a file of its numbers") from None

    @property
    def global_batch_tokens(self) -> int:
        """The tokens of `global_batch`; 0 if it is unset or cannot be parsed."""
        match = _TOKEN_COUNT.fullmatch((self.global_batch or "").strip())
        tokens = float(match[1]) * _TOKEN_UNITS[match[2].lower()] if match else 0
        return int(tokens) if tokens < math.inf else 0

    def find_step_batch_size(self, config: TrainConfig) -> int | None:
        """Return the sequences of a step on all ranks, or None for one microbatch per data-parallel rank."""
        if self.global_batch is None:
            size = config.training.global_batch_size
            return None if size == -1 else size
        expected = f'tokens such as "4M", at least those of a sequence, {config.training.seq_len}'
        self.require(self.global_batch_tokens >= config.training.seq_len, "global_batch", expected)
        return round_step_batch_size(self.global_batch_tokens, config.training, self.gpus)
