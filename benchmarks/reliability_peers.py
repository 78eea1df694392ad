"""Tests other trainers in six scenarios. Prints a table of docs/experiments/reliability.md.

    python -m benchmarks.reliability_peers            # a minute

transformers' Trainer, Lightning's Trainer, and torchtitan's CheckpointManager if torchtitan 0.2 can be imported: its
trainer needs a GPU, so a loop drives the manager. torchtitan pins an older `datasets`; install it separately with
`pip install --no-deps --target DIR torchtitan==0.2.2 torchdata==0.11.0 tomli einops` and set PYTHONPATH=DIR.

Each trains a small network in forks of this process. It saves a checkpoint every two steps and keeps one (torchtitan
keeps at least two). Everything else is the default: no option protects against a scenario.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytorch_lightning as lightning
import torch
import transformers

FLIPPED_CHECKPOINTS = 12
ENDLESS_STEPS = 10**6
SAME_WEIGHTS = "resumes"


class Network(torch.nn.Module):
    """The network that all of them train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


class Samples(torch.utils.data.Dataset):
    """A million samples, the same in each run."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return dict(zip(("x", "labels"), torch.arange(128).add(index).cos().split(64), strict=True))


class Module(lightning.LightningModule):
    """Network, for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.network(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def find_newest(folder: Path) -> Path | None:
    """Return the newest checkpoint, by the step in its name."""
    return max(folder.glob("*step*"), key=lambda path: int(path.stem.rpartition("=")[2]), default=None)


def train_with_transformers(folder: Path, steps: int) -> torch.nn.Module:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        save_total_limit=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=Network(), args=arguments, train_dataset=Samples())
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return trainer.model


def train_with_lightning(folder: Path, steps: int) -> torch.nn.Module:
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=1)],
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(Samples(), batch_size=8), ckpt_path=find_newest(folder))
    return module.network


def train_with_torchtitan(folder: Path, steps: int) -> torch.nn.Module:
    import torch.distributed as dist
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import Checkpoint

    class Progress:
        step = 0

        def state_dict(self) -> dict[str, object]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, progress, data = Network(), Progress(), Samples()
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1e-3})
    manager = CheckpointManager(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer(optimizers, lambda step: 1.0),
        states={"train_state": progress},
        checkpoint_config=Checkpoint(enable=True, interval=2, keep_latest_k=2),
        sd_adapter=None,
        base_folder=str(folder),
    )
    manager.load()
    while progress.step < steps:
        batch = torch.utils.data.default_collate([data[progress.step * 8 + number] for number in range(8)])
        optimizers.zero_grad()
        model(**batch)["loss"].backward()
        optimizers.step()
        progress.step += 1
        manager.save(progress.step)
    manager.close()
    return model


class Peer:
    """Runs one trainer in a folder."""

    def __init__(self, train: Callable[[Path, int], torch.nn.Module], folder: Path) -> None:
        self.train, self.folder, self.starts = train, folder, 0
        self.run("stopped", 2)
        self.stopped = self.compute_digest("stopped", 6)
        """The digest of the weights after a stop between two steps and a resume, the reference of the scenarios."""

    def start(self, run: str, steps: int, prepare: Callable[[], object] = lambda: None) -> int:
        self.starts += 1
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(self.folder / f"{name}{self.starts}", os.O_WRONLY | os.O_CREAT), number)
            prepare()
            model = self.train(self.folder / run, steps)
            content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
            (self.folder / f"{run}.digest").write_text(hashlib.sha256(content).hexdigest())
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)

    def run(self, run: str, steps: int, prepare: Callable[[], object] = lambda: None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.start(run, steps, prepare), 0)[1])

    def compute_digest(self, run: str, steps: int) -> str:
        """Run to `steps`, and return the digest of the weights, or the error."""
        if self.run(run, steps):
            return self.read_error(self.starts)
        return (self.folder / f"{run}.digest").read_text()

    def read_error(self, start: int) -> str:
        """Return the last line on stderr of the run with the number `start`."""
        return "error: " + (self.folder / f"stderr{start}").read_text().splitlines()[-1].replace(str(self.folder), "")

    def resume(self, run: str) -> str:
        digest = self.compute_digest(run, 6)
        if digest.startswith("error"):
            return digest
        return SAME_WEIGHTS if digest == self.stopped else "resumes with other weights"

    def list_files(self, run: str) -> list[Path]:
        """Return the files of a run, the largest last."""
        files = [path for path in (self.folder / run).rglob("*") if path.is_file()]
        return sorted(files, key=lambda path: path.stat().st_size)


