"""The smallest part of a model, and the fewest settings, that still show a difference between two runs.

First one block alone is predicted, then what is inside of it, as far down as the difference shows. Then settings are
taken away on what is left, which costs little: ranks, compilation, checkpointing, each setting in which the runs
differ. Each stays away only if the difference still shows. The predictions are counted, and end at a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

from torch._dynamo.exc import TorchDynamoException

from quaver.memory.predict import Prediction
from quaver.memory.reports.compare import Comparison, Difference, Smallest, compare
from quaver.memory.reports.pitfalls import si
from quaver.trainer.config import ActivationCheckpoint
from quaver.memory.runs.alike_rows import BLOCK, is_alike
from quaver.memory.runs.case import Case, words_of
from quaver.memory.runs.module import names_inside

LIMIT = 12
"""Predictions of one bisection, unless it is told otherwise."""

_UNSURE = ("temporaries", "communication")
"""Categories whose share of a peak depends on when the peak is."""
_LINE_END = "\n"

Tell = Callable[[str], None]


def row_to_explain(comparison: Comparison) -> Difference | None:
    """The row to bisect for: the largest that is kept for the backward; without one, the largest at the peak.

    What is alive at two peaks differs also because they are at different moments; what is kept does not.
    """
    steady = [row for row in comparison.at("peak") if row.category not in _UNSURE]
    return next(iter([*comparison.at("kept"), *steady, *comparison.rows]), None)


def bisect_memory(case: Case, row: Difference, *, limit: int = LIMIT, tell: Tell = lambda text: None) -> Smallest:
    """Take away what `row`, of a comparison of the two runs of `case`, does not need.

    A smaller case that the trainer refuses, or the compiler, counts as one that does not show it.

    Args:
        limit: predictions at the most.
        tell: is called with one line for each thing that was tried.
    """
    search = _Search(row, limit, tell, case, row)
    if not case.module:
        _into_block(search)
    _into_children(search)
    for name, smaller in _fewer_settings(search):
        shows = search.tries(f"without {name}", smaller)
        {True: search.not_needed, False: search.needed, None: search.not_tried}[shows].append(name)
    return search.result()


@dataclass
class _Search:
    row: Difference
    left: int
    tell: Tell
    case: Case
    found: Difference
    """The row as `case` shows it."""
    not_needed: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    _predicted: dict[str, Prediction] = field(default_factory=dict)

    def tries(self, name: str, smaller: Case) -> bool | None:
        """Go on with `smaller`, which `name` describes, if it shows the row; whether it does, None for not tried."""
        try:
            comparison = self._compare(smaller)
        except (ValueError, NotImplementedError, TorchDynamoException) as error:
            self.tell(f"{name}: cannot be: {str(error).partition(_LINE_END)[0]}")
            return False
        if comparison is None:
            self.tell(f"{name}: not tried, {self.left} predictions are left")
            return None
        found = next((each for each in comparison.at(self.row.at) if is_alike(each, self.row)), None)
        if found is None:
            self.tell(f"{name}: does not show it")
            return False
        self.tell(f"{name}: shows it, {found.per_layer_bytes:+,} bytes")
        self.case, self.found = smaller, found
        return True

    def result(self) -> Smallest:
        return Smallest(
            module=self.case.module,
            settings=tuple(words_of(self.case.vs)),
            command=self.case.command,
            text=self._text(),
            difference_bytes=self.found.difference_bytes,
        )

    def _text(self) -> str:
        subject = f"{self.case.module} alone" if self.case.module else "the whole model"
        ranks = f"on {self.case.ranks} ranks" if self.case.ranks > 1 else "in one process"
        text = f"{subject} shows it {ranks}: {si(self.found.difference_bytes)} ({self.found.difference_bytes:+,} bytes)"
        text += f"; it needs {_listed(self.needed, 'and')}" if self.needed else ""
        text += f"; it does not need {_listed(self.not_needed, 'or')}" if self.not_needed else ""
        return text + (f"; not tried without {_listed(self.not_tried, 'or')}" if self.not_tried else "")

    def _compare(self, case: Case) -> Comparison | None:
        """The two runs of `case`, or None if that takes more predictions than are left."""
        keys = {other: repr((case.config(other=other), case.ranks, case.module)) for other in (False, True)}
        if len(set(keys.values()) - self._predicted.keys()) > self.left:
            return None
        for other, key in keys.items():
            if key not in self._predicted:
                self.left -= 1
                self._predicted[key] = case.predict(other=other)
        a, b = (self._predicted[keys[other]] for other in (False, True))
        return compare(a, b, label_a="first", label_b="other")


def _into_block(search: _Search) -> None:
    """Begin with one block, or with the module outside of the blocks that the row is of."""
    case, module = _without_tensor_parallel(search.case), search.row.module
    block = BLOCK.match(module)
    if block is None and module and search.tries(f"{module} alone", replace(case, module=module)):
        return
    first = replace(case, module="model.layers.0").with_flags(model__n_layers=1)
    if search.tries("one block alone", first):
        return
    number = "0" if block is None else block[1].replace("*", "0")
    if number != "0" and search.tries(f"block {number} alone", replace(case, module=f"model.layers.{number}")):
        return
    search.tries("1 layer", search.case.with_flags(model__n_layers=1))


def _without_tensor_parallel(case: Case) -> Case:
    """A module is predicted alone on ranks that share no linear."""
    degree = case.config(other=False).parallelism.tensor_parallel_degree
    if degree == 1:
        return case
    return replace(case, ranks=max(1, case.ranks // degree)).with_flags(parallelism__tensor_parallel_degree=1)


def _into_children(search: _Search) -> None:
    """Go down the tree of modules as far as the row shows: along its own module's name, where that says more."""
    while search.case.module:
        config = search.case.config(other=False)
        inside, told = names_inside(config, search.case.module), _of_layer(search.row.module, search.case.module)
        if told == search.case.module and not config.training.compile:
            return  # its own code made it, not what is inside of it; of compiled code nobody knows
        if told.startswith(f"{search.case.module}."):
            inside = [name for name in inside if f"{told}.".startswith(f"{name}.")]
        if not any(search.tries(f"{name} alone", replace(search.case, module=name)) for name in inside):
            return


