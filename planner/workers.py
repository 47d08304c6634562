"""Simulations side by side, in processes of their own."""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

from planner.plan import Case, Outcome, outcome
from planner.simulate import simulate
from planner.sources import costs_of

Task = tuple[Case, str]


def simulations(tasks: Iterable[Task], jobs: int) -> Iterator[Outcome]:
    """The outcome of each case and choice, in their order.

    Args:
        tasks: Asked for one by one, `jobs` ahead of what has been answered: what makes them may stop when it wants.
        jobs: Processes; with one, all is done in this one.
    """
    if jobs == 1:
        yield from map(one, tasks)
        return
    # Forked, since a fresh process would load torch and transformers anew, for longer than most simulations last.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        begun: deque[Future[Outcome]] = deque()
        try:
            for task in tasks:
                begun.append(pool.submit(one, task))
                if len(begun) > jobs:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def one(task: Task) -> Outcome:
    case, choice = task
    costs = costs_of(case)
    return outcome(
        case,
        choice,
        lambda setting: simulate(setting, case.cluster, costs.operators, costs.collectives, costs.contention),
    )
