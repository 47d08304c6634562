"""The YAML files of deploy/ against the tools that read them, in environments of their own.

The tools are no packages of this project: uv installs them for the test. It is skipped where that fails.
"""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

KUBEFLOW = """
import sys
import yaml
from kubeflow.training import ApiClient, models
from kubernetes.client import models as kubernetes

def check(value, kind, where):
    "Refuses keys and types that the model of a kind does not have."
    if value is None or kind == "object":
        return
    if kind.startswith(("list[", "dict(")):
        is_list, inner = kind[0] == "l", kind[5:-1].split(", ")[-1]
        if not isinstance(value, list if is_list else dict):
            sys.exit(f"{where}: not a {kind}")
        for key, item in enumerate(value) if is_list else value.items():
            check(item, inner, f"{where}.{key}")
        return
    model = getattr(models, kind, None) or getattr(kubernetes, kind, None)
    if model is None:  # an amount, such as 8 or 8Gi, is a str here
        if not isinstance(value, {"int": int, "bool": bool}.get(kind, (str, int))):
            sys.exit(f"{where}: {value!r} is not {kind}")
        return
    names = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
    for key, item in value.items():
        if key not in names:
            sys.exit(f"{where}: no field {key}")
        check(item, names[key], f"{where}.{key}")

job = yaml.safe_load(sys.stdin)
check(job, "KubeflowOrgV1PyTorchJob", "job")
read = ApiClient()._ApiClient__deserialize(job, "KubeflowOrgV1PyTorchJob")  # refuses what lacks a required field
print("read", sorted(read.spec.pytorch_replica_specs))
"""

SKY = """
import os, sys
os.environ |= {"HOME": sys.argv[1], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
import sky
task = sky.Task.from_yaml_str(sys.stdin.read())
print("read", task.num_nodes, *(resources.accelerators for resources in task.resources))
"""


def read_by(package: str, script: str, text: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = ["uv", "run", "--quiet", "--isolated", "--no-project", "--with", package, "python", "-c"]
    installed = subprocess.run([*environment, ""], capture_output=True, text=True, timeout=200, check=False)
    if installed.returncode:
        pytest.skip(f"{package} cannot be installed here: {installed.stderr.strip()[-200:]}")
    command = [*environment, script, str(home)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("was", "wrong", "said"),
    [
        ("", "", ""),
        ("nprocPerNode", "nprocPerNod", "no field nprocPerNod"),
        ("emptyDir", "emptyDirectory", "no field emptyDirectory"),
        ("replicas: 1", "replicas: one", "'one' is not int"),
        ("containers:", "initContainers:", "`containers`, must not be `None`"),
    ],
)
def test_the_job_is_one_of_kubeflows(was: str, wrong: str, said: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "pytorchjob.yaml").read_text()
    done = read_by("kubeflow-training==1.9.4", KUBEFLOW, text.replace(was, wrong) if was else text, tmp_path)
    if said:
        assert done.returncode and said in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("read ")[1].strip() == "['Master', 'Worker']"


@pytest.mark.parametrize(
    ("was", "wrong"), [("", ""), ("num_nodes", "nodes"), ("network_tier: best", "network_tier: bset")]
)
def test_sky_reads_its_file(was: str, wrong: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "sky.yaml").read_text()
    done = read_by("skypilot==0.14.1", SKY, text.replace(was, wrong) if was else text, tmp_path)
    if was:
        assert done.returncode and "read" not in done.stdout
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("read ")[1].strip() == "2 {'A100': 8}"
