"""Runs on each rank that `accelerate launch` starts: `launched.py FOLDER START`.

Trains with delayed scaling, from scratch (START 0), saving its state in FOLDER/state after two batches, or from that
state, which the caller has moved to FOLDER/moved.
FOLDER/START.RANK.json gets the mean losses over the ranks from batch 2 on, and a digest of the weights at the end.
"""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator

from quaver import float8_scaling_state, sync_float8_amax_and_scale_history
from tests.library.third_party.llama import BATCHES, build_optimizer, llama, train_by_hand


def main(folder: Path, start: int) -> None:
    accelerator = Accelerator(cpu=True)
    plain = llama("delayed")
    model, optimizer = accelerator.prepare(plain, build_optimizer(plain))
    accelerator.register_for_checkpointing(float8_scaling_state(plain))

    options = {"rank": accelerator.process_index, "before": lambda _: sync_float8_amax_and_scale_history(plain)}
    train = partial(train_by_hand, model, optimizer, accelerator.backward, **options)
    if start:
        accelerator.load_state(str(folder / "moved"))
    else:
        train(only=range(2))
        accelerator.save_state(str(folder / "state"))
    losses = accelerator.gather(torch.tensor(train(only=range(2, BATCHES)))[None]).mean(0).tolist()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in plain.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    report = {"type": str(accelerator.distributed_type), "losses": losses, "weights": digest}
    (folder / f"{start}.{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
