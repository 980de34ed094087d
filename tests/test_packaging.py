"""The sdist and the wheel: their contents, and that an installed wheel works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRY_WHEEL = ROOT / ".ci" / "try-wheel"
pytestmark = pytest.mark.skipif(not TRY_WHEEL.exists(), reason="not a checkout")


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out)
    (path,) = out.iterdir()
    return path


def wheel(sdist: Path, out: Path, **environment: str) -> Path:
    """The wheel that the sdist builds."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index")
    run(*pip, "-w", out, sdist, **environment)
    (path,) = out.iterdir()
    return path


def test_sdist_is_complete(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files").split()
    settings = {".clang-format", ".gitignore", ".pre-commit-config.yaml"}
    # khot for JAX has a source distribution of its own
    left_out = settings | {name for name in tracked if name.startswith((".ci/", "khot-jax/"))}
    assert set(tracked) - held == left_out
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_metadata_is_accepted_by_the_index(sdist: Path) -> None:
    pytest.importorskip("twine")
    told = run(sys.executable, "-m", "twine", "check", "--strict", sdist)
    assert "PASSED" in told


@pytest.mark.slow
def test_pure_wheel(sdist: Path, tmp_path: Path) -> None:
    path = wheel(sdist, tmp_path, KHOT_PURE="1")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        held = archive.namelist()
    assert "khot/py.typed" in held
    information = f"khot-{path.name.split('-')[1]}.dist-info"
    assert {Path(name).parts[0] for name in held} == {
        "khot",
        "_khot.py",
        information,
    }  # the command starts there
    told = run(TRY_WHEEL, sys.executable, sdist, path, "-q", "tests/test_masks.py")
    assert "passed" in told


@pytest.mark.slow
def test_compiled_wheel(sdist: Path, tmp_path: Path) -> None:
    path = wheel(sdist, tmp_path)
    assert "-cp310-abi3-" in path.name
    # 2.27 MB in November 2026. 1.3 MB of it are three copies of the kernels, one per instruction set.
    assert path.stat().st_size < 2_300_000
    told = run(
        *(TRY_WHEEL, sys.executable, sdist, path),
        *("-q", "tests/test_house.py", "tests/test_topk.py", "tests/kernels/test_cpu.py"),
        KHOT_REQUIRE_COMPILED="1",
    )
    assert "passed" in told


@pytest.mark.slow
def test_types_of_public_names_are_known(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    # pyright asks the python in PATH where packages lie
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", "khot", "--ignoreexternal", "--outputjson"],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = [s for s in symbols if s["isExported"]]
    assert len(public) > 300
    assert [s["name"] for s in public if not s["isTypeKnown"] or s["isTypeAmbiguous"]] == []


def test_conda_recipe_agrees_with_the_metadata() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == project["version"]
    assert recipe["about"] == {
        "summary": project["description"],
        "license": project["license"],
        "license_file": project["license-files"][0],
    }
    requires = [f"python{project['requires-python']}", *project["dependencies"]]
    run = [text.replace("pytorch", "torch").replace(" ", "") for text in recipe["requirements"]["run"]]
    assert run == requires
    (script,) = project["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(script)]


@pytest.mark.parametrize("name", ["ci.yml", "site.yml", "wheels.yml"])
def test_actions_are_pinned_by_hash(name: str) -> None:
    text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    loose = [action for action, note in used if not re.search("@[0-9a-f]{40}$", action) or " # v" not in note]
    assert loose == []
