"""What a Linux library asks of the system that loads it."""

from __future__ import annotations

import io

from elftools.elf.elffile import ELFFile

#: bytes of a page on systems with large ones, Android 15 among them
LARGEST_PAGE = 16384
#: bytes that each thread of a program may hold for a library
THREAD_LOCAL = 4096


def check_segments(library: bytes, thread_local: int = THREAD_LOCAL) -> None:
    """Segments can be loaded where pages are large, and no thread pays for more than a few variables."""
    segments = list(ELFFile(io.BytesIO(library)).iter_segments())
    loaded = [s for s in segments if s["p_type"] == "PT_LOAD"]
    assert loaded
    for segment in loaded:
        assert segment["p_align"] % LARGEST_PAGE == 0, segment.header
        assert (segment["p_vaddr"] - segment["p_offset"]) % LARGEST_PAGE == 0, segment.header
    assert sum(s["p_memsz"] for s in segments if s["p_type"] == "PT_TLS") <= thread_local


def newest_glibc(library: bytes) -> tuple[int, ...]:
    """Return the newest version of the C library whose functions a library calls."""
    section = ELFFile(io.BytesIO(library)).get_section_by_name(".gnu.version_r")
    names = [version.name for _, versions in section.iter_versions() for version in versions]
    return max(tuple(map(int, name.split("_")[1].split("."))) for name in names if name.startswith("GLIBC_"))