def _of_layer(name: str, module: str) -> str:
    """`name` with the number of the layer that `module` is in."""
    block = BLOCK.match(module)
    return BLOCK.sub(lambda found: f"model.layers.{block[1]}{found[2]}", name) if block else name


def _fewer_settings(search: _Search) -> Iterator[tuple[str, Case]]:
    """Yield what may be unnecessary: its name, and the case without it, made of the case that was reached by then."""
    if search.case.ranks > 1:
        local = {
            "float8__enable_fsdp_float8_all_gather": False,
            "float8__precompute_float8_dynamic_scale_for_fsdp": False,
        }
        alone = replace(search.case, ranks=1).with_flags(**local, **_DEGREES_OF_ONE)
        yield "several ranks", alone
    config = search.case.config(other=False)
    if config.training.compile:
        yield "compilation", search.case.with_flags(training__compile=False)
    if config.activation_checkpoint.mode != "none":
        defaults = asdict(ActivationCheckpoint())
        off = {f"activation_checkpoint__{name}": value for name, value in defaults.items()}
        yield "checkpointing", search.case.with_flags(**off)
    for name in search.case.vs:
        if len(search.case.vs) > 1:
            yield name, replace(search.case, vs={key: value for key, value in search.case.vs.items() if key != name})


_DEGREES_OF_ONE = {"parallelism__data_parallel_replicate_degree": 1, "parallelism__data_parallel_shard_degree": -1}


def _listed(names: list[str], last: str) -> str:
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
