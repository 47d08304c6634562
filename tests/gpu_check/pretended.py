"""A machine with GPUs that only pretends."""

import subprocess

from ddp_lab.gpu_check.parts import Machine


class Pretended(Machine):
    """A machine with GPUs whose commands do nothing, or what `answer` does."""

    commands: list[list[str]]

    def answer(self, log, command):
        return ""

    def run(self, log, command, *_, **__):
        self.commands = [*getattr(self, "commands", []), list(command)]
        output = self.answer(log, command)
        (self.folder / f"{log}.txt").write_text(output)
        return subprocess.CompletedProcess(command, 0, output)
