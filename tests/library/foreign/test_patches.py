"""Imports of quaver change no other library; the calls that quaver/integrations/__init__.py lists change it once."""

import subprocess
import sys

PROGRAM = """
from torchao import float8
from transformers import PreTrainedModel, modeling_utils

def read():
    methods = vars(PreTrainedModel).get("load_state_dict"), PreTrainedModel.save_pretrained
    return modeling_utils.get_hf_quantizer, methods, float8.convert_to_float8_training

original = read()
import quaver, quaver.compat.float8, quaver.export, quaver.numerics, quaver.integrations.torchao
assert read() == original

from quaver.conversion.quantized_configs import patch_transformers_models
from quaver.integrations.transformers import QuaverConfig
from quaver.integrations.transformers_quantizer import install_quantizer
registered = read()
assert registered[0] is not original[0] and registered[1:] == original[1:]

patch_transformers_models()
quaver.integrations.torchao.install()
changed = read()
assert not any(new is old for new, old in zip((*changed[1], changed[2]), (*original[1], original[2])))
install_quantizer(), patch_transformers_models(), quaver.integrations.torchao.install()
assert read() == changed
"""


def test_only_the_listed_calls_change_other_packages():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
