"""Simulations side by side, in processes of their own."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

from planner.plan import Case, Outcome, outcome
from planner.simulate import simulate
from planner.sources import costs_of
from training.errors import UserError

Task = tuple[Case, str]
Answer = TypeVar("Answer")


def whole(outcome: Outcome) -> Outcome:
    return outcome


def simulations(tasks: Iterable[Task], jobs: int | None, answer: Callable[[Outcome], Answer]) -> Iterator[Answer]:
    """What is asked of the outcome of each case and choice, in their order.

    Args:
        tasks: Asked for one by one, `jobs` ahead of what has been answered: what makes them may stop when it wants.
        jobs: Processes; with one, all is done in this one. None: one for each core.
        answer: What to make of an outcome, in the process that simulates it.
    """
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield from (one(task, answer) for task in tasks)
        return
    # Forked, since a fresh process would load torch and transformers anew, for longer than most simulations last.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        begun: deque[Future[Answer]] = deque()
        try:
            for task in tasks:
                begun.append(pool.submit(one, task, answer))
                if len(begun) > jobs:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def one(task: Task, answer: Callable[[Outcome], Answer]) -> Answer:
    case, choice = task
    try:
        costs = costs_of(case)
    except UserError as error:  # of a setting on the page's sliders; those of the plan itself are known to have costs
        return answer(Outcome(choice, None, str(error)))
    return answer(
        outcome(
            case,
            choice,
            lambda setting: simulate(setting, case.cluster, costs.operators, costs.collectives, costs.contention),
        )
    )
