"""What the wheel holds, what importing costs, and that a user's folder named ckpt/ shadows nothing."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(arguments: list[str], cwd: Path) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def python(code: str, cwd: Path) -> str:
    return run(["-c", code], cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    run(["-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], ROOT)
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"ckpt", "elastic", "drills"}
    must = {"ckpt/py.typed", "elastic/py.typed", "drills/py.typed", "ckpt/FORMAT.md", "drills/report/page.html.j2"}
    assert must <= set(names)
    source = {str(p.relative_to(ROOT)) for k in ("ckpt", "elastic", "drills") for p in (ROOT / k).rglob("*.py")}
    assert source <= set(names)


def test_the_three_commands_are_installed(wheel: zipfile.ZipFile) -> None:
    (entry,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    text = wheel.read(entry).decode()
    for line in ("ckpt = ckpt.cli:main", "elastic = elastic.cli:main", "drills = drills.cli:main"):
        assert line in text


@pytest.mark.parametrize(
    "package", ["ckpt", "elastic", "drills", "ckpt.cli", "elastic.cli", "drills.cli", "ckpt.store"]
)
def test_importing_imports_no_torch_and_no_client(package: str, tmp_path: Path) -> None:
    heavy = "{'torch', 'numpy', 'obstore', 's3fs', 'fsspec', 'rich', 'matplotlib'}"
    assert python(f"import {package}, sys; print(sorted({heavy} & set(sys.modules)))", tmp_path) == "[]"


@pytest.mark.parametrize("package", ["ckpt", "elastic", "drills"])
def test_a_data_folder_of_the_same_name_shadows_nothing(package: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "step-1.bin").write_bytes(b"x")
    (tmp_path / "train.py").write_text(f"import {package}; print({package}.__file__)")
    assert run(["train.py"], tmp_path) == str(ROOT / package / "__init__.py")


@pytest.mark.parametrize("package", ["ckpt", "elastic"])
def test_public_names_exist_and_are_documented(package: str) -> None:
    module = __import__(package)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    with pytest.raises(AttributeError, match=f"module '{package}'.*has no attribute 'nothing'"):
        module.nothing  # noqa: B018
