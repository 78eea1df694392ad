"""Checks the files of the sdist and of the wheels, and that each wheel works in an empty environment: `make wheel`.

python tools/wheel.py DIST ENVIRONMENT    the folder of the sdist and the wheels; a folder for the environments
"""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

IN_SDIST = {
    *("Makefile", "constraints.txt", "pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "mkdocs.yml"),
    ".ci/run",
    *("quaver/csrc/cpu.c", "quaver/csrc/matmul.h", "tests/conftest.py", "train_configs/llama3_debug.toml"),
    *("docs/quickstart.md", "docs/images/loss_curves.png", "examples/convert_a_model.py", "benchmarks/record.py"),
}

UNWANTED = {"matplotlib", "pydantic", "rich", "safetensors", "tomli_w", "xxhash"}
"""Modules of the extra `train` that are not dependencies of torch."""


def contents(distribution: Path) -> set[str]:
    """Return the files of an sdist, relative to its top folder, or of a wheel."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as archive:
            return set(archive.namelist())
    with tarfile.open(distribution) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def check_contents(sdist: Path, wheels: list[Path]) -> None:
    missing = IN_SDIST - contents(sdist)
    assert not missing, f"{sdist.name} lacks {sorted(missing)}"
    assert len(wheels) == 2, f"expected a wheel with the extension and one without, got {wheels}"
    extensions = {}
    for wheel in wheels:
        files = contents(wheel)
        outside = [name for name in files if not re.match(r"quaver/|quaver-[^/]+\.dist-info/", name)]
        sources = [name for name in files if name.endswith((".c", ".h")) or "test" in Path(name).parts]
        assert not outside + sources, f"{wheel.name} has {outside + sources}"
        pages = "quaver/lab/report/page/main.html", "quaver/lab/html/parts/frame.html"
        package_data = {"quaver/py.typed", "quaver/lab/plan/launch/torchrun.sh", *pages}
        assert package_data <= files, f"{wheel.name} lacks {package_data - files}"
        extensions[wheel] = {name for name in files if name.endswith((".so", ".pyd"))}
    for wheel, built in extensions.items():
        expected = {"quaver/_cpu.abi3.so"} if "cp311-abi3" in wheel.name else set()
        assert built == expected, f"{wheel.name} has the extensions {built}"
        assert expected or wheel.name.endswith("-py3-none-any.whl"), wheel.name


def check_environment(wheel: Path, environment: Path) -> None:
    """Install the wheel alone, and run doctor and the README's conversion."""
    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", wheel.resolve()], check=True)
    unwanted = subprocess.run(
        [python, "-c", f"import importlib.util as u; print(*[n for n in {sorted(UNWANTED)} if u.find_spec(n)])"],
        check=True,
        capture_output=True,
        text=True,
        cwd=environment,
    )
    assert not unwanted.stdout.split(), f"{wheel.name} brings {unwanted.stdout}"
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for program in programs:
        subprocess.run([python, "-c", program], check=True, cwd=environment)
    quaver = environment / "bin" / "quaver"
    doctor = subprocess.run(
        [quaver, "doctor", "--no-compile"], check=True, cwd=environment, capture_output=True, text=True
    )
    state = "built" if "abi3" in wheel.name else "off"
    assert re.search(rf"^C extension +{state}", doctor.stdout, re.M), doctor.stdout
    refused = subprocess.run([quaver, "train"], check=False, cwd=environment, capture_output=True, text=True)
    assert refused.returncode == 2, refused
    assert "pip install 'quaver[train]'" in refused.stderr, refused.stderr
    print(f"{wheel.name}: installed alone, runs doctor and {len(programs)} programs of the README")


if __name__ == "__main__":
    dist, environments = Path(sys.argv[1]), Path(sys.argv[2]).resolve()  # programs run in the environment
    (sdist,), wheels = dist.glob("*.tar.gz"), sorted(dist.glob("*.whl"))
    check_contents(sdist, wheels)
    for wheel in wheels:
        check_environment(wheel, environments / wheel.stem)
