"""The settings in which compared runs must agree, so that a difference of figures has one cause."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ddp_lab.runtime.errors import UserError

TIME, MEMORY, TRAFFIC, LOSS, TRACES = "step times", "memory", "traffic", "losses", "figures of traces"


class Setting(NamedTuple):
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


def of_config(name: str, otherwise: str | None = None) -> Callable[[dict[str, Any]], Any]:
    """Reads a flag; `otherwise` is what it means without the flag."""
    return lambda record: record["config"].get(name) or otherwise


def of_versions(package: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record.get("versions", {}).get(package)


def of_link(record: dict[str, Any]) -> str:
    """How fast each link was: paced by `--link`, or the machine's own."""
    paced = record["config"].get("link", "none")
    if paced == "none":
        return "not paced"
    outer, nodes = record["config"].get("outer_link"), record["config"].get("nodes")
    return f"{paced}{f', {outer} between {nodes} nodes' if outer else ''}, paced"


def class_of(record: dict[str, Any]) -> str:
    """What carried the tensors, and how ranks shared GPUs: `ProcessGroupNCCL2, 2 ranks a GPU, side by side`."""
    return ", ".join(filter(None, (record["backend_class"], record.get("gpu_sharing"))))


LINK = "link"
"""Runs over different links are never compared: the link decides which choice is fast."""
BACKEND_CLASS = "backend class"
"""With how ranks share GPUs (`class_of`). DDP's step takes another time with each of torch's NCCL classes
(docs/cuda.md)."""
EVERYTHING = (TIME, MEMORY, TRAFFIC, LOSS)
PACKAGES = ("python", "torch", "transformers", "datasets", "deepspeed")
"""Packages that take part in training."""
SETTINGS = {
    "task": Setting(of_config("task"), EVERYTHING),
    "workload": Setting(of_config("workload"), EVERYTHING),
    "model": Setting(of_config("model", "the workload's"), EVERYTHING),
    "parameters": Setting(lambda record: record.get("parameters"), EVERYTHING),
    "dataset": Setting(of_config("dataset", "the workload's"), (TIME, LOSS)),
    "text column": Setting(of_config("text_column"), (TIME, LOSS)),
    "label column": Setting(of_config("label_column", "label"), (LOSS,)),
    "sequence length": Setting(of_config("sequence_length", "the workload's"), (TIME, MEMORY, LOSS)),
    "lora rank": Setting(of_config("lora_rank", "none"), EVERYTHING),
    "lora alpha": Setting(of_config("lora_alpha", "twice the rank"), (LOSS,)),
    "training samples": Setting(lambda record: record.get("train_samples"), (LOSS,)),
    "held-out samples": Setting(lambda record: record.get("eval_samples"), (LOSS,)),
    "precision": Setting(of_config("precision"), EVERYTHING),
    "activation checkpointing": Setting(of_config("activation_checkpointing", "none"), (TIME, MEMORY)),
    "loss chunks": Setting(lambda record: record["config"].get("loss_chunks", 1), (TIME, MEMORY)),
    "first loss scale": Setting(of_config("loss_scale", "65536 in fp16"), (LOSS,)),
    "parameter dtype": Setting(of_config("param_dtype", "the model's"), EVERYTHING),
    "reduction dtype": Setting(of_config("reduce_dtype", "by default"), EVERYTHING),
    "offload": Setting(lambda record: (record["config"].get("offload") or "none").partition(":")[0], (TIME, MEMORY)),
    "matrix products": Setting(lambda record: "TF32" if record["config"].get("tf32") else "as stored", (TIME, LOSS)),
    "compiled blocks": Setting(lambda record: "yes" if record["config"].get("compile") else "no", (TIME, MEMORY, LOSS)),
    "global batch size": Setting(of_config("global_batch_size"), (TIME, MEMORY, LOSS)),
    "accumulated micro-batches": Setting(of_config("grad_accum_steps"), (TIME, MEMORY, TRAFFIC)),
    "optimizer": Setting(lambda record: record.get("optimizer", "not recorded"), EVERYTHING),
    "learning rate": Setting(of_config("lr"), (LOSS,)),
    "learning-rate schedule": Setting(of_config("schedule", "constant"), (LOSS,)),
    "warm-up steps": Setting(lambda record: record["config"].get("warmup_steps", 0), (LOSS,)),
    "gradient norm": Setting(of_config("clip_grad_norm", "not clipped"), (TIME, TRAFFIC, LOSS)),
    "bucket size": Setting(of_config("bucket_cap_mb"), (TIME, MEMORY, TRAFFIC)),
    "gradient compression": Setting(of_config("compress", "none"), EVERYTHING),
    "router scores": Setting(of_config("router_scores", "softmax"), (LOSS,)),
    "router bias": Setting(of_config("router_bias", "none"), (TIME, TRAFFIC, LOSS)),
    LINK: Setting(of_link, (TIME,)),
    "search for unused parameters": Setting(of_config("find_unused_parameters", "off"), (TIME,)),
    "optimizer steps": Setting(lambda record: len(record["train_loss"]), (LOSS,)),
    "seed": Setting(lambda record: record["config"].get("seed"), (LOSS,)),
    "ranks": Setting(lambda record: record["world_size"], EVERYTHING),
    "profiled ranks": Setting(of_config("profile_ranks", "all"), (TRACES,)),
    "device": Setting(lambda record: record.get("device_name"), (TIME,)),
    "backend": Setting(lambda record: record["backend"], (TIME, TRAFFIC)),
    BACKEND_CLASS: Setting(class_of, (TIME,)),
    "nccl version": Setting(of_versions("nccl"), (TIME,)),
    "host": Setting(lambda record: record.get("host"), (TIME,)),
    "threads": Setting(lambda record: record.get("threads"), (TIME,)),
    "scheduling": Setting(lambda record: record.get("scheduling") or "other", (TIME,)),
    **{f"{package} version": Setting(of_versions(package), EVERYTHING) for package in PACKAGES},
}
"""By name: where a run record has it, and which figures it affects."""


