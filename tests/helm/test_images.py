"""The images' files, without a container engine: stages, user, pins, and the steps that are run."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from flare_ray.config import EngineConfig
from tests.helm.rendering import read_values, serve_document, values_files
from tests.rules.sources import ROOT, tracked_files

IMAGES = ROOT / "deployments" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
INSTALL = IMAGES / "install.sh"
RUN_LIMIT_S = 1500
DEMO_LIMIT_S = 400

every_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its lines joined."""

    name: str
    text: str


def stages(path: Path) -> list[list[Instruction]]:
    """Instructions of each stage, FROM first; build arguments are filled in."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]
    arguments: dict[str, str] = {}
    found: list[list[Instruction]] = []
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "ARG":
            key, _, value = rest.partition("=")
            arguments[key] = value.strip('"')
        rest = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], match[0]), rest)
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(name, rest))
    return found


def named(stage: list[Instruction], name: str) -> list[str]:
    return [instruction.text for instruction in stage if instruction.name == name]


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Package -> version and number of hashes of a lock file."""
    text = re.sub(r"^#.*\n", "", (IMAGES / name).read_text(), flags=re.MULTILINE)
    found = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        match = re.match(r"([\w.-]+)==([^\s\\]+)", block)
        assert match, f"{name}: not pinned: {block.splitlines()[0]}"
        found[match[1].lower().replace("_", "-")] = match[2], block.count("--hash=sha256:")
    return found


def test_there_is_an_image_for_cpus_and_one_for_gpus():
    assert [path.stem for path in DOCKERFILES] == ["cpu", "cuda"]


@every_image
def test_image_is_built_in_stages_on_a_pinned_base(path):
    build, final = stages(path)
    bases = {named(stage, "FROM")[0].split()[0] for stage in (build, final)}
    [base] = bases
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", base)


@every_image
def test_image_runs_as_nobody_in_particular_and_installs_nothing_as_it(path):
    final = stages(path)[-1]
    [user] = named(final, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    after = final[[i.name for i in final].index("USER") :]
    assert not named(after, "RUN")
    assert not [text for text in named(final, "RUN") if "pip" in text]


@every_image
def test_image_has_what_kuberay_calls(path):
    """Its probes call wget; its commands call ray, maybe from a login shell, which resets PATH."""
    final = stages(path)[-1]
    assert any(re.search(r"install .*\bwget\b", text) for text in named(final, "RUN"))
    [link] = [text for text in named(final, "RUN") if "ln -s" in text]
    assert "/opt/venv/bin/ray" in link
    assert "/usr/local/bin/" in link


@every_image
def test_what_is_copied_is_tracked_and_not_ignored(path):
    tracked = tracked_files()
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]

    def ignored(name: str) -> bool:
        result = False
        for rule in rules:
            pattern = rule.removeprefix("!")
            parents = [name, *(str(parent) for parent in Path(name).parents)]
            if any(fnmatch.fnmatch(parent, pattern) for parent in parents):
                result = not rule.startswith("!")
        return result

    for stage in stages(path):
        for text in named(stage, "COPY"):
            if "--from=" in text:
                continue
            for source in text.split()[:-1]:
                inside = [n for n in tracked if n == source or n.startswith(f"{source}/")]
                assert inside, source
                assert not [name for name in inside if ignored(name)]
    assert ignored(".git/config")
    assert ignored("tests/conftest.py")


@every_image
def test_every_installation_is_a_step_of_the_script(path):
    build = stages(path)[0]
    steps = [text.split() for text in named(build, "RUN")]
    wanted = {
        "cpu": ["torch", "packages", "project"],
        "cuda": ["cuda", "packages", "project", "kernels"],
    }
    assert [step[-1] for step in steps] == wanted[path.stem]
    assert {tuple(step[:-1]) for step in steps} == {("deployments/images/install.sh", "/opt/venv")}


def test_cuda_image_has_its_kernels_where_triton_looks_and_may_add_to_them():
    build, final = stages(IMAGES / "cuda.Dockerfile")
    assert "kernels" in named(build, "RUN")[-1].split()
    [copied] = [text for text in named(final, "COPY") if "/opt/kernels" in text]
    [user] = named(final, "USER")
    home = re.search(r"\bHOME=(\S+)", " ".join(named(final, "ENV")))
    assert f"--chown={user}" in copied
    assert home is not None
    assert copied.split()[-1] == f"{home[1]}/.triton/cache"
    assert "TRITON_CACHE_DIR" not in " ".join(named(final, "ENV"))  # a prepared core names its own


def settings_of(engine: dict) -> dict:
    """What programs follow from: all settings but where the weights lie."""
    config = EngineConfig.model_validate({**engine, "checkpoint": "somewhere"})
    return config.model_dump()


