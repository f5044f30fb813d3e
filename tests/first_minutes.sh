#!/bin/bash
# usage: first_minutes.sh MODEL_FOLDER [WHEEL]: a new user's first minutes, with good and bad input. What README says is typed, in this
# checkout and, with WHEEL, in environments that hold nothing else; every exit code and every line is looked at. MODEL_FOLDER is
# an export with float activations, as `make samples` has one. For a fresh clone: clone, then `make first-minutes` there.
set -uo pipefail
export HF_HUB_OFFLINE=1 # nothing is fetched from the hub
model=$(realpath "$1") wheel=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.."
work=$PWD/build/first-minutes failed=0 ran=0
rm -rf "$work" && mkdir -p "$work"

run() { # COMMAND...: sets code; its output in $work/out and $work/err
  code=0
  "$@" >"$work/out" 2>"$work/err" </dev/null || code=$?
  ran=$((ran + 1))
}
complain() { # WHAT COMMAND...
  printf 'FAILED: %s\n  %s\n  exit code %s\n' "$1" "${*:2}" "$code"
  sed 's/^/  | /' "$work/out" "$work/err"
  failed=1
}
good() { # PATTERN COMMAND...: succeeds, and the pattern is in what it prints
  run "${@:2}"
  { [ $code = 0 ] && { [ ! "$1" ] || grep -qE -- "$1" "$work/out"; }; } || complain "expected exit code 0 and \"$1\"" "${@:2}"
}
bad() { # CODE PATTERN COMMAND...: ends with that exit code, prints nothing but one line on standard error, and that matches
  run "${@:3}"
  { [ $code = "$1" ] && [ ! -s "$work/out" ] && [ "$(wc -l <"$work/err")" = 1 ] && grep -qE -- "$2" "$work/err"; } ||
    complain "expected exit code $1 and only one line, \"$2\"" "${@:3}"
}
section() { echo "$SECONDS s: $*"; }

section "models that an application may meet"
python - "$model" "$work" <<'PYTHON' || exit 1
import json, shutil, subprocess, sys
from pathlib import Path
import numpy as np
import onnx

model, work = map(Path, sys.argv[1:])
plain = subprocess.check_output([sys.executable, "samples/python/generate.py", str(model), "6", "1", "2", "3"], text=True).split()
stop = plain[-1]
(work / "plain").write_text(" ".join(plain[: plain.index(stop) + 1]))

def variant(name, metadata={}, nan=False):
    folder = Path(shutil.copytree(model, work / name))
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for prop in list(proto.metadata_props):
        if prop.key in ("eos_token_id", "context_length"):
            proto.metadata_props.remove(prop)
    onnx.helper.set_model_props(proto, {p.key: p.value for p in proto.metadata_props} | metadata)
    if nan:
        norm = next(t for t in proto.graph.initializer if t.name == "model.norm.weight")
        norm.CopyFrom(onnx.numpy_helper.from_array(np.full(tuple(norm.dims), np.nan, np.float32), norm.name))
    onnx.save(proto, folder / "model.onnx")
    return folder

variant("stops at ends", {"eos_token_id": f"1000000,{stop}", "context_length": "4096"})
variant("context", {"eos_token_id": "1000000", "context_length": "8"})
variant("old")
variant("other", {"identity": "0" * 64})
variant("turns", {"eos_token_id": "1000000", "chat.begin": "You: ", "chat.reply": "\nI: ", "chat.next": ".\nYou: "})
template = variant("talking") / "chat_template.jinja"
template.write_text("{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{{ eos_token }}<assistant> ")
(variant("mistaken") / "chat_template.jinja").write_text("{% form %}")
variant("padded")
for name in ("context", "padded"): # what transformers ignores
    path = work / name / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["truncation"] = {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                            "pad_token": "<unk>"}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
variant("nan", nan=True)
(variant("no_model") / "model.onnx").unlink()
(variant("no_data") / "model.onnx.data").unlink()
data = variant("other_data") / "model.onnx.data"
data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
(variant("bare") / "libquantmoe_ort.so").unlink()
(variant("no_library") / "libquantmoe_ort.so").write_text("not a library\n")
PYTHON

section "samples, all on one folder"
good "^cpp +[0-9 ]+$" samples/compare.sh "$model"
cat "$work/out"

