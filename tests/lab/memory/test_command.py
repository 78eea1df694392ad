"""Tests what `quaver memory` prints, writes and refuses."""

import json

import pytest
import torch

from quaver.lab.plan import advise
from quaver.lab.plan.advise import AS_CONFIGURED
from quaver.lab.plan.changes import list_single_changes
from tests.lab.memory.models import needs_gathers

SMALL = ["train_configs/llama3_debug.toml", "--model.n_layers", "1", "--training.seq_len", "64"]
SMALL_8B = ["train_configs/llama3_8b.toml", "--model.n_layers", "2", "--ranks", "8", "--training.compile", "false"]


@pytest.fixture
def ask(run_quaver, tmp_path):
    """Run `quaver memory WORDS`, and return what it prints and what it writes."""

    def ask(*words):
        output = tmp_path / "new" / "memory.json"
        return run_quaver("memory", *words, "--output", output), json.loads(output.read_text())

    return ask


@needs_gathers
@pytest.mark.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.nightly)])
def test_8_ranks_are_predicted_and_estimated(device, ask):
    printed, written = ask(*SMALL_8B, "--top", "3", "--device", device)
    assert "ranks      8: dp_shard 8" in printed
    assert ("NVIDIA GPU" in printed) == (device == "cuda")
    assert written["by_category"]["parameters"] == pytest.approx(4 * written["parameters"] / 8, rel=0.01)
    assert written["by_category"]["optimizer_state"] == pytest.approx(8 * written["parameters"] / 8, rel=0.01)
    assert f"{written['peak_bytes']:,} bytes" in printed
    assert written["config"]["model"]["n_layers"] == 2
    assert sum(row["bytes"] for row in written["report"]["at_peak"]) == written["peak_bytes"]
    operators = {row["operator"] or "" for row in written["report"]["saved_for_backward"]}
    assert any("_scaled_mm" in operator for operator in operators) == (device == "cuda")
    if device == "cuda":
        printed, quick = ask(*SMALL_8B, "--quick", "--fit", "80GiB")
        assert quick["environment"]["torch"] == torch.__version__
        assert quick["estimated_peak_bytes"] == pytest.approx(written["peak_bytes"], rel=0.1)
        assert "estimated, typically within 10%" in printed
        assert "as in fms-fsdp llama2-7b 96 H100" in " ".join(printed.split())
        assert quick["advice"]["rows"][quick["advice"]["fastest_index"]]["fits"] is True


def test_a_page_without_a_config_has_a_title(tmp_path, ask):
    page = tmp_path / "page.html"
    ask(*SMALL[1:], "--model.dim", "64", "--html", page)
    assert "defaults in tensorwise, 1 rank" in page.read_text()


def test_two_settings_are_compared_drawn_and_measured(tmp_path, ask):
    page, picture, vs = tmp_path / "page.html", tmp_path / "step.png", "--activation_checkpoint.mode full"
    files = ["--html", page, "--png", picture, "--measure", "--top", "2"]
    printed, written = ask(*SMALL, *files, "--vs", vs)
    assert f"other      {vs}" in printed
    assert "1 microbatch of 8 sequences of 64 tokens" in printed
    assert written["comparison"]["label_b"] == vs
    assert written["other"]["saved_by_forward_bytes"] < written["saved_by_forward_bytes"]
    assert f"{written['other']['peak_bytes'] - written['peak_bytes']:+,}" in printed
    largest = next(row for row in written["comparison"]["rows"] if row["table"] == "saved")
    assert largest["difference_bytes"] < 0
    assert largest["sentence"] in " ".join(printed.split("\n"))
    html = page.read_text()
    assert "llama3_debug in tensorwise, 1 rank" in html
    assert vs in html
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"saved {picture}" in printed
    assert "device     a CPU" in printed
    assert written["measured"]["peak_bytes"] == pytest.approx(written["peak_bytes"], rel=0.01)
    assert f"{written['measured']['peak_bytes']:,}" in printed


FEW = ("activations: selective, every", "precision: bfloat16", "local batch size: 4")
"""Of what is tried alone; test_advise.py has them all, and each prediction takes most of a second."""


def test_advice_names_the_fastest_setting_that_fits(ask, monkeypatch):
    def list_few(*run):
        return [change for change in list_single_changes(*run) if change.name.startswith(FEW)]

    monkeypatch.setattr(advise, "list_single_changes", list_few)
    monkeypatch.setattr(advise, "iter_with_less_precise_storage", lambda change: [])
    printed, written = ask(*SMALL, "--device", "cpu", "--fit", "1GiB", "--time_on", "H200")
    advice = written["advice"]
    assert (advice["fit_bytes"], advice["smallest_index"]) == (1 << 30, None)
    assert advice["rows"][advice["fastest_index"]]["fits"] is True
    assert "fastest that fits" in printed
    assert "H200" in advice["device"]
    peaks = {row["change"]: row["peak_bytes"] for row in advice["rows"]}
    configured = advice["rows"][0]
    assert (configured["change"], configured["peak_bytes"]) == (AS_CONFIGURED, written["peak_bytes"])
    assert peaks["local batch size: 4"] < peaks[AS_CONFIGURED] < peaks["precision: bfloat16"]
    known = [row for row in advice["rows"] if row["peak_bytes"] is not None]
    assert all(row["difference_bytes"] == row["peak_bytes"] - written["peak_bytes"] for row in known)
    (refused,) = [row for row in advice["rows"] if row not in known]
    assert refused["note"].startswith("not possible: activation_checkpoint.selective_ac_option must be op")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["--ranks", "3", "--parallelism.tensor_parallel_degree", "2"],
            "data_parallel_shard_degree",
            marks=needs_gathers,
        ),
        (["--batch", "3"], "unknown flag: '--batch'; see quaver memory --help"),
        (["--vs", "nowhere.toml"], "config file 'nowhere.toml' does not exist"),
        (["--output", "/dev/null/x.json"], "--output: cannot write /dev/null/x.json"),
        (["--html", "/dev/null/x.html"], "--html: cannot write /dev/null/x.html"),
        (["--png", "peak.gif"], "--png must be a file whose name ends with .png, got 'peak.gif'"),
        (
            ["--output", "a.html", "--html", "./a.html"],
            "--html must be a file that no other option names, got 'a.html'",
        ),
        (["--traffic", "--html", "x.html"], "--html must not be given with --traffic"),
        (["--checkpoint-bandwidth", "1GB"], "--checkpoint-bandwidth must not be given unless --traffic"),
        (["--traffic", "--checkpoint-bandwidth", "much"], "--checkpoint-bandwidth must be a size above 0"),
        (["nowhere.toml", "--fit", "much"], "--fit must be a size above 0"),
        (["--device", "cuda", "--measure"], "--device must not be given with --measure"),
        (["--quick", "--traffic"], "--traffic must be its default, False, with --quick"),
        (["--quick", "--device", "cpu"], "--device must be cuda with --quick, got 'cpu'"),
        (["--quick", "--top", "3"], "--top must be its default, 12, with --quick"),
        (["--quick", "--vs", ""], "--vs must not be given with --quick"),
        (["--traffic", "--top", "3"], "--top must be its default, 12, with --traffic"),
        (["--time-on", "H100"], "--time-on must not be given unless --advise or --fit is given"),
        (
            [*SMALL, "--advise", "--time_on", "h100-sxm"],
            "--time-on: unknown device 'h100-sxm': expected the full name of",
        ),
        (["train_configs/llama3_8b.toml"], "false where no weight is sharded"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, run_refused):
    assert message in run_refused("memory", *words)
