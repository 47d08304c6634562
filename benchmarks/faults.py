"""Plant every fault in every choice, and write down what the user sees: python benchmarks/faults.py [--choices NAMES]

Each run is two real ranks under torchrun over Gloo. The table goes to standard output as Markdown, and into a CSV file.
Exit code 1 if any run did not end as it must.
"""

import argparse
import csv
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ddp
import sharding
from tests.faults.scenarios import SCENARIOS, Outcome, Scenario, run_scenario
from training.cli import OneLineParser, unknown_name

COLUMNS = ("scenario", "choice", "fault", "survived", "seconds", "exit_code", "how", "steps", "traces", "message")


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = (*ddp.CHOICES, *sharding.REGISTRY.names)
    parser.add_argument("--choices", default=",".join(known), help="with commas between (default: all that can run)")
    parser.add_argument("--scenarios", default="", help="only those with one of these texts in their names")
    parser.add_argument("--csv", type=Path, help="also write a row a run here")
    options = parser.parse_args()
    choices = options.choices.split(",")
    for choice in choices:
        if choice not in known:
            parser.error(unknown_name("strategy", choice, known))
    parts = options.scenarios.split(",")
    scenarios = [scenario for scenario in SCENARIOS if any(part in scenario.name for part in parts)]
    if not scenarios:
        parser.error(unknown_name("scenario", options.scenarios, [scenario.name for scenario in SCENARIOS]))
    rows, failures = [], 0
    for scenario in scenarios:
        for choice in choices:
            if not scenario.fits(choice):
                continue
            with tempfile.TemporaryDirectory(prefix="ddp-lab-faults-") as folder:
                outcome = run_scenario(scenario, choice, Path(folder))
            problems = outcome.problems(scenario)
            failures += bool(problems)
            rows.append(row(scenario, choice, outcome, not problems, folder))
            said = f"FAILED: {'; '.join(problems)}" if problems else f"{outcome.seconds:.1f} s"
            print(f"{scenario.name}, {choice}: {said}", file=sys.stderr, flush=True)
            if options.csv:
                write(options.csv, rows)
    print(markdown(rows))
    print(f"{len(rows)} runs (scenarios x choices), {len(rows) - failures} ended as they must")
    return 1 if failures else 0


def row(scenario: Scenario, choice: str, outcome: Outcome, survived: bool, folder: str) -> dict[str, object]:
    record = outcome.record or {}
    return {
        "scenario": scenario.name,
        "choice": choice,
        "fault": scenario.plan,
        "survived": survived,
        "seconds": round(outcome.seconds, 1),
        "exit_code": outcome.exit_code,
        "how": record.get("ended", {}).get("how"),
        "steps": len(record.get("train_loss", [])),
        "traces": outcome.traces,
        "message": outcome.errors[0].split("; record: ")[0].replace(folder, ".") if outcome.errors else "",
    }


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def markdown(rows: list[dict[str, object]]) -> str:
    """A row a scenario: of all choices the longest time, and the message of the first."""
    lines = ["| scenario | injected | what the user sees | longest time to the end | kept | ended as it must |"]
    lines.append("|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["scenario"] for row in rows):
        same = [row for row in rows if row["scenario"] == name]
        first, survived = same[0], sum(bool(row["survived"]) for row in same)
        kept = f"{first['steps']} steps, {first['traces']} traces"
        longest = max(float(str(row["seconds"])) for row in same)
        message = str(first["message"]).removeprefix("error: ") or "nothing: it trains to its end"
        cells = (name, f"`{first['fault']}`", message, f"{longest:.1f} s", kept, f"{survived} of {len(same)}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
