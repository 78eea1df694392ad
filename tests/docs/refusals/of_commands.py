"""Lists what pages say that the command line refuses: one line, exit code 2, no traceback."""

from tests.command_line import TEXT, TINY
from tests.docs.refusals import Command, Pages

TEXT_FILE = {"text.txt": TEXT.encode()}


def corrupt(name, content, message):
    """Data of which a part is corrupt, which `data.on_corrupt = "refuse"` does not leave out."""
    return Command(f"prepare-data --data={name} --data.on_corrupt=refuse", message, {name: content})


def train(words, message):
    """Settings with which no run begins."""
    return Command(f"train {' '.join(TINY)} --data=text.txt {words}", message, TEXT_FILE)


TENSOR_PARALLEL, GATHER = "--parallelism.tensor_parallel_degree=2", "--float8.enable_fsdp_float8_all_gather"
SPLIT = f"--training.compile {TENSOR_PARALLEL}"
FALLBACK = "--numerics.every=1 --numerics.on_alarm=fallback"
PAGES: Pages = {
    "configuration.md": {
        "Whether to skip or to refuse unreadable records": [
            corrupt("a.jsonl", b"[1]\n", "a.jsonl:1: expected an object with text")
        ],
        "never: refuse a run folder with files": [
            Command(
                f"train {' '.join(TINY)} --data=text.txt --job.dump_folder=. --job.name=run",
                "the run folder 'run' has files already",
                {"run/notes.txt": b"x", **TEXT_FILE},
            ),
            train("--checkpoint.resume=auto", "job.name must be set with checkpoint.resume = auto"),
            train("--checkpoint.resume=must --job.name=run", "is not a run folder, so there is nothing to resume"),
        ],
    },
    "data.md": {
        'with `"refuse"` the first one ends the run before it begins': [
            corrupt("a.jsonl", b"nope\n", "a.jsonl:1: not JSON"),
            corrupt("a.jsonl", b'{"text": "a\\u0000b"}\n', "the text contains a 0 byte"),
            corrupt("a.jsonl", b'{"text": "\\ud800"}\n', "surrogates not allowed"),
        ],
        "a model with fewer tokens than the tokenizer is refused": [
            Command("prepare-data --data=text.txt --model.vocab_size=255", "must be at least 256", TEXT_FILE)
        ],
    },
    "diagnosing.md": {
        "tensor parallelism and float8 all-gather refuse it": [
            train(f"{FALLBACK} {TENSOR_PARALLEL}", "numerics.on_alarm must be log or stop with parallelism.tensor"),
            train(f"{FALLBACK} {GATHER}", "numerics.on_alarm must be log or stop with float8.enable_fsdp_float8_all"),
        ],
    },
    "experts.md": {
        "tensor parallelism is refused": [
            train(f"--model.n_experts=4 {TENSOR_PARALLEL}", "model.n_experts must be 0 with parallelism.tensor_par"),
        ],
    },
    "limitations.md": {
        "- Refused under tensor parallelism": [
            *(
                train(f"{SPLIT} --activation_checkpoint.mode={mode}", "activation_checkpoint.mode must be none, or sel")
                for mode in (
                    "full",
                    "selective --activation_checkpoint.selective_ac_option=2",
                    "memory_budget",
                )
            ),
        ],
    },
    "security.md": {
        "an item that is not text is corrupt: skipped and counted, or refused": [
            corrupt("a.jsonl", b"\xff\n", "a.jsonl:1: not "),
        ],
    },
    "trainer.md": {
        "| bad input | one line": [
            Command("train nowhere.toml", "config file 'nowhere.toml' does not exist"),
            Command("train a.toml", "a.toml", {"a.toml": b"[training\n"}),
        ],
        "An operator without a result to save is refused": [
            train(
                "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_also_keep=aten.view",
                "which returns a view of its argument",
            )
        ],
    },
    "commands.md": {
        "| 2 | bad input: one line says what was expected": [
            Command("report nowhere", "there is no run 'nowhere': expected the folder of a run"),
            Command("import nowhere out", "'nowhere' has no config.json; give"),
            Command("convert hf-to-quaver nowhere out", "'nowhere' has no config.json; give"),
            Command("memory nowhere.toml", "config file 'nowhere.toml' does not exist; give"),
            Command("doctor --recipes x", "unknown flag: '--recipes'"),
            Command("doctor x", "unexpected argument 'x'; see quaver doctor --help"),
        ],
    },
}
