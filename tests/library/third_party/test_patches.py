"""Imports of quaver change no other library; the calls that quaver/integrations/__init__.py lists change it once."""

import subprocess
import sys

import pytest

PROGRAM = """
from torchao import float8
from transformers import PreTrainedModel, modeling_utils

def read():
    methods = vars(PreTrainedModel).get("load_state_dict"), PreTrainedModel.save_pretrained
    return modeling_utils.get_hf_quantizer, methods, float8.convert_to_float8_training

original = read()
import quaver, quaver.compat.float8, quaver.export, quaver.numerics, quaver.integrations.torchao
assert read() == original

from quaver.foreign.transformers import patch_transformers_models
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

REPLACED = """
import functools
import logging
from transformers import PreTrainedModel, modeling_utils
from quaver.foreign.transformers import patch_transformers_models
from quaver.integrations.transformers_quantizer import install_quantizer
from quaver.torch_private.fsdp import hide_fsdp_ops_from_checkpoint_policies
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp

calls, log = [], []
logger, handler = logging.getLogger("quaver"), logging.Handler()
handler.emit = lambda record: log.append(record.getMessage())
logger.addHandler(handler)
logger.setLevel(logging.INFO)

def patch(owner, name, wraps):
    original = getattr(owner, name)
    def replaced(*args, **options):
        calls.append(name)
        return original(*args, **options)
    setattr(owner, name, functools.wraps(original)(replaced) if wraps else replaced)
    return getattr(owner, name)

def install():
    install_quantizer(), patch_transformers_models(), hide_fsdp_ops_from_checkpoint_policies()

PLACES = [(modeling_utils, "get_hf_quantizer"), (PreTrainedModel, "load_state_dict")]
PLACES += [(PreTrainedModel, "save_pretrained"), (fsdp.FSDPParamGroup, "unshard")]
patches = [patch(*place, wraps=False) for place in PLACES]  # before quaver, which calls them
install()
installed = [getattr(*place) for place in PLACES]
assert [new.__wrapped__ for new in installed] == patches
assert all(any(f".{name}" in line or f"wrapped {name}" in line for line in log) for _, name in PLACES), log
patches = [patch(*place, wraps=True) for place in PLACES]  # after quaver, and still with its wrapper inside
install()
assert [getattr(*place) for place in PLACES] == patches
patches = [patch(*place, wraps=False) for place in PLACES]  # in its place
install()
assert [getattr(*place).__wrapped__ for place in PLACES] == patches

model = PreTrainedModel.__new__(PreTrainedModel)
torch.nn.Module.__init__(model)
model.load_state_dict({})
assert calls == ["load_state_dict"] * 3, calls
"""


@pytest.mark.parametrize("program", [PROGRAM, REPLACED], ids=["only the listed calls", "with patches of others"])
def test_patches_are_listed_and_keep_those_of_other_packages(program):
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
