"""What is shipped: one top-level name, every kernel, and a package that imports outside the repository."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
KERNELS = sorted(path.name for path in (REPOSITORY / "kernels").glob("*.py"))


def _run(*command: str | Path, cwd: Path, **env: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _build_wheel(source: Path, out: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "--wheel-dir", out, source, cwd=out.parent)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads: a build writes into its tree, and workers would meet there."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("kernels", "locks"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, copy / name, symlinks=True, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    build = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", build, out, cwd=source)
    (archive,) = out.glob("*.tar.gz")
    return archive


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if not name.endswith("/"))


def _package_names(wheel: Path) -> list[str]:
    return [name for name in _names(wheel) if name.startswith("locks/")]


def test_kernels_folder_is_no_package_and_reaches_locks_by_a_symlink():
    link = REPOSITORY / "locks" / "kernels"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "kernels")
    assert KERNELS
    assert "__init__.py" not in KERNELS


def test_wheel_has_nothing_top_level_but_locks(wheel: Path):
    top = {name.split("/")[0] for name in _names(wheel)}
    assert top == {"locks", next(name for name in top if name.endswith(".dist-info"))}


def test_wheel_ships_every_module_and_no_other_file_of_the_tree(wheel: Path):
    expected = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "locks").rglob("*")
        if path.suffix in {".py", ".json"} or path.name == "py.typed"
    }
    expected |= {
        f"locks/kernels/{path.name}"
        for path in (REPOSITORY / "kernels").iterdir()
        if path.suffix in {".py", ".json"}
    }
    assert set(_package_names(wheel)) == expected


def test_wheel_made_from_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path):
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() or member.islnk() for member in archive.getmembers())
    again = _build_wheel(sdist, tmp_path / "wheel")
    assert _package_names(again) == _package_names(wheel)


def test_installed_wheel_imports_every_kernel_outside_the_repository(wheel: Path, tmp_path: Path):
    target = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    _run(*pip, "--target", target, wheel, cwd=tmp_path)
    modules = [f"locks.kernels.{Path(name).stem}" for name in KERNELS]
    script = (
        "import importlib, sys, locks\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(locks.__file__)\n"
        "print(*(sys.modules[name].__file__ for name in sys.argv[1:]), sep='\\n')\n"
    )
    # -S leaves out the .pth file of an editable install; the paths named here stand in for site-packages.
    outside = [path for path in sys.path if path and Path(path).resolve() != REPOSITORY]
    path = os.pathsep.join([str(target), *outside])
    printed = _run(sys.executable, "-S", "-c", script, *modules, cwd=tmp_path, PYTHONPATH=path)
    files = [Path(line) for line in printed.split()]
    assert files == [
        target / "locks" / "__init__.py",
        *(target / "locks" / "kernels" / name for name in KERNELS),
    ]
