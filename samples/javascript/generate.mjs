import { env, pipeline, TextStreamer } from "@huggingface/transformers";

Object.assign(env, { allowRemoteModels: false, localModelPath: "./" });
const generate = await pipeline("text-generation", "OUTDIR");
const callback_function = (piece) => process.stdout.write(piece);
const streamer = new TextStreamer(generate.tokenizer, { skip_prompt: true, callback_function });
await generate("The old house", { max_new_tokens: 48, do_sample: false, streamer });
