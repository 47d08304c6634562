"""The ranks of these tests, a line for each case as it ends, and the page that a user sends."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.commands.check_gpu import PARTS
from tests.on_gpu.place import Place, gist
from tests.ranks import RankPool

HOLDS, FAILS, SKIPPED, MEASURED = "pass", "FAIL", "skipped", "measured"


@dataclass
class CaseReport:
    """How a case of a part went."""

    part: str
    name: str
    how: str
    line: str
    rows: Sequence[Mapping[str, str]] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


class Page:
    """Follows the tests, and writes report.md after each, so that a lost machine loses little."""

    def __init__(self, place: Place, write: Callable[[str], None]) -> None:
        self.place, self.write, self.began = place, write, time.monotonic()
        self.cases: list[CaseReport] = []
        write(place.named)

    def add(self, part: str, name: str, report: pytest.TestReport) -> None:
        place = self.place
        how = {"failed": FAILS, "skipped": SKIPPED}.get(report.outcome, MEASURED if place.measures else HOLDS)
        line, texts = place.line, dict(place.texts)
        if how == SKIPPED and isinstance(report.longrepr, tuple):
            line = report.longrepr[2].removeprefix("Skipped: ")
        if how == FAILS:
            crash = getattr(report.longrepr, "reprcrash", None)
            line = " ".join((crash.message if crash else str(report.longrepr)).split())[:300]
            texts |= {"traceback": report.longreprtext}
            texts |= {str(log.relative_to(place.folder)): gist(log) for log in place.logs}
        self.cases.append(CaseReport(part, name, how, line, list(place.rows), texts))
        self.write(f"{how:<9} {name:<40} {report.duration:5.0f} s  {line}")
        (place.folder / "report.md").write_text(self.text())

    def text(self) -> str:
        """All cases as Markdown, with the tables behind them."""
        minutes = (time.monotonic() - self.began) / 60
        parts = list(dict.fromkeys(case.part for case in self.cases))
        summary = []
        for part in parts:
            cases = [case for case in self.cases if case.part == part]
            counts = Counter(case.how for case in cases)
            lines = [case.line for case in cases if case.line and (len(cases) == 1 or case.how == FAILS)]
            how = FAILS if counts[FAILS] else cases[-1].how
            counted = ", ".join(f"{count} {how}" for how, count in counts.items()) if len(cases) > 1 else ""
            summary.append({"part": part, "verdict": how, "": "; ".join([*[counted] * bool(counted), *lines])})
        blocks = [
            "# GPU check",
            f"{self.place.named}. {len(self.cases)} cases in {minutes:.0f} minutes. "
            "Logs and tables are in the folder of this page.",
            table(summary),
        ]
        for part in parts:
            cases = [case for case in self.cases if case.part == part]
            rows = [row for case in cases for row in case.rows]
            texts = {heading: text for case in cases for heading, text in case.texts.items()}
            blocks += [f"## {part}"] * bool(rows or texts) + ([table(rows)] if rows else [])
            for heading, text in texts.items():
                blocks += [f"{heading}:", "\n".join(f"    {line}" for line in text.splitlines()) or "(empty)"]
        return "\n\n".join(blocks) + "\n"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines
    )


PLACE, PAGE = pytest.StashKey[Place](), pytest.StashKey[Page]()


def part_of(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name).removeprefix("test_")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of these tests those of `--only`, in the order in which a user wants to know."""
    only, order = config.getoption("--only"), list(PARTS)
    if only is not None:
        items[:] = [item for item in items if part_of(item) in only.split(",")]
        items.sort(key=lambda item: order.index(part_of(item)))


def pytest_sessionstart(session: pytest.Session) -> None:
    options, folder = session.config.option, session.config.getoption("--check-folder")
    if folder is not None:
        place = Place(options.ranks, options.device == "cuda", folder, options.quick, options.share_gpu)
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        session.config.stash[PLACE] = place
        session.config.stash[PAGE] = Page(place, reporter.write_line if reporter else print)


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """No dots between the lines."""
    return (report.outcome, "", "") if PAGE in config.stash else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    page = item.config.stash.get(PAGE, None)
    if page and (report.when == "call" or report.outcome != "passed"):
        page.add(part_of(item), item.name.removeprefix("test_"), report)
    return report


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    options = request.config.option
    alone = Place(options.ranks, options.device == "cuda", tmp_path, True, options.share_gpu)
    where = request.config.stash.get(PLACE, alone)
    where.begin(part_of(request.node))
    return where


@pytest.fixture(scope="session")
def pools(pytestconfig: pytest.Config) -> Iterator[Callable[[str], RankPool]]:
    """Ranks over a backend. Ranks over another backend end before, since they hold memory of the GPUs."""
    by_backend: dict[str, RankPool] = {}

    def pool(backend: str) -> RankPool:
        for running in by_backend:
            if running != backend:
                by_backend[running].close()
        options = pytestconfig.option
        return by_backend.setdefault(backend, RankPool(options.device, backend, options.share_gpu))

    yield pool
    for ranks in by_backend.values():
        ranks.close()


@pytest.fixture
def commands(pools: Callable[[str], RankPool], place: Place) -> Place:
    """Where commands run, which need the GPUs for themselves."""
    pools(place.backends[0]).close()
    return place