def test_kernels_are_compiled_for_every_values_file_of_the_chart():
    lines = [
        line.split()
        for line in (IMAGES / "kernels.list").read_text().splitlines()
        if not line.startswith("#")
    ]
    compiled = []
    for deployment, model, experts, *options in lines:
        document = yaml.safe_load((ROOT / "deployments" / f"{deployment}.yaml").read_text())
        engine = document["applications"][0]["args"]["engine"]
        for name, value in zip(options[::2], options[1::2], strict=True):
            engine[name.removeprefix("--").replace("-", "_")] = yaml.safe_load(value)
        compiled.append((model, experts, settings_of(engine)))
    shipped = []
    for path in values_files():
        values = yaml.safe_load(path.read_text())
        if values.get("device") == "cpu":
            continue
        model = values["model"]
        engine = serve_document(values)["applications"][0]["args"]["engine"]
        shipped.append((model["preset"], model["weightFormat"], settings_of(engine)))
    assert [case for case in shipped if case not in compiled] == []
    assert [case for case in compiled if case not in shipped] == []


def test_demo_values_name_the_checkpoint_where_the_image_has_it():
    final = stages(IMAGES / "cpu.Dockerfile")[-1]
    [copied] = [text for text in named(final, "COPY") if text.startswith("deployments ")]
    inside = copied.split()[1]
    checkpoint = read_values("cpu-demo")["model"]["checkpoint"]
    here = ROOT / "deployments" / Path(checkpoint).relative_to(inside)
    assert (here / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-cuda.txt"])
def test_lock_has_a_hash_for_every_package(name):
    packages = locked(name)
    assert packages
    assert not [package for package, (_, hashes) in packages.items() if not hashes]


def test_locks_share_no_package():
    assert not locked("requirements.txt").keys() & locked("requirements-cuda.txt").keys()


@pytest.mark.parametrize(
    ("extra", "locks"),
    [("", ("requirements.txt",)), ("cuda", ("requirements.txt", "requirements-cuda.txt"))],
)
def test_locks_meet_what_the_project_asks_for(extra, locks):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    versions = {n: v for name in locks for n, (v, _) in locked(name).items()}
    for requirement in map(Requirement, wanted):
        if requirement.name == "torch" and not extra:
            continue  # pinned in the script; the test below
        name = requirement.name.lower().replace("_", "-")
        assert name in versions, f"{name}: run python deployments/images/lock.py"
        assert requirement.specifier.contains(versions[name]), f"{name} {versions[name]}"


def test_torch_is_the_same_everywhere():
    version, _ = locked("requirements-cuda.txt")["torch"]
    for path in (INSTALL, IMAGES / "lock.py", ROOT / ".ci" / "setup"):
        assert f"torch=={version}" in path.read_text(), path.name


def test_ray_is_the_version_that_the_chart_tells_kuberay():
    values = yaml.safe_load((ROOT / "helm" / "flare-ray" / "values.yaml").read_text())
    assert locked("requirements.txt")["ray"][0] == values["rayVersion"]


@every_image
def test_linter_finds_nothing(path):
    linter = shutil.which("hadolint") or shutil.which(str(Path(sys.executable).parent / "hadolint"))
    if linter is None:
        pytest.skip("no hadolint: install the `chart` extra")
    result = subprocess.run([linter, path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_install_script_refuses_an_unknown_step(tmp_path):
    result = subprocess.run([INSTALL, tmp_path, "everything"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "torch, cuda, packages, project, kernels" in result.stderr


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(RUN_LIMIT_S + DEMO_LIMIT_S)
def test_install_steps_in_a_clean_environment_start_the_demo(tmp_path, free_port, request):
    """The CPU image: its build stage's steps on its COPY'd files alone, then its command."""
    source, venv = tmp_path / "src", tmp_path / "venv"
    build, final = stages(IMAGES / "cpu.Dockerfile")
    clean = {key: os.environ[key] for key in os.environ if not key.startswith(("PYTHON", "RAY_"))}
    # A short folder of its own: Ray would join another cluster of this machine.
    short = tempfile.mkdtemp(prefix="fr", dir="/tmp")
    request.addfinalizer(lambda: shutil.rmtree(short, ignore_errors=True))
    clean["RAY_TMPDIR"] = short
    for instruction in build:
        if instruction.name == "COPY":
            *sources, target = instruction.text.split()
            copy_into(source, sources, target)
        elif instruction.name == "RUN":
            command = instruction.text.replace("/opt/venv", str(venv))
            subprocess.run(["bash", "-c", command], cwd=source, env=clean, check=True)
    shutil.rmtree(source)
    demo = tmp_path / "deployments"
    shutil.copytree(ROOT / "deployments", demo)
    [command] = named(final, "CMD")
    assert "flare-ray" in command
    file = demo / "glm-demo.yaml"
    text = file.read_text().replace("port: 8000", f"port: {free_port()}")
    file.write_text(text.replace("deployments/demo/glm", str(demo / "demo" / "glm")))
    result = subprocess.run(
        [venv / "bin" / "python", demo / "demo" / "run_demo.py", file],
        cwd=tmp_path,
        env={**clean, "PATH": f"{venv / 'bin'}:{clean['PATH']}"},
        timeout=DEMO_LIMIT_S,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def copy_into(folder: Path, sources: list[str], target: str) -> None:
    """COPY of a Dockerfile: one folder's content, or files into a folder."""
    for name in sources:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            place = folder / target
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin, place / origin.name)
