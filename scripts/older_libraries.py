#!/usr/bin/env python3
"""Write what a linker needs to build libraries for systems with an older glibc than this one's.

    older_libraries.py FOLDER POLICY        POLICY: as manylinux_2_28; -L FOLDER uses them

A linker binds a symbol to the newest version that a library has. The libraries written here stand
for libc, libm and others and have no code, but the symbols of this system's with the versions that
a policy allows, as auditwheel knows them. What is newer in libstdc++ is taken from its archive.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies

CXX = os.environ.get("CXX", "g++")

#: Libraries that auditwheel's policies allow, and g++ links with or once was asked to.
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libstdc++.so.6")

#: libstdc++'s headers look at __libc_single_threaded, which glibc has since 2.32: one that says no
#: is always right.
OLDER = """
    .hidden __libc_single_threaded
    .globl __libc_single_threaded
    .type __libc_single_threaded, %object
    .size __libc_single_threaded, 1
    .bss
__libc_single_threaded:
    .zero 1
    .section .note.GNU-stack,"",%progbits
"""

#: The section of a symbol of each type, and its type in assembly.
SECTIONS = {
    "FUNC": ('.section .text,"ax",%progbits', "%function"),
    "OBJECT": ('.section .data,"aw",%progbits', "%object"),
    "TLS": ('.section .tdata,"awT",%progbits', "%tls_object"),
}


def run(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def found(name: str) -> Path:
    """The compiler's file of this name."""
    path = Path(run(CXX, f"-print-file-name={name}").strip())
    if not path.is_absolute():
        raise FileNotFoundError(name)
    return path.resolve()


def order(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def exported(library: Path, allowed: frozenset[str]) -> dict[str, tuple[str, tuple[str, str]]]:
    """Newest allowed version of each symbol, and its lines of SECTIONS."""
    symbols: dict[str, tuple[str, tuple[str, str]]] = {}
    for line in run("readelf", "--dyn-syms", "--wide", library).splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] == "UND" or "@" not in fields[7]:
            continue
        name, _, version = fields[7].replace("@@", "@").partition("@")
        if version in allowed and name != version:
            known = symbols.get(name)
            if known is None or order(version) > order(known[0]):
                symbols[name] = (version, SECTIONS.get(fields[3], SECTIONS["FUNC"]))
    return symbols


def write_library(folder: Path, name: str, allowed: frozenset[str]) -> None:
    symbols = exported(found(name), allowed)
    assembly = ['.section .note.GNU-stack,"",%progbits']
    for index, (symbol, (version, (section, kind))) in enumerate(symbols.items()):
        label = f"symbol_{index}"
        assembly += [section, f".globl {label}", f".type {label}, {kind}", f"{label}: .byte 0"]
        assembly += [f".symver {label}, {symbol}@@{version}"]
    source, script = folder / f"{name}.s", folder / f"{name}.map"
    source.write_text("\n".join(assembly) + "\n")
    nodes = [f"{version} {{ }};" for version in {version for version, _ in symbols.values()}]
    script.write_text("\n".join([*nodes, "older_libraries { local: *; };"]) + "\n")
    shared = ("-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script,{script}")
    run(CXX, *shared, "-o", folder / name, source)


def write_archive(folder: Path) -> None:
    source, made = folder / "older.s", folder / "older.o"
    source.write_text(OLDER)
    run(CXX, "-c", "-o", made, source)
    run("ar", "rcs", folder / "libolder.a", made)


def write_scripts(folder: Path) -> None:
    """The files that -lm and others find."""
    for library in LIBRARIES:
        name = library.partition(".")[0]
        (folder / f"{name}.so").write_text(f"INPUT ({folder / library})\n")
    system, older = found("libc.so").read_text(), folder / "libolder.a"
    # Since 2.34 glibc has in libc what was in libdl and libpthread.
    names = ("libc.so.6", "libdl.so.2", "libpthread.so.0")
    instead = " ".join(str(folder / name) for name in names)
    text, count = re.subn(r"\S+/libc\.so\.6", f"{instead} {older}", system)
    assert count == 1, system
    (folder / "libc.so").write_text(text)
    (folder / "libstdc++.so").write_text(
        f"INPUT ({folder / 'libstdc++.so.6'} {found('libstdc++.a')} {older})\n"
    )


def main() -> None:
    folder, policy = Path(sys.argv[1]).resolve(), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    policies = WheelPolicies(libc=Libc.GLIBC, arch=Architecture.detect())
    versions = policies.get_policy_by_name(policy).symbol_versions
    allowed = frozenset(
        f"{family}_{number}" for family, numbers in versions.items() for number in numbers
    )
    for name in LIBRARIES:
        write_library(folder, name, allowed)
    write_archive(folder)
    write_scripts(folder)


if __name__ == "__main__":
    main()
