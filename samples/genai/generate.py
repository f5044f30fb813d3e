"""Greedy decoding of an exported folder by onnxruntime-genai: generate.py FOLDER COUNT ID... prints COUNT token ids."""

import sys

import onnxruntime_genai as og

if len(sys.argv) < 4:
    sys.exit("usage: generate.py FOLDER COUNT ID...")
folder, count, ids = sys.argv[1], int(sys.argv[2]), [int(i) for i in sys.argv[3:]]
model = og.Model(folder)
params = og.GeneratorParams(model)
params.set_search_options(max_length=len(ids) + count)
generator = og.Generator(model, params)
generator.append_tokens(ids)
while not generator.is_done():
    generator.generate_next_token()
print(*generator.get_sequence(0)[len(ids) :])
