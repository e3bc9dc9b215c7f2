"""Command line: ``python -m fusedstep COMMAND``."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

import fusedstep
from fusedstep.memory import command, gain


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")


def main() -> None:
    parser = _Parser(
        prog="python -m fusedstep",
        description=re.sub(r"^>>> ", "    ", fusedstep.__doc__, flags=re.MULTILINE),
        epilog="python -m fusedstep.galore checks and times GaLore's step of one matrix.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=fusedstep.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="tell what was found on this machine, and what costs speed")
    memory = commands.add_parser("memory", help="tell what a training run needs in memory")
    command.add_arguments(memory)
    gains = commands.add_parser("gain", help="time steps beside torch's, and tell what is gained")
    gain.add_arguments(gains)
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        fusedstep.doctor()
        return
    module, parser = (command, memory) if arguments.command == "memory" else (gain, gains)
    try:
        module.run(arguments)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