def compare_resumed(peer: Peer) -> str:
    return (
        "the weights of a whole run"
        if peer.stopped == peer.compute_digest("whole", 6)
        else "other weights than a whole run"
    )


def limit_files(peer: Peer, run: str, action: signal.Handlers) -> str:
    """Run two steps, then two more with files limited to half of a checkpoint. Returns the outcome of a third run."""
    peer.run(run, 2)
    limit = peer.list_files(run)[-1].stat().st_size // 2

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, action)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = peer.run(run, 4, prepare)
    assert code, "the limit was not reached"
    return peer.resume(run)


def kill_inside_save(peer: Peer) -> str:
    return limit_files(peer, "killed", signal.SIG_DFL)


def fill_disk(peer: Peer) -> str:
    return limit_files(peer, "full", signal.SIG_IGN)


def flip_bits(peer: Peer) -> str:
    rng, noticed, same = random.Random(1), 0, 0
    for number in range(FLIPPED_CHECKPOINTS):
        run = f"flipped{number}"
        peer.run(run, 2)
        files = peer.list_files(run)
        path = files[number % len(files)]
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        outcome = peer.resume(run)
        noticed += outcome.startswith("error")
        same += outcome == SAME_WEIGHTS
    return f"{noticed} of {FLIPPED_CHECKPOINTS} noticed, {FLIPPED_CHECKPOINTS - noticed - same} train on other weights"


def start_two_writers(peer: Peer) -> str:
    peer.run("two", 2)
    children = [peer.start("two", ENDLESS_STEPS) for _ in range(2)]
    time.sleep(5)
    ended = [os.waitpid(child, os.WNOHANG)[0] for child in children]
    errors = [peer.read_error(peer.starts - 1 + number) for number in range(2) if ended[number]]
    for child, gone in zip(children, ended, strict=True):
        if not gone:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return f"one ends, {errors[0]}" if errors else "both write"


class _Code:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (os.environ["PEER_MARK"],)


def plant_code(peer: Peer) -> str:
    mark = peer.folder / "mark"
    os.environ["PEER_MARK"] = str(mark)
    peer.run("code", 2)
    ran = []
    for path in peer.list_files("code"):
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt") or path.name == ".metadata":
            shutil.copytree(peer.folder / "code", peer.folder / path.name)
            if path.name == ".metadata":  # pickled without torch.save
                path.write_bytes(pickle.dumps(_Code()))
            else:
                torch.save({"state": _Code()}, path, pickle_module=pickle)
            peer.run("code", 6)
            if mark.exists():
                ran.append(path.name)
                mark.rmdir()
            shutil.rmtree(peer.folder / "code")
            (peer.folder / path.name).rename(peer.folder / "code")
    return f"runs, from {', '.join(ran)}" if ran else "refused"


SCENARIOS = {
    "stopped after two steps, resumed to six": compare_resumed,
    "killed while it writes a checkpoint": kill_inside_save,
    "the disk is full while it writes a checkpoint": fill_disk,
    f"{FLIPPED_CHECKPOINTS} checkpoints with one bit flipped": flip_bits,
    "two processes resume one run": start_two_writers,
    "code in a pickled file of a checkpoint": plant_code,
}
PEERS = {
    f"transformers {transformers.__version__}": train_with_transformers,
    f"Lightning {lightning.__version__}": train_with_lightning,
}
if importlib.util.find_spec("torchtitan"):
    PEERS[f"torchtitan {importlib.metadata.version('torchtitan')}"] = train_with_torchtitan


def iter_rows() -> Iterator[str]:
    yield f"| | {' | '.join(PEERS)} |"
    yield "|---" * (len(PEERS) + 1) + "|"
    with tempfile.TemporaryDirectory() as folder:
        peers = []
        for number, train in enumerate(PEERS.values()):
            (Path(folder) / str(number)).mkdir()
            peers.append(Peer(train, Path(folder) / str(number)))
        for title, scenario in SCENARIOS.items():
            yield f"| {title} | {' | '.join(scenario(peer) for peer in peers)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for row in iter_rows():
        print(row, flush=True)