sample() { # COMMAND...: a sample, with good and bad input
  local tokens; tokens=$(cat "$work/plain")
  good "^$tokens *$" "$@" "$work/stops at ends" 16 1 2 3
  good '^[0-9]+ [0-9]+ [0-9]+ *$' "$@" "$work/context" 16 1 2 3 4 5
  good '^[0-9]+( [0-9]+){11} *$' "$@" "$work/old" 12 1 2 3
  while IFS='|' read -r pattern arguments; do
    eval "bad 1 \"\$pattern\" \"\$@\" $arguments"
  done <<'TABLE'
^usage: .* FOLDER COUNT ID\.\.\.$|"$model" 4
^"four": expected a number from 0$|"$model" four 1
^"-1": expected a number from 0$|"$model" 4 -1
^"99999999999999999999": expected|"$model" 4 1 99999999999999999999
^"": expected a number from 0$|"$model" 4 ""
id[x= ]+999999 [im]|"$model" 4 999999
^8 tokens and 1 for the answer do not fit into the model's context of 8 tokens$|"$work/context" 4 1 2 3 4 5 6 7 8
^logits are not finite$|"$work/nan" 4 1
model.onnx|"$work/no_model" 4 1
model.onnx.data|"$work/no_data" 4 1
not the data that this model was exported with.* of model.onnx.data of |"$work/other_data" 4 1
TABLE
}
library_of_the_folder() { # COMMAND...: a sample that takes it from there; Java's comes from its package
  bad 1 'bare/libquantmoe_ort.so: cannot open shared object file' "$@" "$work/bare" 4 1
  bad 1 'libquantmoe_ort.so: file too short' "$@" "$work/no_library" 4 1
}
entries() { # COMMAND...: a sample that sets entries of the session; the library's line in the log, and its errors
  local disk=(--entry quantmoe.experts=disk)
  good "^$(cat "$work/plain") *$" "$@" "${disk[@]}" --entry quantmoe.ram=4000000 "$work/stops at ends" 16 1 2 3
  grep -qE 'experts = disk: memory for [0-9]+ of [0-9]+ experts' "$work/err" || complain "expected the library's line" "$@"
  run "$@" "${disk[@]}" --entry quantmoe.ram=9 "$model" 4 1
  { [ $code = 1 ] && grep -q 'quantmoe.ram is 9, expected at least' "$work/err"; } || complain "expected a refusal" "$@"
  bad 1 '^--entyr: expected --load-state FILE, --save-state FILE or --entry NAME=VALUE$' "$@" --entyr x=y "$model" 4 1
  bad 1 '^--entry bad: expected NAME=VALUE$' "$@" --entry bad "$model" 4 1
  run "$@" --entry quantmoe.expert=disk "$model" 4 1
  { [ $code = 1 ] && grep -q 'no session entry "quantmoe.expert", expected one of' "$work/err"; } || complain "expected a refusal" "$@"
}
saves() { # COMMAND...: a sample that saves the cache; the tokens are printed before that fails
  echo notes >"$work/notes"
  run "$@" --save-state "$work/notes" "$work/stops at ends" 16 1 2 3
  { [ $code = 1 ] && grep -qE "^$(cat "$work/plain") *$" "$work/out" && grep -q 'notes: is there, and is no saved state' "$work/err"; } ||
    complain "expected the tokens and a refusal" "$@"
}
own_library() { # COMMAND...: a sample that prefers a library of one's own
  good '^[0-9]+ *$' "$@" "$work/no_library" 1 1
}
installed=$(python -c 'import quantmoe; print(quantmoe.ort_library_path())')
section "samples/python"
sample python samples/python/generate.py
own_library python samples/python/generate.py
own_library python samples/genai/generate.py
section "samples/cpp"
sample build/samples-cpp/generate
entries build/samples-cpp/generate
saves build/samples-cpp/generate
library_of_the_folder build/samples-cpp/generate
own_library env QUANTMOE_ORT_LIBRARY="$installed" build/samples-cpp/generate
section "samples/java"
sample java -jar samples/java/target/generate.jar
entries java -jar samples/java/target/generate.jar
saves java -jar samples/java/target/generate.jar
bad 1 'nowhere/model.onnx' java -jar samples/java/target/generate.jar nowhere 4 1
# A server: what is not closed grows, 2 MB a time.
cat >"$work/Many.java" <<'JAVA'
import java.nio.file.*;
import quantmoe.*;
public class Many {
  public static void main(String[] args) throws Exception {
    try (Generator model = new Generator(args[0])) {
      long before = 0;
      for (int i = 0; i < 60; i++) {
        if (i == 20) before = megabytes();
        try (TokenCache cache = new TokenCache(model)) {
          for (long id : cache.generate(new long[200], Options.greedy().maxNewTokens(2))) {}
        }
      }
      System.out.println("grown by " + (megabytes() - before) + " MB");
    }
  }
  static long megabytes() throws Exception {
    String line = Files.readAllLines(Path.of("/proc/self/status")).stream().filter(l -> l.startsWith("RssAnon")).findFirst().get();
    return Long.parseLong(line.replaceAll("[^0-9]", "")) / 1024;
  }
}
JAVA
classes=$(echo samples/java/target/*.jar | tr ' ' :)
good '' javac -cp "$classes" -d "$work" "$work/Many.java"
good '^grown by -?[0-9]{1,2} MB$' java -Xmx64m -cp "$classes:$work" Many "$model"
cat "$work/out"
classes=$classes:$work text='Then said the captain of the host,' long=$(head -c 6000 samples/demo_model/heldout.txt)
ids_of() { # TEXT: all of its tokens
  python -c 'import sys; from tokenizers import Tokenizer; print(*Tokenizer.from_file(sys.argv[1]).encode(sys.argv[2]).ids)' \
    "$model/tokenizer.json" "$1"
}
continued() { # TEXT: what follows it
  python - "$model" "$1" <<'PYTHON'
import subprocess, sys
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(f"{sys.argv[1]}/tokenizer.json")
ids = tokenizer.encode(sys.argv[2]).ids
new = subprocess.check_output([sys.executable, "samples/python/generate.py", sys.argv[1], "24", *map(str, ids)], text=True)
print(tokenizer.decode([*ids, *map(int, new.split())])[len(tokenizer.decode(ids)) :])
PYTHON
}
read -ra tokens <<<"$(ids_of "$long")"
[ ${#tokens[@]} -gt 1023 ] || complain "expected more than 1,023 tokens" ids_of
continued=$(continued "$text") continued_long=$(continued "$long")
# A conversation: both answers as one prompt with all that was said before them would have.
answers=$(python - "$work/turns" <<'PYTHON'
import subprocess, sys
from tokenizers import Tokenizer

tokenizer, ids = Tokenizer.from_file(f"{sys.argv[1]}/tokenizer.json"), []
for text in ("You: Who are you?\nI: ", ".\nYou: Whence?\nI: "):
    ids += tokenizer.encode(text, add_special_tokens=False).ids
    new = subprocess.check_output([sys.executable, "samples/python/generate.py", sys.argv[1], "12", *map(str, ids)], text=True)
    print(tokenizer.decode(ids + (answer := [*map(int, new.split())]))[len(tokenizer.decode(ids)) :])
    ids += answer
PYTHON
)
texts() { # COMMAND...: a sample that takes text, and a line for each message
  local program=("$@")
  for folder in "$model" "$work/padded"; do # a tokenizer.json that truncates and pads, too
    good '' "$@" "$folder" 24 "$text"
    [ "$(cat "$work/out")" = "$continued" ] || complain "expected \"$continued\"" "$@"
    good '' "$@" "$folder" 24 "$long"
    [ "$(cat "$work/out")" = "$continued_long" ] || complain "expected \"$continued_long\"" "$@"
  done
  bad 1 "^${#tokens[@]} tokens and 1 for the answer do not fit into the model's context of 8 tokens$" "$@" "$work/context" 24 "$long"
  bad 1 '^usage: .*[Tt]ext FOLDER COUNT \[TEXT\]$' "$@" "$model"
  bad 1 'the model has no chat template' "$@" "$model" 24
  bad 1 'nowhere/model.onnx' "$@" nowhere 24 "$text"
  bad 1 '^the prompt has no tokens$' "$@" "$model" 24 ""
  cancelled() { "${program[@]}" "$1" 1000000 "$text" <<<""; } # Enter, as it begins
  good '' cancelled "$work/old"
  [ "$(wc -c <"$work/out")" -lt 2000 ] || complain "expected an early end" cancelled
  talk() { printf 'Who are you?\nWhence?\n' | "${program[@]}" "$work/turns" 12; }
  good '' talk
  [ "$(cat "$work/out")" = "$answers" ] || complain "expected \"$answers\"" talk
}
texts java -cp "$classes" Text
cat >"$work/Printed.java" <<'JAVA'
import java.util.List;
import quantmoe.*;
public class Printed {
  public static void main(String[] args) {
    try (TextTokenizer tokenizer = new TextTokenizer(args[0])) {
      TextStream stream = new TextStream(tokenizer, List.of(), tokenizer.encode("a", true));
      String text = "";
      int held = 0;
      for (long id : tokenizer.encode(args[1], true)) {
        String piece = stream.push(id);
        if (piece.isEmpty()) held++;
        text += piece;
      }
      System.out.println((held > 0) + " " + text.equals(args[1]));
    }
  }
}
JAVA
cat >"$work/Ids.java" <<'JAVA'
public class Ids {
  public static void main(String[] args) {
    try (var tokenizer = new quantmoe.TextTokenizer(args[0])) {
      for (long id : tokenizer.encode(args[1], true)) System.out.print(id + " ");
    }
  }
}
JAVA
good '' javac -cp "$classes" -d "$work" "$work/Printed.java" "$work/Ids.java"
good "^${tokens[*]} \$" java -cp "$classes" Ids "$work/padded" "$long"
good '^true true$' java -cp "$classes" Printed "$model" ' né, 日本語 𝄞 end'
if [ -e build/rust/debug/generate ]; then
  section "samples/rust"
  export ORT_DYLIB_PATH
  ORT_DYLIB_PATH=$(realpath build/samples-cpp/libonnxruntime.so.1)
  sample build/rust/debug/generate
  library_of_the_folder build/rust/debug/generate
  own_library env QUANTMOE_ORT_LIBRARY="$installed" build/rust/debug/generate
fi
if command -v dotnet >/dev/null; then
  section "samples/csharp"
  sample dotnet build/samples-csharp/bin/Generate/debug/Generate.dll
  entries dotnet build/samples-csharp/bin/Generate/debug/Generate.dll
  saves dotnet build/samples-csharp/bin/Generate/debug/Generate.dll
  bad 1 'nowhere/model.onnx' dotnet build/samples-csharp/bin/Generate/debug/Generate.dll nowhere 4 1
  texts dotnet build/samples-csharp/bin/Generate/debug/Generate.dll --text
fi

section "models of other tools, in the execution provider"
existing=$work/existing/model.onnx
mkdir "$work/existing"
PYTHONPATH=tests${PYTHONPATH:+:$PYTHONPATH} python - "$existing" <<'PYTHON' || exit 1
import sys
import numpy as np
import onnx_ir as ir
from support.operators.cases import Case
from support.models.existing import moe

case = Case(weights=("int4", "f32", False), activation_format="none", bias=True)
ir.save(moe(case, [case.expert(np.random.default_rng(e)) for e in range(case.experts)], np.float32), sys.argv[1])
PYTHON
provider() { # COMMAND...: all print the same numbers; what the provider computes it has packed beside the model
  rm -f "$existing.quantmoe"
  good "^y:( -?[0-9]+\.[0-9]{6}){8}$" "$@" "$existing"
  [ -s "$existing.quantmoe" ] || complain "expected that QuantMoE computes the node" "$@"
  [ "$(cat "$work/out")" = "${numbers:=$(cat "$work/out")}" ] || complain "expected \"$numbers\"" "$@"
  bad 1 nowhere.onnx "$@" nowhere.onnx
  bad 1 '^usage: .*MODEL$' "$@"
  bad 1 'is a folder, expected a model.s .onnx file' "$@" "$work/existing"
  good '^logits:( -?[0-9]+\.[0-9]{6}){8}$' "$@" "$work/language/model.onnx" # nothing is past: an empty cache
}
good '' quantmoe export samples/demo_model/checkpoint "$work/language" --target ort
provider python samples/python/provider.py
provider java -cp "$classes" Provider
if [ -e build/samples-cpp/provider ]; then
  provider build/samples-cpp/provider "$(python -c 'from quantmoe.ort_ext import library_path; print(library_path())')"
else
  echo 'samples/cpp/provider.cc not run: the headers here are of an ONNX Runtime before 1.24'
fi

section "a prompt on disk, from Python and back"
good '' quantmoe export samples/demo_model/hybrid "$work/hybrid" --activations float --logits 3 --state-window 3
goes_on() { # FOLDER COMMAND...: from a file of Python, and Python from its file; the same tokens and, if identical is set, bytes
  local folder=$1 ids="1 2 3 4 5 6 7 8 9 10 11 12" said new more
  shift
  good '' quantmoe generate "$folder" --ids "${ids// /,}" --max-new-tokens 6 --temperature 0 --save-state "$work/python.state"
  said=$(head -1 "$work/out" | tr , ' ')
  good "^$said *$" "$@" --save-state "$work/own.state" "$folder" 6 $ids
  [ ! "$identical" ] || good '' cmp "$work/python.state" "$work/own.state"
  for more in "$said 20 21" "33 34" ""; do # all of the file, as far as the end of the prompt, and a little before it
    good '^[0-9 ]+$' "$@" "$folder" 5 $ids $more
    new=$(sed 's/ *$//' "$work/out")
    good "^$new *$" "$@" --load-state "$work/python.state" --save-state "$work/own2.state" "$folder" 5 $ids $more
    more="$ids $more"
    good "^${new// /,}$" quantmoe generate "$folder" --ids "${more// /,}" --max-new-tokens 5 --temperature 0 \
      --load-state "$work/own.state" --save-state "$work/python2.state"
    grep -qE 'prompt: [1238] tokens?' "$work/err" || complain "expected that only what is new is run" quantmoe generate
    [ ! "$identical" ] || good '' cmp "$work/python2.state" "$work/own2.state"
  done
}
python - "$work" <<'PYTHON' || exit 1
import subprocess, sys
import numpy as np
from safetensors.numpy import load_file, save_file

work = sys.argv[1]
options = ["--ids", "1,2,3,4", "--max-new-tokens", "3", "--temperature", "0", "--save-state", f"{work}/good.state"]
subprocess.run(["quantmoe", "generate", f"{work}/hybrid", *options], check=True, capture_output=True)
whole, tensors = open(f"{work}/good.state", "rb").read(), load_file(f"{work}/good.state")
key = next(name for name in tensors if name.endswith(".key"))
changed = {
    "shape": {key: tensors[key][:, :, 1:].copy()},
    "missing": {key: None},
    "more": {"more": np.zeros(1, np.float32)},
    "older": {"checksum": None},
    "negative": {name.replace("@6", "@-5"): array for name, array in tensors.items() if "@6" in name},
    "end": {name.replace("@6", "@5"): array for name, array in tensors.items()} | {n: None for n in tensors if "@6" in n},
}
for name, change in changed.items():
    save_file({n: array for n, array in (tensors | change).items() if array is not None}, f"{work}/{name}.state")
for name, data in {"empty": b"", "cut": whole[:-1], "half": whole[: len(whole) // 2], "json": whole[:8] + b"[" + whole[9:],
                   "altered": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]}.items():
    open(f"{work}/{name}.state", "wb").write(data)
PYTHON
states() { # COMMAND...: a sample that reads and writes the file
  goes_on "$model" "$@"
  goes_on "$work/hybrid" "$@"
  while IFS='|' read -r pattern arguments; do
    eval "bad 1 \"\$pattern\" \"\$@\" $arguments"
  done <<'TABLE'
good.state: saved with another model|--load-state "$work/good.state" "$model" 4 1
good.state: saved with another model|--load-state "$work/good.state" "$work/other" 4 1
shape.state: past_key_values.2.key is F16 \[1, 2, 5, 64\], expected F16 \[1, 2, 6, 64\]|--load-state "$work/shape.state" "$work/hybrid" 4 1
missing.state: past_key_values.2.key is missing|--load-state "$work/missing.state" "$work/hybrid" 4 1
more.state: more is not of this model's cache|--load-state "$work/more.state" "$work/hybrid" 4 1
negative.state: past_key_values.*@-5 is not of this model's cache|--load-state "$work/negative.state" "$work/hybrid" 4 1
end.state: expected states after its 6 tokens, found those after \[4, 5\]|--load-state "$work/end.state" "$work/hybrid" 4 1
empty.state: 0 bytes|--load-state "$work/empty.state" "$work/hybrid" 4 1
cut.state: .*; is it truncated\?|--load-state "$work/cut.state" "$work/hybrid" 4 1
half.state: .*; is it truncated\?|--load-state "$work/half.state" "$work/hybrid" 4 1
altered.state: was altered or is damaged: its bytes have another CRC-32 than its checksum says|--load-state "$work/altered.state" "$work/hybrid" 4 1
older.state: checksum is missing: save it again|--load-state "$work/older.state" "$work/hybrid" 4 1
json.state: corrupt header|--load-state "$work/json.state" "$work/hybrid" 4 1
nowhere.state|--load-state "$work/nowhere.state" "$work/hybrid" 4 1
nowhere|--save-state "$work/nowhere/state" "$work/hybrid" 4 1
no tokens to save|--save-state "$work/state" "$work/hybrid" 0 1
TABLE
  mkdir -p "$work/taken" # the tokens were paid for: they are printed, also if the file cannot be written
  run "$@" --save-state "$work/taken" "$work/hybrid" 4 1
  { [ $code = 1 ] && grep -qE '^[0-9]+( [0-9]+){3} *$' "$work/out" && grep -qF "$work/taken" "$work/err"; } || complain "expected tokens and the path" "$@"
  echo "another program's" >"$work/linked.state.partial"
  ln -sf linked.state "$work/link.state"
  good '' "$@" --save-state "$work/link.state" "$work/hybrid" 4 1
  good "another program's" cat "$work/linked.state.partial"
  [ -L "$work/link.state" ] && [ -s "$work/linked.state" ] || complain "expected that a link stays a link" "$@"
  rm -f "$work/linked.state"
  [ "$(echo "$work"/*.partial)" = "$work/linked.state.partial" ] || complain "expected no file that is left over" "$@"
}
identical=1 states build/samples-cpp/generate
identical='' states java -jar samples/java/target/generate.jar # of Maven's ONNX Runtime, whose last bits may be others
if command -v dotnet >/dev/null; then # of NuGet's ONNX Runtime, whose last bits may be others
  identical='' states dotnet build/samples-csharp/bin/Generate/debug/Generate.dll
fi

section "messages of docs/reference/errors.md"
cat >"$work/messages.py" <<'PYTHON'
import sys
from pathlib import Path
import numpy as np
import onnxruntime as ort

folder, table = Path(sys.argv[1]).resolve(), Path("docs/reference/errors.md").read_text()

def session(model, library="libquantmoe_ort.so", entries={}):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if library:
        options.register_custom_ops_library(str(folder / library))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

s = session(folder / "model.onnx")

def run(past=2, cached=2, missing=None, dtype=np.int64, mask=None, positions=None, ids=(1, 2, 3)):
    new = len(ids)
    feed = {
        "input_ids": np.array([ids], dtype),
        "attention_mask": np.ones((1, past + new if mask is None else mask), np.int64),
        "position_ids": np.arange(past, past + (new if positions is None else positions))[None],
    }
    for i in s.get_inputs():
        if i.name.startswith("past_key_values"):
            shape = 1, i.shape[1], cached if i.name.endswith("0.key") else past, i.shape[3]
            feed[i.name] = np.zeros(shape, np.float16 if i.type == "tensor(float16)" else np.float32)
    s.run(None, {name: value for name, value in feed.items() if name != missing})

run()
model = (folder / "model.onnx").read_bytes()
found = {
    "Failed to load library|cannot open shared object file": lambda: session(model, "nowhere.so"),
    "these session options have the CUDA provider's library": lambda: session(
        model, entries={"quantmoe.registered": "CUDA provider"}
    ),
    "is not a registered function/op": lambda: session(folder / "model.onnx", library=None),
    "External data path|does not exist": lambda: session(model),
    "cos has shape": lambda: run(positions=2),
    "Gather|indices element out of data bounds": lambda: run(ids=(1, 999999)),
    "past_value has shape": lambda: run(cached=0),
    "Required inputs|are missing": lambda: run(missing="past_key_values.0.key"),
    "Unexpected input data type": lambda: run(dtype=np.int32),
}
for fragments, call in found.items():
    try:
        call()
        sys.exit(f"no error: {fragments}")
    except Exception as error:
        for fragment in fragments.split("|"):
            assert fragment in str(error), f"{fragment} in {error}"
            assert fragment in table, f"{fragment} in docs/reference/errors.md"
session(model, entries={"session.model_external_initializers_file_folder_path": str(folder)})
print(len(found), "messages")
PYTHON
good '^9 messages$' python "$work/messages.py" "$model"

section "samples/cpp with ONNX Runtime as others lay it out"
headers=$(sed -n 's/^ORT_INCLUDE_DIR:[^=]*=//p' build/samples-cpp/CMakeCache.txt)
library=$(realpath build/samples-cpp/libonnxruntime.so.1)
cp -r samples/cpp "$work/copied"
mkdir -p "$work"/archive/{include,lib} "$work"/nuget/{build/native/include,runtimes/linux-x64/native} "$work/wheel"
cp "$headers"/*.h "$work/archive/include" && cp "$headers"/*.h "$work/nuget/build/native/include"
cp "$library" "$work/archive/lib/libonnxruntime.so.1.31.1"
ln -s libonnxruntime.so.1.31.1 "$work/archive/lib/libonnxruntime.so.1" && ln -s libonnxruntime.so.1 "$work/archive/lib/libonnxruntime.so"
cp "$library" "$work/nuget/runtimes/linux-x64/native/libonnxruntime.so"
cp "$library" "$work/wheel/libonnxruntime.so.1.31.1"
built() { # NAME CMAKE_OPTION...: the sample copied out of the repository, from a folder beside it; it runs
  local name=$1
  shift
  cd "$work" || exit
  good 'Build files have been written' cmake -S copied -B "build-$name" -DQUANTMOE="$work/../../packages/cpp" "$@"
  good 'Built target generate' cmake --build "build-$name"
  ! grep -aq VERS_ "build-$name/generate" || complain "expected a program for any release of ONNX Runtime" "build-$name/generate"
  good '^[0-9]+ [0-9]+ *$' "build-$name/generate" "$model" 2 1
  cd - >/dev/null || exit
}
built archive -DORT_ROOT=archive
built nuget -DORT_ROOT="$work/nuget"
built wheel -DORT_INCLUDE_DIR="$headers" -DORT_LIBRARY_DIR=wheel
run cmake -S samples/cpp -B "$work/build-nothing" -DORT_ROOT="$work/nowhere" -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF
{ [ $code = 1 ] && grep -q 'Set ORT_ROOT to' "$work/err"; } || complain "expected advice" cmake -DORT_ROOT=nowhere

section "README's commands"
fixture=tests/fixtures/llmcompressor-w4a16-asym
while IFS='|' read -r pattern command; do
  eval "good \"\$pattern\" $command"
done <<TABLE
^quantmoe .*[0-9]|quantmoe --version
peak memory|quantmoe export $fixture "$work/new" --dry-run
lm_head quantized to int4: .*%|quantmoe export $fixture "$work/exported" --lm-head int4 --logits all
peak memory|quantmoe export $fixture "$work/exported" --force
have the recorded hash|quantmoe inspect "$model" --verify
kernel|quantmoe inspect $fixture --explain
52 matrices|quantmoe unpack "$model" --layer 3 --output "$work/layer.safetensors"
[0-9]|quantmoe generate "$model" --ids 1,2,3 --max-new-tokens 4
.|quantmoe generate "$model" --prompt "A mixture" --prefault --max-new-tokens 2
.|quantmoe generate "$model" --prompt "A mixture" --temperature 0.8 --top-p 0.9 --top-k 40 --seed 1 --stop "###" --max-new-tokens 8
.|quantmoe generate "$work/talking" --prompt "Hello" --chunk 4 --max-new-tokens 8
.|quantmoe generate "$work/talking" --prompt "Hello" --raw --max-new-tokens 8
|quantmoe generate "$work/talking" --chat
^[0-9]+,[0-9]+,[0-9]+$|quantmoe generate "$work/context" --ids 1,2,3,4,5 --max-new-tokens 16
TABLE
sed -n '/^```python/,/^```$/{/^```/!p}' README.md | sed "s#demo-python#$work/readme#" >"$work/readme.py"
good "[a-z]{2}.*[.,;]" python "$work/readme.py"  # the words may be others on another machine

section "bad input"
mkdir "$work/gguf" "$work/dense" && printf GGUF >"$work/gguf/model.gguf"
cp -r $fixture "$work/lfs"
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n' >"$work/lfs/model.safetensors"
echo '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}' >"$work/dense/config.json"
python -c "import numpy as np, safetensors.numpy as s; s.save_file({'model.layers.0.mlp.up_proj.weight': np.zeros((8, 8), np.float16)}, '$work/dense/model.safetensors')"
# CODE|PATTERN|COMMAND
while IFS='|' read -r status pattern command; do
  eval "bad $status \"\$pattern\" $command"
done <<TABLE
1|hf download Qwen/Qwen3-30B-A3B|quantmoe export Qwen/Qwen3-30B-A3B "$work/new"
1|a GGUF file|quantmoe export "$work/gguf" "$work/new"
1|a Git LFS pointer|quantmoe export "$work/lfs" "$work/new"
1|no experts|quantmoe export "$work/dense" "$work/new"
1|expected one of: f32, f16|quantmoe export $fixture "$work/new" --dtype bf16
1|model.onnx exists; --force|quantmoe export $fixture "$model"
1|model.onnx exists; --force|quantmoe export $fixture "$model" --dry-run
2|invalid value for '--group-size'|quantmoe export $fixture "$work/new" --group-size many
1|nowhere: no such folder|quantmoe inspect nowhere
1|expected an exported model|quantmoe generate nowhere --ids 1
2|standard input: expected a prompt, found no text; give --prompt, --file or --ids|quantmoe generate "$model" </dev/null
2|invalid value for --prompt: is empty|quantmoe generate "$model" --prompt ""
2|--raw and --stop are of text|quantmoe generate "$model" --ids 1 --stop x
1|--top-p is 2.0, expected a number above 0|quantmoe generate "$model" --prompt a --top-p 2
1|onnxruntime has no CUDA provider; pip uninstall|quantmoe generate "$model" --ids 1 --device cuda
1|chat_template.jinja: Encountered unknown tag|quantmoe generate "$work/mistaken" --prompt a
2|expected numbers separated by commas|quantmoe generate "$model" --ids one
1|outside the vocabulary|quantmoe generate "$model" --ids 1,999999
1|and 1 for the answer do not fit into the model's context of 8 tokens: shorten the prompt$|quantmoe generate "$work/context" --ids 1,2,3,4,5,6,7,8
1|not the data that this model was exported with|quantmoe generate "$work/other_data" --ids 1
1|hf download Qwen/Qwen3-30B-A3B|quantmoe demo --checkpoint Qwen/Qwen3-30B-A3B --outdir "$work/new"
1|llama-cpp-python|quantmoe bench layer --against ggml --tokens 1,16
2|expected numbers separated by commas|quantmoe bench layer --tokens 1,x
TABLE

if [ "$wheel" ]; then
  section "the wheel alone"
  clean() { # NAME PACKAGE...: an environment of these packages and nothing else; its programs come first on PATH
    uv venv --quiet --python "$(command -v python)" "$work/$1" &&
      UV_REQUIRE_HASHES=false uv pip install --quiet --python "$work/$1/bin/python" "${@:2}" # a wheel of dist has no hash in locked/
  }
  within() { # NAME COMMAND...
    env -u PYTHONPATH -u VIRTUAL_ENV PATH="$work/$1/bin:/usr/bin:/bin" "${@:2}"
  }
  clean runtime onnxruntime numpy
  sample within runtime python samples/python/generate.py # without quantmoe: the folder has its library
  library_of_the_folder within runtime python samples/python/generate.py
  clean bare "$wheel"
  good '^quantmoe .*[0-9]' within bare quantmoe --version
  good cpu_panel within bare quantmoe inspect "$model"
  good '52 matrices' within bare quantmoe unpack "$model" --layer 3 --output "$work/layer.safetensors" --force
  bad 1 'pip install' within bare quantmoe generate "$model" --ids 1
  bad 1 'pip install' within bare quantmoe export $fixture "$work/new"
  clean run "$wheel[run]"
  good '[0-9]' within run quantmoe generate "$model" --ids 1,2,3 --max-new-tokens 4
  good . within run quantmoe generate "$work/talking" --prompt Hello --max-new-tokens 4
fi
section "$ran commands"
exit $failed
