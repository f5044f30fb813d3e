"""What the library for aarch64 asks of its C library, beside what Android's has: `make test-arm` calls this.

QUANTMOE_ARM names another folder where CMake has built it.
"""

import io
import os
import re
from pathlib import Path

from elftools.elf.elffile import ELFFile
from support.harness.elf import check_segments

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("QUANTMOE_ARM", ROOT / "build/arm/cmake"))
LIBRARY = (BUILD / "ort_ext/libquantmoe_ort.so").read_bytes()
#: what AOSP's libc.map.txt and libm.map.txt (bionic, March 2025) have for arm64 up to API level 24
BIONIC = set(
    re.findall(
        r"\w+",
        """
__sched_cpucount abort close closedir expf fclose fdopen fflush fgets flock fopen fprintf fputc fputs free
fscanf fseek fstat ftruncate fwrite getauxval getdelim getenv isalnum isupper lseek madvise malloc memchr
memcmp memcpy memmove memset mmap munmap nanosleep open opendir posix_fadvise pread pthread_mutex_lock
pthread_mutex_unlock read readdir realloc rename rewind sched_getaffinity sched_yield snprintf sqrtf sscanf
stat stderr strchr strcmp strerror strlen strncmp strtod strtof strtol strtoll strtoul strtoull syscall unlink
vsnprintf write
""",
    )
)


def undefined(elf: bytes) -> set[str]:
    """Return the names that an object file takes from elsewhere."""
    table = ELFFile(io.BytesIO(elf)).get_section_by_name(".symtab")
    return {symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"}


def of_glibc() -> set[str]:
    """Return the names that the library takes from glibc."""
    file = ELFFile(io.BytesIO(LIBRARY))
    needs, versions = file.get_section_by_name(".gnu.version_r"), file.get_section_by_name(".gnu.version")
    glibc = {aux["vna_other"] for _, found in needs.iter_versions() for aux in found if aux.name.startswith("GLIBC_")}
    symbols = file.get_section_by_name(".dynsym").iter_symbols()
    return {s.name for i, s in enumerate(symbols) if versions.get_symbol(i)["ndx"] in glibc}


def test_segments():
    assert ELFFile(io.BytesIO(LIBRARY)).get_machine_arch() == "AArch64"
    check_segments(LIBRARY)


def test_every_symbol_has_a_replacement():
    """Each name that our objects take from glibc is in bionic or in the page's table.

    Android's C++ runtime is libc++, so what libstdc++ asks of glibc does not count.
    """
    objects = [undefined(path.read_bytes()) for path in BUILD.glob("**/*.o")]
    needed = set.union(*objects) & of_glibc()
    page = (ROOT / "docs/lab/programs.md").read_text(encoding="utf-8").split("## Android")[1]
    rows = re.findall(r"^\| (`__?\w+`.*?|`pthread\w+`) \|", page, re.MULTILINE)
    table = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert needed > {"memcpy", "__errno_location"}
    assert {name for name in needed - BIONIC if name.replace("__isoc23_", "__isoc99_") not in table} == set()
    assert not table & BIONIC
