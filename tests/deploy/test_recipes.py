"""The commands of the recipes are ones that torchrun and the entrypoints take, wherever they stand."""

import re
import shlex
import subprocess
from pathlib import Path

import yaml
from torch.distributed.run import config_from_args, parse_args

import ddp
from ddp_lab.runtime.flags import parse_config

ROOT = Path(__file__).parents[2]
JOB = yaml.safe_load((ROOT / "deploy" / "pytorchjob.yaml").read_text())
SKY = yaml.safe_load((ROOT / "deploy" / "sky.yaml").read_text())
COMMANDS = re.findall(r"(?<=torchrun ).*(?= main_ddp\.py| -m ddp_lab).*", (ROOT / "docs" / "gpu.md").read_text())


def trained(torchrun):
    """What the entrypoint would train with; refuses flags that it does not have."""
    assert torchrun.training_script == "main_ddp.py"
    return parse_config("", ddp.REGISTRY, arguments=torchrun.training_script_args)


def test_commands_in_the_docs():
    assert len(COMMANDS) == 6
    for command in COMMANDS:
        torchrun = parse_args(shlex.split(command))
        assert (ROOT / torchrun.training_script).exists()  # a file, or the package behind `-m`
        if torchrun.training_script == "main_ddp.py":
            config = trained(torchrun)
            if torchrun.nproc_per_node == "gpu":
                assert [config.micro_batch_size(ranks) for ranks in (2, 4, 8, 16)] == [16, 8, 4, 2]
            else:
                assert config.share_gpu and config.micro_batch_size(int(torchrun.nproc_per_node)) == 2


def test_the_job_starts_torchrun_on_every_node(monkeypatch):
    """With the variables that the operator sets (v1.9.0: pkg/controller.v1/pytorch/envvar.go and master.go)."""
    replicas = JOB["spec"]["pytorchReplicaSpecs"].values()
    nodes = sum(replica["replicas"] for replica in replicas)
    per_node = int(JOB["spec"]["nprocPerNode"])
    operator = {"NNODES": nodes, "NPROC_PER_NODE": per_node, "MASTER_ADDR": "m", "MASTER_PORT": 23456}
    for name, value in {**operator, "NODE_RANK": 1}.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    for container in (container for replica in replicas for container in replica["template"]["spec"]["containers"]):
        assert container["command"][0] == "torchrun" and container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == per_node
        torchrun = parse_args(container["command"][1:] + container["args"])
        launch, _, _ = config_from_args(torchrun)
        assert (launch.min_nodes, launch.nproc_per_node, launch.rdzv_endpoint) == (2, 8, "m:23456")
        assert launch.rdzv_backend == "static" and launch.rdzv_configs["rank"] == 1
        config = trained(torchrun)
        assert config.micro_batch_size(nodes * per_node) == 2
        assert config.output_dir in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_sky_starts_torchrun_on_every_node():
    """`run` is a shell script: `uv` prints what it is given, instead of running it."""
    nodes, gpus = SKY["num_nodes"], int(SKY["resources"]["accelerators"].split(":")[1])
    variables = {"NUM_NODES": nodes, "NODE_RANK": 1, "NUM_GPUS_PER_NODE": gpus, "NODE_IPS": "10.0.0.1\n10.0.0.2"}
    answer = subprocess.run(
        ["bash", "-euc", "uv() { printf '%s\\n' \"$@\"; }\n" + SKY["run"]],
        env={f"SKYPILOT_{name}": str(value) for name, value in variables.items()} | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    words = answer.stdout.splitlines()
    assert words[:3] == ["run", "--no-dev", "torchrun"]
    launch, _, _ = config_from_args(torchrun := parse_args(words[3:]))
    assert (launch.min_nodes, launch.nproc_per_node, launch.rdzv_endpoint) == (nodes, gpus, "10.0.0.1:29500")
    assert trained(torchrun).micro_batch_size(nodes * gpus) == 2
