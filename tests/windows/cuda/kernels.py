"""List the kernels of Windows' CUDA libraries: the size of their fatbin, their name, the bytes of their parameters.

usage: kernels.py FOLDER: of the host's objects and their fatbins. Fails where the host's code has a kernel that is not
in its fatbin.
"""

import ctypes
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def images(fatbin: bytes) -> Iterator[bytes]:
    """Yield the ELF files of a fatbin; nvcc compresses those above some MB by zstd."""
    at, end = 16, 16 + struct.unpack_from("<Q", fatbin, 8)[0]
    while at < end:
        kind, _, header, size, packed = struct.unpack_from("<HHIQI", fatbin, at)
        flags, unpacked = struct.unpack_from("<Q8xQ", fatbin, at + 40)
        payload = fatbin[at + header : at + header + size]
        if flags & 0x8000:
            out = ctypes.create_string_buffer(unpacked)
            unpack = ctypes.CDLL("libzstd.so.1").ZSTD_decompress
            unpack.restype = ctypes.c_size_t
            got = unpack(out, ctypes.c_size_t(unpacked), payload, ctypes.c_size_t(packed))
            if got != unpacked:
                sys.exit(f"zstd gives {got} bytes, expected {unpacked}")
            payload = out.raw
        if kind == 2:
            yield payload
        at += header + size


def parameters(image: bytes) -> dict[str, int]:
    """Return the kernels of an ELF file, and the bytes of their parameter; each has one."""
    offset, size, count, names_at = struct.unpack_from("<40xQ10x3H", image)
    sections = [struct.unpack_from("<I20xQQ", image, offset + i * size) for i in range(count)]
    names, found = sections[names_at][1], {}
    for name, at, length in sections:
        text = image[names + name : image.index(b"\0", names + name)].decode()
        if text.startswith(".nv.info."):
            end = at + length
            while at < end:
                form, attribute, value = struct.unpack_from("<BBH", image, at)
                if attribute == 0x17:  # EIATTR_KPARAM_INFO; its last 14 bits are the size
                    found[text.removeprefix(".nv.info.")] = struct.unpack_from("<I", image, at + 12)[0] >> 18
                at += 4 + (value if form == 4 else 0)
    return found


def on_host(obj: Path) -> set[str]:
    """Return the kernels that host code may launch, by their stubs."""
    said = subprocess.run(["nm", obj], check=True, capture_output=True, text=True).stdout
    stubs = re.findall(r"\b_Z\w*?\d+__device_stub__\w+", said)
    return {re.sub(r"(\d+)__device_stub__", lambda m: str(int(m[1]) - 15), stub) for stub in stubs}


if __name__ == "__main__":
    count = 0
    for obj in sorted(Path(sys.argv[1]).rglob("*.cu.obj")):
        fatbin = Path(f"{obj}.fatbin").read_bytes()
        found = {name: size for image in images(fatbin) for name, size in parameters(image).items()}
        if strange := on_host(obj) - found.keys():
            sys.exit(f"{obj}: the fatbin lacks {', '.join(sorted(strange))}")
        count += len(on_host(obj))
        for name, size in found.items():
            print(len(fatbin), name, size)
    print(f"{count} kernels of the host's code are in their fatbins", file=sys.stderr)
