"""Command line: ``python -m fusedstep doctor``."""

from __future__ import annotations

import argparse
import re

import fusedstep


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fusedstep",
        description=re.sub(r"^>>> ", "    ", fusedstep.__doc__, flags=re.MULTILINE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=fusedstep.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="tell what was found on this machine, and what costs speed")
    parser.parse_args()
    fusedstep.doctor()


if __name__ == "__main__":
    main()
