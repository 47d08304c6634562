"""A record of operators: how long each operator of a training step took on one device, kept in a JSON file.

`ddp-lab plan record` measures it (`timing.py`), and `ddp-lab plan --record` plans with it. The
format is described in docs/planner-costs.md.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import numpy as np

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs.cluster import Device
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.records.record import cpu_name
from ddp_lab.untrusted import fitted, json_bytes

SCHEMA_VERSION = 4
Key = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]


class RecordedCosts:
    """An operator takes what it took in the record. In another shape, it takes what a roofline says, times the ratio
    of measured time to roofline: the ratio of recorded shapes is interpolated by the logarithm of what the roofline
    says. For an operator that was not recorded, the ratios are those of all operators with flops, or of all without.

    Args:
        recorded: Calls with their seconds, each from the end of the call before; at least one.
        device: That was recorded.
    """

    def __init__(self, recorded: Sequence[tuple[OperatorCall, float]], device: Device) -> None:
        self._device = device
        times: dict[Key, list[float]] = defaultdict(list)
        for call, seconds in recorded:
            times[key_of(call)].append(seconds)
        self._known = {key: fmean(of_key) for key, of_key in times.items()}
        points: dict[object, set[tuple[float, float]]] = defaultdict(set)
        for call, _ in recorded:
            work_s, seconds = device.seconds(call), self._known[key_of(call)]
            if work_s and seconds:
                for kind in kinds_of(call):
                    points[kind].add((work_s, seconds / work_s))
        self._ratios = {kind: np.log(np.array(sorted(of_kind))).T for kind, of_kind in points.items()}

    def seconds(self, call: OperatorCall) -> float | None:
        if not call.bytes_moved:
            return 0.0
        if known := self._known.get(key_of(call)):
            return known
        work_s = self._device.seconds(call)
        ratios = next((self._ratios[kind] for kind in kinds_of(call) if kind in self._ratios), None)
        if work_s is None or ratios is None:
            return work_s
        return work_s * float(np.exp(np.interp(np.log(work_s), *ratios)))


def key_of(call: OperatorCall) -> Key:
    return call.name, call.shapes, call.dtypes


def kinds_of(call: OperatorCall) -> tuple[object, object]:
    """What groups operators that resemble each other: name and dtype, or else whether there are flops."""
    return (call.name, call.dtypes[:1]), bool(call.flops)


# The file -------------------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    flops: Annotated[int, msgspec.Meta(ge=0, le=2**60)]
    bytes_moved: Annotated[int, msgspec.Meta(ge=0, le=2**60)]
    access: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Content(msgspec.Struct):
    """What is read of a record."""

    precision: str
    device: str
    hardware: str
    threads: int
    operators: Annotated[list[Entry], msgspec.Meta(min_length=1)]


def load(path: str | Path) -> dict[str, Any]:
    """A record as it was written.

    Raises:
        UserError: it cannot be read, or is none. Names the field.
    """
    try:
        content = msgspec.json.decode(json_bytes(Path(path)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UserError(f"cannot read a record of operators from {path}: it is not JSON") from None
    if not isinstance(content, dict) or content.get("what") != "operators":
        raise UserError(f"{path}: not a record of operators; make one with ddp-lab plan record")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: a record of version {content.get('schema_version')}, this reads version {SCHEMA_VERSION}; "
            "make it again with ddp-lab plan record"
        )
    fitted(content, Content, path, "record of operators")
    return content


def operator_costs(path: str | Path, content: Mapping[str, Any], device: Device, precision: str) -> RecordedCosts:
    """Costs by the record `content` of this device.

    Args:
        path: Of the record, for messages.
        precision: Of the steps that are planned.

    Raises:
        UserError: the record is of another device or precision.
    """
    if content["precision"] != precision:
        raise UserError(f"{path}: recorded in {content['precision']}, not in {precision}; record this precision")
    here = cpu_name() if device.kind == "cpu" else device.name
    if content["device"] != device.name or (device.kind == "cpu" and content["hardware"] != here):
        raise UserError(f"{path}: recorded on {content['hardware']}, not on {here}; record there")
    operators = [(msgspec.convert(entry, OperatorCall), entry["seconds"]) for entry in content["operators"]]
    return RecordedCosts(operators, device)
