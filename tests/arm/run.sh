#!/bin/bash
# The Arm tests, on any Debian machine: builds the aarch64 wheel with g++-aarch64-linux-gnu and runs under qemu-user
#   1. kleidiai_order: FORMAT.md as scalar code against KleidiAI's packers, quantizer and kernels
#   2. digest.py here and there: every case of tests/support/operators/cases.py gives the same bytes on both machines
#   3. model.py here and there, when MODEL names an exported folder: greedy tokens and KL divergence
#   4. pytest ARGS (default: the layout and kernel tests) on the aarch64 wheel, with CPU (default neoverse-n2)
# and counts the instructions of products of every format.
# `run.sh golden` writes tests/golden anew instead. Everything lands in build/arm; PYTHON is the host's, with quantmoe installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} dir=$PWD/build/arm
command -v aarch64-linux-gnu-g++ >/dev/null || { echo "run.sh: apt-get install g++-aarch64-linux-gnu" >&2; exit 1; }
tests/arm/sysroot.sh "$dir"
# Not -cpu max: NumPy would take SME matrix products, which qemu 10 gets wrong.
qemu=("$dir/host/usr/bin/qemu-aarch64" -cpu "${CPU:-neoverse-n2}" -L "$dir/arm64")
program() {  # source, name, objects and flags
  aarch64-linux-gnu-g++ -std=c++20 -O2 -Wall -Wextra -ffp-contract=off -static -I"$dir/arm64/usr/include/aarch64-linux-gnu" \
    -Itests/arm "$1" "${@:3}" "$dir/arm64/usr/lib/aarch64-linux-gnu/libkleidiai.a" -o "$dir/$2"
}

if [ "${1:-}" = golden ]; then
  program tests/golden/generate/kleidiai.cc golden
  exec "$python" tests/golden/generate/generate.py "${qemu[@]}" "$dir/golden"
fi

program tests/arm/kleidiai_order.cc kleidiai_order
"${qemu[@]}" "$dir/kleidiai_order" "${KLEIDIAI_CASES:-200}"

# make's UV_CONSTRAINT has their hashes, and no hash of a name without a version.
[ -e "$dir/site/numpy" ] || UV_REQUIRE_HASHES=false "$(dirname "$python")/uv" pip install --quiet --target "$dir/site" --only-binary :all: \
  --python-version 3.13 --python-platform aarch64-manylinux_2_28 \
  numpy ml_dtypes onnx-ir safetensors blake3 typer rich onnxruntime pytest hypothesis
rm -rf "$dir/wheel" "$dir/site/quantmoe"
_PYTHON_HOST_PLATFORM=linux-aarch64 "$python" -m pip wheel -q . --no-build-isolation --no-deps -w "$dir/wheel" --config-settings build-dir="$dir/cmake" \
  --config-settings cmake.define.CMAKE_TOOLCHAIN_FILE="$PWD/tests/arm/aarch64.cmake" --config-settings cmake.define.CMAKE_PREFIX_PATH="$dir/arm64/usr"
"$python" -m zipfile -e "$dir"/wheel/*.whl "$dir/site"
# A program that is its own sys.executable, so that tests can start another.
cat >"$dir/python" <<END
#!/bin/bash
PYTHONHOME=$dir/arm64/usr PYTHONPATH=$dir/site:\$PYTHONPATH exec ${qemu[*]} -0 "\$0" "$dir/arm64/usr/bin/python3.13" "\$@"
END
chmod +x "$dir/python"

program tests/arm/count.cc count "$dir"/cmake/custom_ops/CMakeFiles/quantmoe_core.dir/src/{*,*/*}/*.o \
  -DQM_KLEIDIAI -Icustom_ops -Icustom_ops/src -Icustom_ops/include
"$python" tests/arm/instructions.py "$dir"

kernels=(panel_kleidiai panel_neon_i8mm panel_neon_dotprod panel_portable)
"$python" tests/arm/digest.py >"$dir/digests.host"
"$dir/python" tests/arm/digest.py "${kernels[@]}" >"$dir/digests.arm"
diff "$dir/digests.host" "$dir/digests.arm"
echo "$(wc -l <"$dir/digests.arm") cases give the same bytes here and on aarch64 with each of ${kernels[*]}"

if [ -n "${MODEL:-}" ]; then
  "$python" tests/arm/model.py "$MODEL" >"$dir/model.host"
  "$dir/python" tests/arm/model.py "$MODEL" >"$dir/model.arm"
  "$python" tests/arm/model.py "$MODEL" "$dir/model.host" "$dir/model.arm"
fi

[ $# -gt 0 ] || set -- tests/layouts tests/kernels
"$dir/python" -m pytest -p no:cacheprovider "$@"
