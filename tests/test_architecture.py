"""Which rooms import which: arrows point one way, and reading one strategy loads little else."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARALLEL = tuple(f"{kind}_parallel" for kind in ("tensor", "pipeline", "context", "expert"))
ROOMS = ("ddp_lab", "ddp", "sharding", *PARALLEL, "reference")
STRATEGIES = ROOMS[1:]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}
SHARED = ("ddp_lab.runtime.errors", "ddp_lab.runtime.config", "ddp_lab.runtime.settings")
MOST_MODULES = 12
OF_NUMBERS = {"arange", "randint", "randperm", "tensor"}
MAKES_TENSORS = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"} | OF_NUMBERS
"""Functions of torch that read its default device; and its default dtype, unless they are given whole numbers."""


def imported(source):
    """All that `source` imports, also within functions and for types alone: modules, and names within modules."""
    imports = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imports |= names if names <= FILES.keys() else {node.module, *names}
    return imports


IMPORTED = {name: imported(path.read_text()) for name, path in FILES.items()}
GRAPH = {name: (names & FILES.keys()) - {name} for name, names in IMPORTED.items()}


def within(name, *rooms):
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def arrows(start, *ends):
    """The imports from the room `start` into one of `ends`, as text."""
    return {
        f"{name} -> {target}"
        for name, targets in GRAPH.items()
        if within(name, start)
        for target in targets
        if within(target, *ends)
    }


def test_modules_import_each_other_in_no_circle():
    TopologicalSorter(GRAPH).prepare()  # its error names them


def below(names):
    """These modules, and all that they import."""
    modules = set(names)
    while imports := {target for name in modules for target in GRAPH[name]} - modules:
        modules |= imports
    return modules


LEAVES = below(arrow.split(" -> ")[1] for arrow in arrows("ddp_lab.strategy", "ddp_lab.runtime"))
"""Of the runtime: what the interface needs."""
LAYERS = (
    (
        *LEAVES,
        "ddp_lab.collectives",
        "ddp_lab.machine",
        "ddp_lab.record_format",
        "ddp_lab.record_rows",
        "ddp_lab.progress",
        "ddp_lab.untrusted",
        "ddp_lab.writing",
    ),
    ("ddp_lab.strategy",),
    ("ddp_lab.runtime", "ddp_lab.pretended"),
    STRATEGIES,
    tuple(f"ddp_lab.{name}" for name in ["families", "choices", "analysis", "sweep", "parity", "planner", "doctor"]),
    ("ddp_lab",),
)
"""From low to high. A module is in the first layer that names it or a package around it."""


def layer_of(name):
    return next(number for number, rooms in enumerate(LAYERS) if within(name, *rooms))


def test_no_arrow_points_upwards():
    """Imports of `ddp_lab` itself do not count: it imports names lazily. So packages have no circle either."""
    inner = {name: targets - {"ddp_lab"} for name, targets in GRAPH.items() if name != "ddp_lab"}
    arrows = ((name, target) for name, targets in inner.items() for target in targets)
    upwards = [arrow for arrow in arrows if layer_of(arrow[1]) > layer_of(arrow[0])]
    assert upwards == []
    assert "ddp_lab.runtime.errors" in LEAVES and not any(within(name, "ddp_lab.strategy") for name in LEAVES)


def test_reading_traces_needs_neither_the_runtime_nor_ranks():
    """Exceptions are the errors, since a trace that cannot be read is a mistake of the user, and the table of flags."""
    runtime = {arrow.split(" -> ")[1] for arrow in arrows("ddp_lab.analysis", "ddp_lab.runtime")}
    assert {name for name in runtime if not within(name, *SHARED)} == set()
    assert {
        n for n, names in IMPORTED.items() if within(n, "ddp_lab.analysis") and "torch.distributed" in names
    } == set()


def test_a_strategy_alone_loads_few_modules():
    module = "ddp.simple_ddp"
    code = f"import sys, {module}\nprint(*(n for n in sys.modules if n.split('.')[0] in {ROOMS}))"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    loaded = process.stdout.split()
    assert module in loaded
    assert len(loaded) <= MOST_MODULES, sorted(loaded)


def made_by_default(source):
    """Calls that make a tensor on torch's default device or in its default dtype, which a user's script may set."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).partition("torch.")[2] in MAKES_TENSORS:
            keywords = {keyword.arg for keyword in node.keywords}
            name = ast.unparse(node.func).partition("torch.")[2]
            if "device" not in keywords or ("dtype" not in keywords and name not in OF_NUMBERS):
                calls.append(ast.unparse(node))
    return calls


def test_no_tensor_has_the_defaults_of_the_users_script():
    rooms = (*STRATEGIES, "ddp_lab.strategy", "ddp_lab.runtime")
    sources = {name: path.read_text() for name, path in FILES.items() if within(name, *rooms)}
    assert {name: calls for name, source in sources.items() if (calls := made_by_default(source))} == {}
