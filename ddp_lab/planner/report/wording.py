"""What a reader must know of a plan besides its table, in sentences."""

import shlex

from ddp_lab.planner.choices import entrypoint_of
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.sources import LINK_ERROR
from ddp_lab.planner.models import IMAGES
from ddp_lab.planner.plan import Case
from ddp_lab.planner.report.table import Plan
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workloads import BUILT_IN_LANGUAGE
from ddp_lab.runtime.settings.data import CAUSAL_LM
from ddp_lab.runtime.settings.field import flag_name
from ddp_lab.runtime.settings.mesh import ULYSSES
from ddp_lab.strategy.options import NO_RECOMPUTATION

NAMED = ("mesh", "param_dtype", "reduce_dtype", "activation_checkpointing", "loss_chunks", "offload")
"""Settings that the headline names where they are given."""


def headline(plan: Plan, with_steps: bool = True) -> str:
    """What is planned. `with_steps`: how many micro-batches a step has, too."""
    case, several = plan.case, len(plan.cases) > 1
    cluster, config = case.cluster, case.config
    nodes = f"{cluster.nodes} nodes of {cluster.ranks_per_node}" if cluster.nodes > 1 else f"{cluster.ranks_per_node}"
    between = f", {cluster.between.name} between nodes" if cluster.between and cluster.nodes > 1 else ""
    samples = f"{case.sequence_length} tokens" if case.model.kind == "tokens" else "224 x 224 pixels"
    sizes = " or ".join(map(str, sorted({each.micro_batch_size for each in plan.cases})))
    counts = " or ".join(map(str, sorted({each.config.grad_accum_steps for each in plan.cases})))
    values = config.as_dict()
    given = {name: values[name] for name in NAMED if not (several and name == "mesh")}
    settings = [
        *[case.model.task] * (case.model.kind == "tokens"),
        config.strategy.precision,
        *(f"{flag_name(name)} {value}" for name, value in given.items() if value not in (None, NO_RECOMPUTATION, 1)),
        *["--sequence-parallel"] * any(each.config.sequence_parallel for each in plan.cases),
        *{f"pipelines {each.config.pipeline_schedule}" for each in plan.cases if each.config.has_stages},
    ]
    steps = f": {counts} micro-batch{'es' * (counts != '1')} of {sizes} on each rank" if with_steps else ""
    return (
        f"PREDICTED, not measured: {case.model.name} ({case.model.elements() / 1e6:,.1f} M parameters) "
        f"on {nodes} x {cluster.device.name}, {cluster.inside.name}{between}.\nA global batch of "
        f"{config.global_batch_size} samples of {samples}{steps}; {', '.join(settings)}."
    )


def notes(plan: Plan) -> list[str]:
    """What is not known of a choice, with all choices that it is about, and which meshes are left out."""
    by_note: dict[str, list[str]] = {}
    for of_choice in plan.rows:
        if of_choice["note"]:
            by_note.setdefault(str(of_choice["note"]), []).append(str(of_choice["name"]))
    about = [f"{', '.join(names)}: {note}" for note, names in by_note.items()]
    return about + [f"Left out: {line}" for line in plan.left_out]


def certainty(plan: Plan) -> list[str]:
    """What intervals and spare memory mean, and where the costs come from."""
    costs, cluster = plan.case.costs, plan.case.cluster
    is_cuda = cluster.device.kind == "cuda"
    spare = (
        "of a device's memory, less 1 GiB for CUDA itself" if is_cuda else "of a rank's part of the machine's memory"
    )
    has_host = is_cuda and plan.case.config.strategy.offload
    host = [f"Host: {hardware.host(cluster.ranks_per_node).source}."] if has_host else []
    routed = ["Experts: each is assumed to get equally many tokens; one that gets more holds up all ranks."]
    return [
        *routed * any(case.config.has_experts for case in plan.cases),
        *dropout_left_out(plan),
        f"Intervals: operators off by {costs.compute_error:.0%} at most and collectives by {LINK_ERROR:.0%}. "
        f"To spare: {spare}.",
        *costs.sources,
        *host,
        price_line(plan.case),
    ]


def dropout_left_out(plan: Plan) -> list[str]:
    """No plan has a dropout of attention: kernels keep nothing for it. But a ring refuses to run with it."""
    has_ring = any(case.config.cuts_tokens and case.config.context_parallel != ULYSSES for case in plan.cases)
    dropout = plan.case.model.attention_dropout if has_ring else 0.0
    what = "A ring refuses to run with it: set it to 0 in the model's config, or take ulysses."
    return [f"Dropout: that of attention ({dropout:g}) is left out. {what}"] if dropout else []


def price_line(case: Case) -> str:
    """What a device costs, and who says so."""
    if case.price is None:
        return f"Price: none is listed for {case.cluster.device.name}; --price PER_HOUR adds what tokens cost."
    return f"Price: ${case.price.amount:g} an hour for each device ({case.price.source})."


ALWAYS = ("choice", "task", "model", "global_batch_size", "grad_accum_steps", "precision")
"""Settings that the command names though they are the runner's defaults."""


def runner_command(case: Case, choice: str) -> str:
    """Starts all ranks of one node of `case` with `choice`. `HOST` and `MODEL` are left to the reader: the address of
    the first node, and a model that has no name."""
    cluster, model = case.cluster, case.model
    tokens = case.sequence_length if model.task == CAUSAL_LM else None
    name = "MODEL" if " " in model.name or model.kind == IMAGES else model.name
    named = {"workload" if name in BUILT_IN_LANGUAGE else "model": name}
    config = case.config.but(choice=choice, task=model.task, sequence_length=tokens, **named)
    several = [f"--nnodes={cluster.nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    words = ["torchrun", *(several if cluster.nodes > 1 else ["--standalone"])]
    words += [f"--nproc_per_node={cluster.ranks_per_node}", entrypoint_of(choice, case.mesh)]
    plain = RunConfig().as_dict()
    for setting, value in config.as_dict().items():
        if value != plain[setting] or (setting in ALWAYS and value is not None):
            words += [flag_name(setting), *[str(value)] * (value is not True)]
    return "uv run " + shlex.join(words)
