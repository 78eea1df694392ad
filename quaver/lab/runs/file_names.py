"""The names of the files in a run folder. The code that writes them imports this file."""

from quaver.lab.settings import config_file
from quaver.numerics.record import RECORD_FILE_NAME

CONFIG_FILE = config_file.CONFIG_FILE
METRICS_FILE = "metrics.jsonl"
NUMERICS_FILE = RECORD_FILE_NAME
POST_MORTEM_FILE = "numerics_post_mortem.jsonl"
SUMMARY_FILE = "summary.json"
FLOAT8_SCALES_FILE = "float8_scales.jsonl"
PROVENANCE_FILE = "provenance.jsonl"
DATA_FILE = "data.json"
CONVERSION_FILE = "conversion_report.json"
CURVES_FILE = "curves.png"
WANDB_ID_FILE = "wandb_id.txt"

RUN_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    FLOAT8_SCALES_FILE,
    NUMERICS_FILE,
    POST_MORTEM_FILE,
    PROVENANCE_FILE,
    DATA_FILE,
    CONVERSION_FILE,
    SUMMARY_FILE,
    CURVES_FILE,
    WANDB_ID_FILE,
)
