"""Checkpoints with damage in any field of the manifest and any header of a file, and checksums that are right: a run
has bitwise the state that was saved, or ends with one line that names the checkpoint."""

import json
import random
import shutil
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch.distributed as dist

from ddp_lab.runtime.checkpoint.manifest import MANIFEST, _checksum, checkpoints_in
from ddp_lab.runtime.checkpoint.session import Checkpoints
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from tests.checkpoints import SAMPLES, fingerprints, here, make_strategy, steps, train_to
from tests.damage import OF_ANOTHER_KIND, damage_field, damaged_tensors, of_another_type
from tests.ranks import RankPool

CHOICE = "zero2"
CASES = 60


def damage(path: Path, chance: random.Random) -> str:
    content = json.loads((path / MANIFEST).read_bytes())
    del content["crc32"]
    if chance.random() < 0.5:
        change = f"{MANIFEST}: {damage_field(content, chance, OF_ANOTHER_KIND, of_another_type)}"
    else:
        file = chance.choice(sorted(path.glob("rank_*")))
        file_bytes, change = damaged_tensors(file.read_bytes(), chance)
        file.write_bytes(file_bytes)
        content["files"][file.name] = {"bytes": len(file_bytes), "crc32": zlib.crc32(file_bytes)}
        change = f"{file.name}: {change}"
    (path / MANIFEST).write_text(json.dumps(content | {"crc32": _checksum(content)}))
    return change


def resumed(path: Path) -> tuple[str, dict[str, str]]:
    """What a run says that cannot resume, else a digest of the state from which it would go on."""
    config = RunConfig(choice=CHOICE[1], lr=1e-2, workload="mlp", resume=str(path))
    try:
        checkpoints = Checkpoints(config, here(), "a run", {})
        strategy = make_strategy(CHOICE, 5, None, 0.5)
        earlier = checkpoints.begin(strategy, config, SAMPLES, 4, lambda: next(steps(0, 1)).micro_batches)
    except UserError as error:
        return str(error), {}
    generators = {"of Python": str(random.getstate()), "of NumPy": str(np.random.get_state())}
    return "", fingerprints(strategy, earlier) | generators | {
        "groups": str(strategy.optimizer.param_groups[0]["betas"])
    }


def fuzz(folder: Path) -> list[tuple[str, str]]:
    """On a rank: what was damaged, and what the run said; empty if it has the right state."""
    train_to(CHOICE, 2, folder, dropout=0.5)
    (_, saved), chance, answers = checkpoints_in(folder)[0], random.Random(40), []
    message, right = resumed(saved)
    assert message == ""
    damaged = folder / "damaged"
    for _ in range(CASES):
        change = [""]
        if here().rank == 0:
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(saved, damaged)
            change = [damage(damaged, chance)]
        dist.broadcast_object_list(change, src=0)
        try:
            message, state = resumed(damaged)
        except Exception as error:
            raise AssertionError(f"{change[0]}: {type(error).__name__}: {error}") from error
        wrong = [name for name in right if not message and state.get(name) != right[name]]
        assert not wrong, f"{change[0]}: another state in silence: {wrong}"
        assert not message or (str(damaged) in message and len(message.splitlines()) == 1), f"{change[0]}: {message}"
        answers.append((change[0], message))
    return answers


def test_damaged_checkpoints(ranks: RankPool, tmp_path):
    answers = ranks.run(2, fuzz, tmp_path)[0]
    outcomes = Counter((change.split(":")[0], bool(message)) for change, message in answers)
    assert outcomes[MANIFEST, True] > 10 and outcomes[MANIFEST, False] > 0, outcomes
    assert outcomes["rank_0.safetensors", True] > 8 and outcomes["rank_1.safetensors", True] > 8, outcomes
    assert [change for change, message in answers if not message and not change.startswith(MANIFEST)] == []
