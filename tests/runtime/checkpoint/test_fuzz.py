"""Checkpoints altered in any field of the manifest and any header of a file, with checksums that are right: a run has
bitwise the state that was saved, or ends with one line that names the checkpoint."""

import json
import random
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ddp_lab.runtime.checkpoint.manifest import MANIFEST, _checksum, checkpoints_in
from ddp_lab.runtime.checkpoint.session import Checkpoints
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from tests.checkpoints import SAMPLES, fingerprints, here, make_strategy, steps, train_to
from tests.ranks import RankPool

CHOICE = ("sharding", "zero2")
CASES = 300
OF_KIND: dict[str, Any] = {"text": "x", "number": 1, "null": None, "truth": True, "list": [1], "object": {"x": 1}}
SAME_SIZE = {"F32": "I32", "I32": "F32", "I64": "F64", "U8": "I8"}


def kind_of(value: Any) -> str:
    kinds = {str: "text", int: "number", float: "number", bool: "truth", list: "list", dict: "object"}
    return kinds.get(type(value), "null")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything within JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, one in inner for found in ((*path, key), *places(one, (*path, key)))]


def alter_manifest(content: dict[str, Any], chance: random.Random) -> str:
    by_field: dict[Any, list[tuple[Any, ...]]] = {}
    for path in places(content):
        by_field.setdefault((path[0], len(path)), []).append(path)
    path = chance.choice(by_field[chance.choice(sorted(by_field))])  # each field as often as those with many entries
    where = content
    for key in path[:-1]:
        where = where[key]
    how, value = chance.choice(["drop", "rename", *OF_KIND]), where[path[-1]]
    if how == "drop":
        del where[path[-1]]
    elif how == "rename" and isinstance(where, dict):
        where[f"{path[-1]}\nx"] = where.pop(path[-1])
    elif how in OF_KIND and how != kind_of(value) and not (how == "null" and kind_of(value) == "number"):
        where[path[-1]] = OF_KIND[how]
    return f"manifest: {how} {path}"


def alter_file(path: Path, chance: random.Random) -> str:
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:length]), whole[length:]
    texts = header["__metadata__"]
    key = chance.choice([key for key in header if key != "__metadata__"])
    about, text = header[key], chance.choice(sorted(texts))
    how = chance.choice(
        ["truncate", "dtype", "matrix", "shorter", "drop", "rename", "start", "no text", "text", "more"]
    )
    if how == "truncate":
        data = data[: chance.randrange(len(data))]
    elif how == "dtype":
        about["dtype"] = SAME_SIZE[about["dtype"]]
    elif how == "matrix":
        about["shape"] = [1, *about["shape"]]
    elif how == "shorter":
        about["shape"] = [max(0, about["shape"][0] - 1)]
    elif how == "no-text":
        del texts[text]
    elif how == "text":
        texts[text] = chance.choice(["", "{", "[]", "[1, 2, 3]", "null", texts[text][:-9]])
    elif how == "more":
        header[f"{key}\nx"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    else:
        stem, _, start = key.rpartition("/")
        new = {"rename": f"{stem}x/{start}", "start": f"{stem}/{start}1"}.get(how)
        if new is None:  # its bytes go, too: there may be no hole
            start, end = about["data_offsets"]
            data = data[:start] + data[end:]
            for other in header.values():
                if "data_offsets" in other and other["data_offsets"][0] >= end:
                    other["data_offsets"] = [place - end + start for place in other["data_offsets"]]
        else:
            header[new] = about
        del header[key]
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)
    return f"{path.name}: {how} {key if 'text' not in how else text}"


def alter(path: Path, chance: random.Random) -> str:
    content = json.loads((path / MANIFEST).read_bytes())
    del content["crc32"]
    if chance.random() < 0.5:
        what = alter_manifest(content, chance)
    else:
        file = chance.choice(sorted(path.glob("rank_*")))
        what = alter_file(file, chance)
        whole = file.read_bytes()
        content["files"][file.name] = {"bytes": len(whole), "crc32": zlib.crc32(whole)}
    (path / MANIFEST).write_text(json.dumps(content | {"crc32": _checksum(content)}))
    return what


def resumed(path: Path) -> tuple[str, dict[str, str]]:
    """What a run says that cannot resume, else a digest of the state from which it would go on."""
    config = RunConfig(choice=CHOICE[1], lr=1e-2, workload="mlp", resume=str(path))
    try:
        checkpoints = Checkpoints(config, here(), "a run", {})
        strategy = make_strategy(CHOICE, 5, None, 0.5)
        earlier = checkpoints.begin(strategy, config, SAMPLES, 4, lambda: next(steps(0, 1)).micro_batches)
    except UserError as error:
        return str(error), {}
    others = {"of Python": str(random.getstate()), "of NumPy": str(np.random.get_state())}
    return "", fingerprints(strategy, earlier) | others | {"groups": str(strategy.optimizer.param_groups[0]["betas"])}


def fuzz(folder: Path) -> list[tuple[str, str]]:
    """On a rank: what was altered, and what the run said; empty if it has the right state."""
    train_to(CHOICE, 2, folder, dropout=0.5)
    (_, saved), chance, found = checkpoints_in(folder)[0], random.Random(40), []
    said, right = resumed(saved)
    assert said == ""
    altered = folder / "altered"
    for _ in range(CASES):
        what = [""]
        if here().rank == 0:
            shutil.rmtree(altered, ignore_errors=True)
            shutil.copytree(saved, altered)
            what = [alter(altered, chance)]
        dist.broadcast_object_list(what, src=0)
        try:
            said, state = resumed(altered)
        except Exception as error:
            raise AssertionError(f"{what[0]}: {type(error).__name__}: {error}") from error
        if said == "":
            wrong = [name for name in right if state.get(name) != right[name]]
            assert not wrong, f"{what[0]}: another state in silence: {wrong}"
        else:
            assert str(altered) in said and len(said.splitlines()) == 1, f"{what[0]}: {said}"
        found.append((what[0], said))
    return found


def test_altered_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, fuzz, tmp_path)[0]
    outcomes = Counter((what.split()[0], bool(said)) for what, said in found)
    assert outcomes["manifest:", True] > 60 and outcomes["manifest:", False] > 5, outcomes
    assert outcomes["rank_0.safetensors:", True] > 50 and outcomes["rank_1.safetensors:", True] > 50, outcomes
    assert [what for what, said in found if not said and not what.startswith("manifest: ")] == []
