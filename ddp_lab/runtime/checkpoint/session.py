"""The checkpoints of one run: the one that it resumes from, and those that it saves."""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ddp_lab.runtime.checkpoint.files import TensorFiles
from ddp_lab.runtime.checkpoint.manifest import Manifest, file_name, folder_name, naming
from ddp_lab.runtime.checkpoint.origin import (
    Origin,
    changed_settings,
    checkpoint_folder,
    current_job,
    find_origin,
    require_same_model,
    require_same_settings,
)
from ddp_lab.runtime.checkpoint.saver import Saver
from ddp_lab.runtime.checkpoint.state import describe_groups, fill, manifest_of, tensors_to_save
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import on_every_rank
from ddp_lab.runtime.loop import TrainingResult
from ddp_lab.runtime.mesh import TENSOR, Mesh
from ddp_lab.runtime.watch.phases import during
from ddp_lab.strategy.batches import MicroBatch
from ddp_lab.strategy.strategy import Strategy


class Checkpoints:
    """Finds the checkpoint to resume from when it is created. All its methods but `close` are collective."""

    def __init__(self, config: RunConfig, ranks: RankContext, run_id: str, versions: dict[str, str]) -> None:
        self._ranks, self._run_id, self._versions = ranks, run_id, versions
        self.origin: Origin | None = find_origin(config)
        self.step = self.origin.manifest.step if self.origin else 0
        self._every = config.checkpoint_every
        self._saver: Saver | None = None
        if self._every:
            self._saver = Saver(checkpoint_folder(config), ranks, config.checkpoint_async, config.keep_last)
        if ranks.is_main and self.origin:
            for problem in self.origin.skipped.values():
                print(f"{config.label}: skipped: {problem}", flush=True)

    def require_steps_left(self, steps: int) -> None:
        """Refuse a checkpoint past the end of the run. At the end, only the evaluation is left."""
        if self.step > steps:
            raise UserError(
                f"--resume: the checkpoint was made after step {self.step}, but this run ends after step {steps}; "
                "raise --max-steps or --epochs"
            )

    def begin(
        self,
        strategy: Strategy,
        config: RunConfig,
        train_samples: int,
        steps: int,
        first_step: Callable[[], Sequence[MicroBatch]],
    ) -> TrainingResult:
        """Restore `strategy` from the checkpoint, if there is one, and return the results of earlier steps.

        `config` has `auto` and the learning rate resolved; `first_step` makes this rank's micro-batches of the first
        step.
        """
        # the manifest of later checkpoints
        self._strategy, self._last_step = strategy, steps
        if self.origin or self._saver:
            self._manifest = msgspec.structs.replace(
                manifest_of(strategy, self.step),
                run_id=self._run_id,
                job=current_job(),
                choice=config.choice,
                config=config.as_dict() | {"train_samples": train_samples},
                versions=self._versions,
            )
        if not self.origin:
            return TrainingResult()
        # the checkpoint's state
        path, manifest = self.origin.path, self.origin.manifest
        with naming(path):
            require_same_settings(manifest, self._manifest.config)
            require_same_model(manifest, self._manifest)
            strategy.relearn(first_step)
            now, then = sizes_of(self._manifest), sizes_of(manifest)
            on_every_rank(lambda: self._load(path, manifest, now == then))
        strategy.parameters_are_loaded()
        if self._ranks.is_main:
            print(f"{config.label}: resumes after step {self.step} from {path}", flush=True)
        strategy.optimizer_steps = self.step
        if now != then:
            strategy.notes.append(
                f"resumed after step {self.step} with {ranks_in_words(*now)} instead of {ranks_in_words(*then)}: the "
                "samples and their order are the same, the random numbers of dropout are new"
            )
        if config.strategy.compress:
            strategy.notes.append(
                f"resumed after step {self.step} without the error feedback of --compress "
                f"{config.strategy.compress}, which is not saved: later steps differ from those of a "
                "run that was not stopped"
            )
        # Step times are those of another process, so they stay in its record and in the manifest.
        return TrainingResult.resumed(list(manifest.train_loss), list(manifest.step_samples))

    def _load(self, path: Path, manifest: Manifest, draws_on: bool) -> None:
        files = TensorFiles([path / name for name in manifest.files])
        fill(self._strategy, files, manifest)
        device = self._ranks.device
        if draws_on and (device.type != "cuda" or manifest.config.get("device") == "cuda"):
            restore_random_states(*files.of_file(file_name(self._ranks.rank)), device)
        else:
            derive_random_states(self._manifest.config["seed"], manifest.step, self._ranks.drawing_rank)

    def is_due(self, step: int) -> bool:
        """Whether to save a checkpoint after this step: every `--checkpoint-every` steps, and after the last one."""
        return self._every is not None and (
            step % self._every == 0 or step in (self._last_step, self._strategy.steps.stops_after)
        )

    def after_step(self, result: TrainingResult) -> None:
        """Save a checkpoint if one is due."""
        if self._saver and self.is_due(len(result.loss)):
            with during("saving a checkpoint"):
                tensors, texts = random_states(self._ranks.device)
                tensors |= tensors_to_save(self._strategy)
                manifest = msgspec.structs.replace(
                    self._manifest,
                    step=len(result.loss),
                    parameter_groups=describe_groups(self._strategy.optimizer),
                    train_loss=list(result.loss),
                    step_samples=list(result.samples),
                    step_time_s=list(result.step_time_s),
                )
                self._saver.save(tensors, texts, manifest)

    def path_of(self, step: int) -> Path:
        assert self._saver is not None, "the run saves checkpoints"
        return self._saver.folder / folder_name(step)

    def finish(self) -> None:
        """Wait until the last save is complete."""
        if self._saver:
            self._saver.settle()

    def close(self) -> None:
        if self._saver:
            self._saver.close()

    def as_record(self) -> dict[str, Any] | None:
        """`resumed_from` of the run record."""
        if not self.origin:
            return None
        manifest = self.origin.manifest
        return {
            "path": str(self.origin.path),
            "step": manifest.step,
            "run_id": manifest.run_id,
            "changed": changed_settings(manifest, self._manifest),
        }


