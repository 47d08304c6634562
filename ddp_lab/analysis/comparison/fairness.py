"""The settings in which compared runs must agree, so that a difference of figures has one cause."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ddp_lab.runtime.config import FLAGS
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import EVERYTHING, LOSS, TIME, TRACES, TRAFFIC, flag_name


class RecordedSetting(NamedTuple):
    """A setting in a run record.

    Attributes:
        value_of: Reads it. None means that the record does not say; that never counts as a difference.
        affects: Figures that cannot be compared if it differs.
    """

    value_of: Callable[[dict[str, Any]], Any]
    affects: tuple[str, ...]


class Difference(NamedTuple):
    """A setting that differs. `values` has the names of the runs by value."""

    name: str
    values: dict[str, list[str]]
    affects: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.listed})"

    @property
    def listed(self) -> str:
        return "; ".join(f"{value}: {', '.join(names)}" for value, names in self.values.items())


def of_flag(field: Any) -> RecordedSetting:
    """A flag as a setting. A record older than the flag has its default."""
    shown = {None: "not given", False: "off", True: "on"}

    def value_of(record: dict[str, Any]) -> Any:
        value = record["config"].get(field.name, field.default)
        return shown[value] if value is None or isinstance(value, bool) else value

    return RecordedSetting(value_of, field.metadata["affects"])


def of_field(name: str, *affects: str) -> RecordedSetting:
    return RecordedSetting(lambda record: record.get(name), affects)


def of_versions(package: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record.get("versions", {}).get(package)


def class_of(record: dict[str, Any]) -> str:
    """What carried the tensors, and how ranks shared GPUs: `ProcessGroupNCCL2, 2 ranks a GPU, side by side`."""
    return ", ".join(filter(None, (record["backend_class"], record.get("gpu_sharing"))))


LINKS = ("link", "outer-link", "nodes")
"""Runs over different links are never compared: the link decides which choice is fast."""
BACKEND_CLASS = "backend-class"
"""Includes how ranks share GPUs (`class_of`). DDP's step time differs between torch's two NCCL classes
(docs/status.md)."""
PACKAGES = ("python", "torch", "transformers", "datasets", "deepspeed")
"""Packages that take part in training."""
SETTINGS = {
    **{flag_name(field.name)[2:]: of_flag(field) for field in FLAGS if field.metadata["affects"]},
    "parameters": of_field("parameters", *EVERYTHING),
    "training-samples": of_field("train_samples", LOSS),
    "held-out-samples": of_field("eval_samples", LOSS),
    "optimizer": RecordedSetting(lambda record: record.get("optimizer", "not recorded"), EVERYTHING),
    "optimizer-steps": RecordedSetting(lambda record: len(record["train_loss"]), (LOSS,)),
    "ranks": of_field("world_size", *EVERYTHING),
    "device": of_field("device_name", TIME),
    "backend": of_field("backend", TIME, TRAFFIC),
    BACKEND_CLASS: RecordedSetting(class_of, (TIME,)),
    "nccl-version": RecordedSetting(of_versions("nccl"), (TIME,)),
    "host": of_field("host", TIME),
    "threads": of_field("threads", TIME),
    "scheduling": RecordedSetting(lambda record: record.get("scheduling") or "other", (TIME,)),
    **{f"{package}-version": RecordedSetting(of_versions(package), EVERYTHING) for package in PACKAGES},
}
"""Where a run record has each setting, and which figures it affects. A flag has its name without dashes."""
FIELDS = tuple(name for name in SETTINGS if name not in LINKS)
"""Settings in which a user may allow runs to differ."""


def differences(records: Mapping[str, dict[str, Any]]) -> list[Difference]:
    """Settings in which `records` (by the name that is shown) differ."""
    differing = []
    for name, setting in SETTINGS.items():
        values: dict[str, list[str]] = {}
        for owner, record in records.items():
            value = setting.value_of(record)
            if value is not None:
                values.setdefault(str(value), []).append(owner)
        if len(values) > 1:
            differing.append(Difference(name, values, setting.affects))
    return differing


def require_comparable(records: Mapping[str, dict[str, Any]], allowed: Iterable[str] = ()) -> list[Difference]:
    """Refuse runs that differ in settings other than `allowed` (named as in `FIELDS`); return the other differences.

    Raises:
        UserError: names each setting that differs, with its values and their runs.
    """
    differing = differences(records)
    may_differ = set(allowed) & set(FIELDS)
    refused = [difference for difference in differing if difference.name not in may_differ]
    if refused:
        flags = [f"--allow-different {difference.name}" for difference in refused if difference.name not in LINKS]
        way_out = f", or give {' '.join(flags)}" if len(flags) == len(refused) else ""
        raise UserError(
            f"these runs cannot be compared: they differ in {', '.join(map(str, refused))}; train them alike{way_out}"
        )
    return differing


def with_one_link(records: Mapping[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], str]:
    """The runs over the most common links, and a line on those that are left out. All runs, if there is a tie."""
    links = {name: [SETTINGS[flag].value_of(record) for flag in LINKS] for name, record in records.items()}
    ways = Counter(tuple(link) for link in links.values()).most_common(2)
    if len(ways) < 2 or ways[0][1] == ways[1][1]:
        return dict(records), ""
    most = [*ways[0][0]]
    left_out = [f"{name} (--link {link[0]})" for name, link in links.items() if link != most]
    line = f"left out, since their links are not those of the other runs (--link {most[0]}): {', '.join(left_out)}"
    return {name: record for name, record in records.items() if links[name] == most}, line


def by_class(records: Mapping[str, dict[str, Any]], across: bool = False) -> list[dict[str, dict[str, Any]]]:
    """Runs whose step times may be compared: those of one class (`class_of`) together, in their order.

    Args:
        across: Put all runs into one group.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for name, record in records.items():
        groups.setdefault("" if across else class_of(record), {})[name] = record
    return list(groups.values())


def affected(differences: Iterable[Difference]) -> list[str]:
    """The figures that cannot be compared."""
    figures = {figure for difference in differences for figure in difference.affects}
    return [figure for figure in (*EVERYTHING, TRACES) if figure in figures]
