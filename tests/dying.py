"""A process that leaves a board behind. Imports no torch, which takes seconds."""

import signal
from typing import Any

from training.watch.board import Board


def keep_a_board_and_wait(paths: Any) -> None:
    """Be in step 7 in a broadcast, tell where the board is, and wait to be killed."""
    board = Board.make(rank=3)
    board.set_place(7, "backward")
    board.complete(board.add(1, b"all_reduce", 10, b"float32", b"ranks 0,1", -1, 2))
    board.set_waiting(board.add(2, b"broadcast", 4, b"int64", b"ranks 0,1", 0, 0))
    paths.put(str(board.path))
    signal.pause()
