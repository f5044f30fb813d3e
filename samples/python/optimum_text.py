"""An exported folder in optimum's ORTModelForCausalLM: optimum_text.py FOLDER TEXT continues the text.

It needs optimum-onnx 0.1, in an environment with transformers 4. optimum has no states, so models with linear attention
do not run. Nor do models whose head width is not the hidden size divided by the number of heads, such as Qwen3-30B-A3B.
"""

import sys

import onnxruntime as ort
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import PreTrainedTokenizerFast

import quantmoe

folder, text = sys.argv[1:]
options = ort.SessionOptions()
options.register_custom_ops_library(quantmoe.ort_library_path())
model = ORTModelForCausalLM.from_pretrained(folder, session_options=options)
tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
ids = tokenizer(text, return_tensors="pt")["input_ids"]
print(tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0]))
