"""The command `ddp-lab`, also `python -m ddp_lab`."""

import signal
import sys
from collections.abc import Sequence
from itertools import groupby

from ddp_lab.commands import COMMANDS, TRAIN
from ddp_lab.runtime.cli import OneLineParser, unknown_name, versions
from ddp_lab.runtime.process.environment import guard_output

COMPLETION = "completion"
SHELLS = ("bash", "zsh", "tcsh")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. A mistake is one line on standard error, and code 2."""
    name, *flags = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if arguments is None:
        trains = name in COMMANDS and COMMANDS[name].group == TRAIN
        guard_output(goes_on=trains and not {"-h", "--help"} & {*flags})
    try:
        return run_command(name, flags)
    except KeyboardInterrupt as error:  # or `Stopped`
        return 128 + getattr(error, "number", signal.SIGINT)
    finally:
        sys.stdout.flush()


def run_command(name: str, flags: Sequence[str]) -> int:
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        print(versions())
        return 0
    if name == COMPLETION:
        return print_completion(flags)
    if name not in COMMANDS:
        OneLineParser("ddp-lab").error(unknown_name("command", name, (*COMMANDS, COMPLETION)))
    code: int = COMMANDS[name].load().main(flags)
    return code


def help_text() -> str:
    lines = ["usage: ddp-lab COMMAND [flags]", "", "Train one model with many parallel strategies, and compare them."]
    for group, commands in groupby(COMMANDS.items(), key=lambda item: item[1].group):
        lines += ["", f"{group}:"]
        for name, command in commands:
            lines += [f"  {name:<10}  {command.about}", f"  {'':<10}  ddp-lab {name} {command.example}"]
    lines += [
        "",
        f"Flags of a command: ddp-lab COMMAND --help. For your shell: ddp-lab {COMPLETION} {'|'.join(SHELLS)}",
    ]
    return "\n".join(lines)


def print_completion(arguments: Sequence[str]) -> int:
    """Print the script with which a shell completes commands and flags."""
    import shtab

    shell_parser = OneLineParser(
        f"ddp-lab {COMPLETION}", description="Print the script with which a shell completes commands."
    )
    shell_parser.add_argument("shell", choices=SHELLS)
    shell, parser = shell_parser.parse_args(arguments).shell, OneLineParser("ddp-lab")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        flags = command.load().build_parser()
        commands.add_parser(name, help=command.about, parents=[flags], add_help=False)
    print(shtab.complete(parser, shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
