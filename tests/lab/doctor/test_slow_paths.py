"""quaver doctor lists slow paths, and does not raise for them."""

import json

from quaver import error_on_slow_path
from quaver.kernels import cpu
from quaver.lab.cli import main


def test_doctor_lists_slow_paths_and_does_not_raise(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "AVAILABLE", False)
    monkeypatch.setattr(cpu, "UNAVAILABLE_BECAUSE", "quaver._cpu was not built at install")
    monkeypatch.setattr(cpu, "PURE_PYTORCH", False)
    slow = "float8 casts on the CPU run in PyTorch, up to 10 times slower: quaver._cpu was not built at install"
    with error_on_slow_path():
        assert main(["doctor", "--no-compile"]) == 0
        assert f"slow path: {slow}" in capsys.readouterr().out
        assert main(["doctor", "--no-compile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slow_paths"] == [slow]
