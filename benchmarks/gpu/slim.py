"""Makes a CUDA library small enough to carry along: keeps the machine code of one architecture.

The code of other GPUs, and what only a linker needs, becomes zeros, and the file is compressed. Every
table stays where it is, so that the library loads as before; on another GPU its kernels are not there.

    slim.py libnccl.so.2 bin/libnccl.so.2.xz           # for compute capability 9.0
    slim.py libnccl.so.2 bin/libnccl.so.2.xz --arch 100
"""

from __future__ import annotations

import argparse
import lzma
import struct
from pathlib import Path

# What a container of code for several GPUs begins with, and its header: a number, its version, the
# bytes of the header, and those of what follows.
MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
# An entry's kind (2 is machine code), its version, the bytes of its header and of its code, and
# where in the header the architecture stands.
ENTRY = struct.Struct("<HHIQ")
MACHINE_CODE = 2
ARCHITECTURE_AT = 28


class Malformed(Exception):
    """A file that is no library as it is expected here."""


def sections(library: bytes) -> dict[str, tuple[int, int]]:
    """Name, offset and size of the sections of a 64-bit ELF file."""
    if library[:5] != b"\x7fELF\x02":
        raise Malformed("it is no 64-bit ELF file")
    table, = struct.unpack_from("<Q", library, 0x28)
    size, n, names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(n)]
    text = rows[names][4]
    found = {}
    for name, _, _, _, offset, length in rows:
        end = library.index(b"\0", text + name)
        found[library[text + name:end].decode()] = (offset, length)
    return found


def slim(library: bytearray, arch: int) -> tuple[int, int]:
    """Clears what is for other GPUs. Returns the bytes of machine code that stay and that went."""
    all_sections = sections(library)
    if ".nv_fatbin" not in all_sections:
        raise Malformed("it has no code for GPUs (.nv_fatbin)")
    if relocatable := all_sections.get("__nv_relfatbin"):
        at, length = relocatable
        library[at:at + length] = bytes(length)
    at, length = all_sections[".nv_fatbin"]
    end, kept, gone = at + length, 0, 0
    while at + CONTAINER.size <= end:
        magic, _, header, body = CONTAINER.unpack_from(library, at)
        if magic != MAGIC:
            at += 8  # Padding between containers.
            continue
        entry, at = at + header, at + header + body
        while entry < at:
            kind, _, skip, size = ENTRY.unpack_from(library, entry)
            of, = struct.unpack_from("<I", library, entry + ARCHITECTURE_AT)
            if skip == 0 or entry + skip + size > at:
                raise Malformed(f"an entry at {entry:#x} is not of this form")
            if (kind, of) == (MACHINE_CODE, arch):
                kept += size
            else:
                library[entry + skip:entry + skip + size] = bytes(size)
                gone += size
            entry += skip + size
    if kept == 0:
        raise Malformed(f"it has no machine code for sm_{arch}")
    return kept, gone


def main() -> None:
    parser = argparse.ArgumentParser(description="Keeps a library's code for one GPU.")
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path, help="compressed by xz")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten")
    args = parser.parse_args()
    try:
        library = bytearray(args.library.read_bytes())
        kept, gone = slim(library, args.arch)
    except (OSError, Malformed, struct.error, ValueError, IndexError) as e:
        raise SystemExit(f"{args.library}: {e}") from e
    args.out.write_bytes(lzma.compress(library, preset=2))
    print(f"{args.out}: {args.out.stat().st_size >> 20} MiB, {kept >> 20} MiB of machine code for "
          f"sm_{args.arch}, without {gone >> 20} MiB for others")


if __name__ == "__main__":
    main()
