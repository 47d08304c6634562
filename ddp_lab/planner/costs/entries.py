"""Entries of the table of hardware (`ddp_lab/planner/hardware.toml`), and of files of the same form."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ddp_lab.planner.contracts import ACCESSES
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import fitted, settings_in

TABLE = Path(__file__).parent.parent / "hardware.toml"
OWN = ".toml"
"""How the name of a device ends that is a file with an entry in the form of the table."""
ADD = (
    "Or measure it where it is (ddp-lab plan measure --output card.toml) or write its file: [devices.NAME] with "
    'like = "H100" and what differs (memory_mib, flops, bytes_per_s, efficiency, source); plan with --gpus 2xcard.toml'
)
Dtype = Literal["float32", "tfloat32", "bfloat16", "float16", "float64"]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e30)]


class Parts(msgspec.Struct, forbid_unknown_fields=True):
    compute: Amount | dict[Dtype, Amount]
    launch_us: Amount


class Form(msgspec.Struct, forbid_unknown_fields=True):
    forward: Amount
    backward: Amount
    half: Annotated[float, msgspec.Meta(ge=0)]
    narrower: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class OfLink(msgspec.Struct, forbid_unknown_fields=True):
    bytes_per_s: Amount
    latency_us: Amount
    efficiency: Amount
    source: str


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A device in a file of its own, with what it is `like` filled in."""

    kind: Literal["cuda", "cpu"]
    memory_mib: Amount
    flops: Annotated[dict[Dtype, Amount], msgspec.Meta(min_length=1)]
    bytes_per_s: Amount
    efficiency: Parts
    source: str
    elements_per_s: Amount = float("inf")
    attention: Form | None = None
    operators: dict[Literal[*ACCESSES, "host_us", "source"], Amount | str] = {}  # type: ignore[valid-type]
    link: str | OfLink | None = None
    title: str = ""
    aliases: list[str] = []
    like: str = ""


def found(name: str) -> tuple[str, dict[str, Any]]:
    """Name and entry of a device, of the table or of a file. What it is `like` is filled in.

    Raises:
        UserError: there is none, and which are similar; or the file is no such entry, and which field is wrong.
    """
    if not name.endswith(OWN):
        try:
            key = known(name, table()["devices"], "device")
        except UserError as error:
            raise UserError(f"{error} {ADD}") from None
        return key, filled(table()["devices"][key])
    content = settings_in(Path(name), "--gpus")
    devices = content.get("devices")
    if len(content) != 1 or not isinstance(devices, dict) or len(devices) != 1:
        raise UserError(f"--gpus {name}: must have one table [devices.NAME] alone, as in ddp_lab/planner/hardware.toml")
    ((key, own),) = devices.items()
    entry = filled(fitted(own, dict[str, Any], name, "entry of a device"))
    fitted(entry, Entry, name, "entry of a device")
    compute = entry["efficiency"]["compute"]
    if isinstance(compute, dict) and (missing := [dtype for dtype in entry["flops"] if dtype not in compute]):
        raise UserError(f"{name}: a damaged entry of a device: efficiency.compute: missing {missing[0]}")
    return key, entry


def filled(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry, with what it does not say as in the one that it is `like`."""
    like = known(str(entry["like"]), table()["devices"], "device") if "like" in entry else None
    return {**(table()["devices"][like] if like else {}), **entry}


def known(name: str, entries: Mapping[str, Any], what: str, others: Iterable[str] = ()) -> str:
    """The key in `entries` that `name` stands for.

    Raises:
        UserError: none.
    """
    spellings = {spelled(alias): key for key, entry in entries.items() for alias in (key, *entry.get("aliases", ()))}
    if spelled(name) not in spellings:
        raise UserError(unknown_name(what, name, [*entries, *others]))
    return spellings[spelled(name)]


def spelled(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())