def sizes_of(manifest: Manifest) -> tuple[int, int, int]:
    """The number of ranks, how many of them see different samples, and the degree of tp, whose ranks draw alike."""
    mesh = manifest.config.get("mesh")
    return manifest.world_size, manifest.data_parallel_size, Mesh.parse(str(mesh)).degree(TENSOR) if mesh else 1


def ranks_in_words(world_size: int, data_parallel_size: int, tensor: int) -> str:
    groups = [f"{data_parallel_size} data-parallel"] * (world_size != data_parallel_size)
    groups += [f"{TENSOR}={tensor}"] * (tensor > 1)
    return f"{world_size} ranks" + (f" ({', '.join(groups)})" if groups else "")


# Random generators of this rank ---------------------------------------------------------------------------------------

TORCH, CUDA = "random/torch", "random/cuda"


def random_states(device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """States of this rank's random generators: torch's as tensors, Python's and NumPy's as JSON."""
    tensors = {TORCH: torch.get_rng_state()}
    if device.type == "cuda":
        tensors[CUDA] = torch.cuda.get_rng_state(device)
    kind, keys, *numbers = np.random.get_state(legacy=True)
    texts = {"python_random": random.getstate(), "numpy_random": [kind, keys.tolist(), *numbers]}  # type: ignore[union-attr]
    return tensors, {name: json.dumps(state) for name, state in texts.items()}


def restore_random_states(tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device) -> None:
    """Restore the states of this rank's generators."""
    try:
        torch.set_rng_state(tensors[TORCH])
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors[CUDA], device)
        version, keys, gauss = json.loads(texts["python_random"])
        random.setstate((version, tuple(keys), gauss))
        kind, keys, *numbers = json.loads(texts["numpy_random"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *numbers))
    except (RuntimeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise UserError(f"cannot restore the stored random numbers: {error}") from error


def derive_random_states(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators, differently for each `rank` and each step that a run resumes from."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
