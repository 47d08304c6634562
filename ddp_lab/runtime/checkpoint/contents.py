"""Whether the files of a checkpoint hold what its manifest says: each tensor once, whole, and of its dtype.

Only the headers of the files are read for this, before any value is used.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from ddp_lab.runtime.checkpoint.files import TensorFiles
from ddp_lab.runtime.checkpoint.manifest import MANIFEST, Manifest
from ddp_lab.runtime.checkpoint.parts import fits, part_key
from ddp_lab.runtime.checkpoint.random_states import CUDA, TEXTS, TORCH, stored_for
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA, EXPERT, TENSOR, Mesh
from ddp_lab.strategy.account import cover

DESCRIBED = ("parameter", "buffer")
"""Kinds of keys whose dtypes are in `parameters` and `buffers` of the manifest. Those of the others are in `states`."""
PER_ELEMENT = "optimizer"


def states_in(files: TensorFiles) -> dict[str, str]:
    """`states` of the manifest."""
    return {key: stored[0].dtype for key, stored in files.stored.items() if key.split("/")[0] not in DESCRIBED}


def require_contents(folder: Path, manifest: Manifest) -> None:
    """Check that the manifest agrees with itself, and the files with the manifest.

    Raises:
        UserError: they do not; names the file and the field or tensor.
    """
    try:
        problem = next(_problems(manifest, TensorFiles([folder / name for name in manifest.files])), None)
    except UserError as error:
        problem = str(error)
    if problem:
        raise UserError(f"{folder} is damaged: {' '.join(problem.splitlines())}")


def _problems(manifest: Manifest, files: TensorFiles) -> Iterator[str]:
    for field, problem in _contradictions(manifest):
        yield f"{MANIFEST}: {field}: {problem}"
        return  # what follows relies on it
    try:
        expected = dict(_expected(manifest))
    except KeyError as error:
        yield f"{MANIFEST}: states: {error.args[0]!r} belongs to none of its parameters"
        return
    for key in files.stored.keys() - expected.keys():
        yield f"{files.stored[key][0].file} has {key!r}, which {MANIFEST} does not have"
    for key, (elements, dtype) in expected.items():
        stored = files.stored.get(key, [])
        for file, _, _, found in stored:
            if found != dtype:
                yield f"{file}: {key!r} is {found}, and {MANIFEST} says {dtype}"
        try:
            cover([(start, end) for _, start, end, _ in stored], 0, elements)
        except ValueError as error:
            yield f"{', '.join(manifest.files)}: {key!r}, of which {MANIFEST} says {elements} elements: {error}"
        if sum(end - start for _, start, end, _ in stored) != elements:
            yield f"{', '.join({one.file: None for one in stored})}: {key!r} has more than {elements} elements"
    wanted = stored_for(str(manifest.config.get("device")))
    for name in manifest.files:
        tensors, texts = files.of_file(name)
        yield from (f"{name} lacks {key}" for key in (*wanted, *TEXTS) if key not in (*tensors, *texts))
        for key, tensor in tensors.items():
            if key not in (TORCH, CUDA) or tensor.dtype != torch.uint8:
                yield f"{name} has {key!r} of {tensor.dtype}, which is no state of random numbers"


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Fields that do not go with others, and why."""
    try:
        mesh = Mesh.parse(str(manifest.config.get("mesh") or f"{DATA}={manifest.world_size}"))
    except UserError as error:
        yield "config.mesh", str(error)
        return
    if manifest.data_parallel_size != mesh.data_size:
        yield (
            "data_parallel_size",
            f"{manifest.data_parallel_size} ranks, but {mesh.data_size} by world_size and config.mesh",
        )
    for name, cut in manifest.cuts.items():
        if name not in manifest.parameters or not fits(cut, tuple(manifest.parameters[name].shape)):
            yield "cuts", f"{name!r} is cut otherwise than its shape allows"
        tensor = mesh.degree(TENSOR)
        if len(cut.ranges) not in (tensor, tensor * mesh.degree(EXPERT)):
            yield "cuts", f"{name!r} is cut over {len(cut.ranges)} ranks instead of {tensor}"


def _expected(manifest: Manifest) -> Iterator[tuple[str, tuple[int, str]]]:
    """By key without first element: how many elements there are, and torch's name of their dtype.

    Raises:
        KeyError: a state belongs to no parameter.
    """
    lengths = {}
    for name, info in manifest.parameters.items():
        cut = manifest.cuts.get(name)
        for rank in filter(cut.is_owner, range(len(cut.ranges))) if cut else (0,):
            key, whole = part_key(name, cut, rank), torch.empty(info.shape, dtype=torch.float32, device="meta")
            lengths[key] = prod(cut.part_shape(whole, rank) if cut else info.shape)
            yield f"parameter/{key}", (lengths[key], info.dtype)
    for name, info in manifest.buffers.items():
        yield f"buffer/{name}", (prod(info.shape), info.dtype)
    for key, dtype in manifest.states.items():
        kind, _, of_kind = key.partition("/")
        yield key, (lengths[of_kind.partition("/")[2]] if kind == PER_ELEMENT else 1, dtype)
