"""Float8 weights for serving and fine-tuning, in the formats that transformers, vLLM and SGLang load.

from quaver.export import save_float8, load_float8, iter_float8_weights
save_float8(model, "out")                             # codes and scales of the training forward
model.load_state_dict(dict(load_float8("out")))       # dequantized, to train on; model=model for experts
load_frozen(model, "out")                             # the codes themselves, for adapters to train on
matches_serving(model, tokens)                        # whether an engine will multiply the same codes
with calibrate_kv_cache(model): ...                   # scales of a float8 KV cache, which save_float8 writes

    write    save.py and companion_files.py, by plan.py (what to store), weights.py (tensor by tensor), formats/ (how)
    read     load.py and frozen.py, by tensor_roles.py (which is what), formats/stored.py (how), files.py (safetensors)
    both     checkpoint_names.py: the names of a model's tensors in its checkpoints
"""

from quaver.export.frozen import load_frozen
from quaver.export.kv_cache import calibrate_kv_cache, set_kv_scales
from quaver.export.load import import_float8, load_float8
from quaver.export.matching import ServingMatch, matches_serving
from quaver.export.save import save_float8
from quaver.export.weights import CheckpointTensors, Requantized, iter_float8_weights

__all__ = [
    "CheckpointTensors",
    "Requantized",
    "ServingMatch",
    "calibrate_kv_cache",
    "import_float8",
    "iter_float8_weights",
    "load_float8",
    "load_frozen",
    "matches_serving",
    "save_float8",
    "set_kv_scales",
]
