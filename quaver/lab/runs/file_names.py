"""The names of the files in a run folder, apart from what writes them."""

from quaver.numerics.record import FILE_NAME

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
NUMERICS_FILE = FILE_NAME
POST_MORTEM_FILE = "numerics_post_mortem.jsonl"
SUMMARY_FILE = "summary.json"
WANDB_ID_FILE = "wandb_id.txt"

RUN_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    "float8_scales.jsonl",
    NUMERICS_FILE,
    POST_MORTEM_FILE,
    "provenance.jsonl",
    "data.json",
    "conversion_report.json",
    SUMMARY_FILE,
    "curves.png",
    WANDB_ID_FILE,
)
