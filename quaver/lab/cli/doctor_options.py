"""The options of `quaver doctor`. doctor_model.py runs `--model RUN|HF-FOLDER`; doctor_gpu.py runs `--gpu NAME`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from quaver.lab.doctor.gpu import NVIDIA_GPUS
from quaver.lab.settings.fields import FiniteNotNegative, OneOf, Settings, UserPath, setting
from quaver.lab.settings.float8 import RecipeName
from quaver.numerics.accumulation import ACCUMULATION_BY_GPU


@dataclass(frozen=True)
class DoctorOptions(Settings):
    """Try each float8 recipe on each device of this machine, and say what works."""

    json: bool = setting(False, "Print JSON.")
    compile: bool = setting(True, "Try torch.compile, which takes seconds; --no-compile leaves it out.")
    gpu: Annotated[str, OneOf(tuple(map(str.lower, NVIDIA_GPUS)), has_aliases=True)] | None = setting(
        None,
        "A GPU that this machine need not have. What it multiplies natively, and by which kernel, is listed, not "
        "tried.",
    )
    recipe: RecipeName | None = setting(
        None, "With --gpu and --model: the recipe of the model's linears. Default: the run's, or tensorwise."
    )
    model: UserPath | None = setting(
        None,
        "A run or a Hugging Face folder whose linears are surveyed instead, with a recipe chosen for each. With "
        "--gpu, also a config TOML: the linears are listed by their shapes alone.",
    )
    data: str | None = setting(
        None, "Text for the batch, as data.path; the run's by default, else the sources of Python's library."
    )
    budget_db: FiniteNotNegative = setting(25.0, "Decibels that each operand of each linear must keep.")
    output: UserPath | None = setting(None, "TOML file to write the recipes to.")
    sequences: Annotated[int, Ge(1), Le(10**6)] = setting(2, "Sequences of the batch.")
    seq_len: Annotated[int, Ge(1), Le(10**7)] | None = setting(
        None, "Length of the sequences; the run's by default, else 256."
    )
    emulate_sums_of: Annotated[str, OneOf(tuple(ACCUMULATION_BY_GPU))] | None = setting(
        None, "A GPU whose sums are surveyed as well as the casts: the precision that they lose in each matmul."
    )

    def check(self) -> None:
        """Raise InputError for options that nothing reads."""
        survey_options = ("data", "budget_db", "output", "sequences", "seq_len", "emulate_sums_of")
        if self.gpu is not None:
            self.require_default(*survey_options, "compile", beside="--gpu")
        elif self.model is None:
            self.require_default(*survey_options, unless="--model is given")
        else:
            self.require_default("compile", beside="--model")
        if self.gpu is None or self.model is None:
            self.require_default("recipe", unless="--gpu and --model are given")