def field_of(name: str) -> str:
    """The setting's name on the command line: `learning rate` -> `learning-rate`."""
    return name.replace(" ", "-")


FIELDS = tuple(field_of(name) for name in SETTINGS if name != LINK)
"""Those in which a user may allow a difference."""


def differences(records: Mapping[str, dict[str, Any]]) -> list[Difference]:
    """Settings in which `records` (by the name that is shown) differ."""
    found = []
    for name, setting in SETTINGS.items():
        values: dict[str, list[str]] = {}
        for owner, record in records.items():
            value = setting.value_of(record)
            if value is not None:
                values.setdefault(str(value), []).append(owner)
        if len(values) > 1:
            found.append(Difference(name, values, setting.affects))
    return found


def require_comparable(records: Mapping[str, dict[str, Any]], allowed: Iterable[str] = ()) -> list[Difference]:
    """Refuse runs that differ in settings other than `allowed` (named as in `FIELDS`); return the other differences.

    Raises:
        UserError: names each setting that differs, with its values and their runs.
    """
    found = differences(records)
    may_differ = set(allowed) & set(FIELDS)
    refused = [difference for difference in found if field_of(difference.name) not in may_differ]
    if refused:
        flags = [f"--allow-different {field_of(found.name)}" for found in refused if found.name != LINK]
        way_out = f", or give {' '.join(flags)}" if len(flags) == len(refused) else ""
        raise UserError(
            f"these runs cannot be compared: they differ in {', '.join(map(str, refused))}; train them alike{way_out}"
        )
    return found


def by_class(records: Mapping[str, dict[str, Any]], across: bool = False) -> list[dict[str, dict[str, Any]]]:
    """Runs whose step times may be compared: those of one class (`class_of`) together, in their order.

    Args:
        across: All of them together.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for name, record in records.items():
        groups.setdefault("" if across else class_of(record), {})[name] = record
    return list(groups.values())


def affected(differences: Iterable[Difference]) -> list[str]:
    """The figures that cannot be compared."""
    found = {figure for difference in differences for figure in difference.affects}
    return [figure for figure in (*EVERYTHING, TRACES) if figure in found]
