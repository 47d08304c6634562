"""Whole runs on a mesh that resume, on the same mesh and on others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tensor_parallel
from ddp_lab.runtime.checkpoint.files import TensorFiles
from ddp_lab.runtime.checkpoint.manifest import file_name, folder_name, read_manifest
from ddp_lab.runtime.checkpoint.parts import read_whole
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.samples import prose
from ddp_lab.runtime.distributed import meshed
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.run import train_and_record
from ddp_lab.strategy.model_parallel import Cut
from tests.checkpoints import here
from tests.ranks import RankPool
from tests.runtime.checkpoint.test_runs import records

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 4, "n_positions": 16, "vocab_size": 300}
"""Of a language model with dropout."""


def small_language(folder: Path) -> dict[str, Any]:
    """Settings of a run on files that are written into `folder`."""
    (folder / "config.json").write_text(json.dumps(GPT2))
    (folder / "text.txt").write_text("\n\n".join(prose()[1][:8]))
    return {"task": "causal-lm", "model": str(folder), "dataset": str(folder / "text.txt")}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lengths = {"sequence_length": 16, "train_samples": 16, "eval_samples": 4, "global_batch_size": 4}
    lengths |= {"grad_accum_steps": 1, "generate": 6}
    files = small_language(tmp_path_factory.mktemp("language"))
    return {"choice": "zero1", "no_profile": True, "checkpoint_every": 2, **lengths, **files}


def run_on_mesh(settings: dict[str, Any]):
    config = RunConfig.of(**settings)
    with meshed(here(), config.mesh) as on_mesh:
        train_and_record(config, on_mesh, tensor_parallel.load, None, tensor_parallel.REGISTRY.load_parallelize)


def checkpoint_of(folder: Path, choice: str, step: int) -> Path:
    return folder / "checkpoints" / choice / folder_name(step)


def record_of(folder: Path, choice: str) -> dict[str, Any]:
    return records(folder, choice)[-1]


def generators_of(path: Path, size: int) -> list[torch.Tensor]:
    return [load_file(path / file_name(rank))["random/torch"] for rank in range(size)]


IN_STAGES = {"pipeline_schedule": "interleaved", "stages_per_rank": 2, "grad_accum_steps": 2, "checkpoint_async": True}
IN_STAGES["precision"] = "fp16"


@pytest.mark.parametrize(
    ("mesh", "behind", "changes"),
    [
        ("tp=2", "tp2", {}),
        pytest.param("dp=2,tp=2", "dp2-tp2", {}, marks=pytest.mark.slow),
        pytest.param("dp=2,cp=2", "dp2-cp2-ulysses", {"context_parallel": "ulysses"}, marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2", "dp2-pp2-interleaved2", IN_STAGES, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_mesh_stops_and_resumes(ranks: RankPool, tmp_path, settings, mesh, behind, changes):
    """On the same mesh bit for bit, random numbers included. On another one the model is the same."""
    on_mesh, label, size = {**settings, "mesh": mesh, **changes}, f"zero1@{behind}", Mesh.parse(mesh).size
    ranks.run(size, run_on_mesh, {**on_mesh, "output_dir": str(tmp_path / "straight")})
    stopped = {**on_mesh, "output_dir": str(tmp_path / "stopped")}
    ranks.run(size, run_on_mesh, {**stopped, "max_steps": 2})
    ranks.run(size, run_on_mesh, {**stopped, "resume": "latest"})
    straight_end, end = (checkpoint_of(tmp_path / name, label, 4) for name in ("straight", "stopped"))
    for rank in range(size):
        resumed_state, straight_state = (load_file(path / file_name(rank)) for path in (end, straight_end))
        assert resumed_state.keys() == straight_state.keys() and all(
            torch.equal(resumed_state[key], straight_state[key]) for key in straight_state
        )
    generators = generators_of(end, size)
    assert torch.equal(generators[0], generators[1]) is ("tp" in mesh)
    assert size == 2 or not torch.equal(generators[0], generators[2])
    assert not record_of(tmp_path / "stopped", label)["notes"]

    evaluation = record_of(tmp_path / "straight", label)["eval"]["loss"]
    resuming = {**settings, "choice": "zero3", "output_dir": str(tmp_path / "other"), "resume": str(end)}
    resuming["precision"] = on_mesh.get("precision", "fp32")
    ranks.run(size, run_on_mesh, {**resuming, "checkpoint_every": None})
    record = record_of(tmp_path / "other", "zero3")
    assert record["eval"]["loss"] == pytest.approx(evaluation, rel=1e-5)
    assert record["generated"] == record_of(tmp_path / "straight", label)["generated"]
    changed = record["resumed_from"]["changed"]
    assert (changed["choice"], changed["mesh"]) == (["zero1", "zero3"], [mesh, None])
    before = f"{size} ranks ({Mesh.parse(mesh).data_size} data-parallel{', tp=2' * ('tp' in mesh)}): "
    assert record["notes"][0].startswith(f"resumed after step 4 with {size} ranks instead of {before}")

    if "pp" in mesh:  # ranks of tp draw alike, whatever the ranks of the pipeline have saved
        half = checkpoint_of(tmp_path / "straight", label, 2)
        over_tensor = {**settings, "mesh": "dp=2,tp=2", "precision": "fp16", "output_dir": str(tmp_path / "tensor")}
        ranks.run(4, run_on_mesh, {**over_tensor, "resume": str(half)})
        after = checkpoint_of(tmp_path / "tensor", "zero1@dp2-tp2", 4)
        generators = generators_of(after, 4)
        assert torch.equal(generators[0], generators[1]) and not torch.equal(generators[0], generators[2])


def whole_parameters(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Cut]]:
    manifest = read_manifest(path)
    files = TensorFiles([path / name for name in manifest.files])
    return {
        name: read_whole(files, f"parameter/{name}", info.shape, manifest.cuts.get(name))
        for name, info in manifest.parameters.items()
    }, manifest.cuts


def test_new_random_numbers_are_the_same_for_the_same_samples(ranks: RankPool, tmp_path, settings):
    """And the manifest says how parameters are cut, with which they are read without ranks."""
    plain = {**settings, "choice": "zero3", "output_dir": str(tmp_path / "plain"), "max_steps": 1}
    ranks.run(2, run_on_mesh, plain)
    first = checkpoint_of(tmp_path / "plain", "zero3", 1)
    on_mesh = {**settings, "mesh": "dp=2,tp=2", "choice": "zero3", "output_dir": str(tmp_path / "mesh")}
    ranks.run(4, run_on_mesh, {**on_mesh, "resume": str(first), "max_steps": 2})
    second = checkpoint_of(tmp_path / "mesh", "zero3@dp2-tp2", 2)
    generators = generators_of(second, 4)
    assert torch.equal(generators[0], generators[1]) and torch.equal(generators[2], generators[3])
    assert not torch.equal(generators[0], generators[2])
    (before, no_cuts), (after, cuts) = whole_parameters(first), whole_parameters(second)
    assert not no_cuts and cuts["transformer.wte.weight"] == Cut(0, 300, (((0, 150),), ((150, 300),)))
    assert "transformer.ln_f.weight" not in cuts and "lm_head.weight" not in cuts
    for name, value in before.items():  # a step of Adam changes each element by about the learning rate at most
        assert 0 < (after[name] - value).abs().max() < 2e-3, name
