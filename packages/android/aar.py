"""Writes OUT, an Android library (AAR), of the classes in JAR and the native libraries JNI/arm64-v8a/*.so.

usage: aar.py JAR JNI OUT, after these commands with the NDK in ANDROID_NDK, which were never run:

    make jar
    cmake -S . -B build/android -DCMAKE_TOOLCHAIN_FILE=$ANDROID_NDK/build/cmake/android.toolchain.cmake \\
      -DANDROID_ABI=arm64-v8a -DANDROID_PLATFORM=34 -DORT_INCLUDE_DIR=HEADERS
    cmake --build build/android --target quantmoe_ort
    mkdir -p build/jni/arm64-v8a
    cp build/android/ort_ext/libquantmoe_ort.so build/jni/arm64-v8a
    python packages/android/aar.py build/java/quantmoe-0.1.0.jar build/jni build/quantmoe.aar
"""

import io
import re
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ABI = "arm64-v8a"
#: ELF has the machine at byte 18
AARCH64 = rb"\x7fELF.{14}\xb7\0"
LICENCES = ("LICENSE", "THIRD_PARTY_NOTICES.txt")


def classes(jar: Path) -> bytes:
    """Return a jar without the libraries for other systems."""
    made = io.BytesIO()
    with zipfile.ZipFile(jar) as archive, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in archive.infolist():
            if not entry.is_dir() and not entry.filename.startswith("quantmoe/native/"):
                out.writestr(entry, archive.read(entry), zipfile.ZIP_DEFLATED)
    return made.getvalue()


def write(jar: Path, jni: Path, out: Path) -> None:
    """Write the AAR. Its entries have the date of the jar's.

    Raises:
        SystemExit: there is no library, or one for another machine.
    """
    libraries = sorted((jni / ABI).glob("*.so"))
    if "libquantmoe_ort.so" not in [library.name for library in libraries]:
        sys.exit(f"{jni / ABI} has no libquantmoe_ort.so")
    parts = {
        "AndroidManifest.xml": (HERE / "AndroidManifest.xml").read_bytes(),
        "R.txt": b"",
        "classes.jar": classes(jar),
    }
    for library in libraries:
        parts[f"jni/{ABI}/{library.name}"] = library.read_bytes()
        if not re.match(AARCH64, parts[f"jni/{ABI}/{library.name}"], re.DOTALL):
            sys.exit(f"{library}: expected an ELF file for aarch64")
    with zipfile.ZipFile(jar) as archive, zipfile.ZipFile(out, "w") as aar:
        parts |= {name: archive.read(f"META-INF/{name}") for name in LICENCES}
        for name, data in parts.items():
            aar.writestr(zipfile.ZipInfo(name, archive.infolist()[0].date_time), data, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
