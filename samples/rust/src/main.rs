//! Greedy decoding of an exported folder: generate FOLDER COUNT ID... prints up to COUNT token ids.

use ort::logging::LogLevel;
use ort::memory::Allocator;
use ort::session::Session;
use ort::value::{DynTensor, DynValue, Tensor, ValueType};
use std::error::Error;

fn main() {
    if let Err(error) = generate(&std::env::args().skip(1).collect::<Vec<_>>()) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn generate(args: &[String]) -> Result<(), Box<dyn Error>> {
    if args.len() < 3 {
        return Err("usage: generate FOLDER COUNT ID...".into());
    }
    let folder = &args[0];
    let mut numbers = Vec::new();
    for text in &args[1..] {
        numbers.push(text.parse::<u32>().map_err(|_| format!("{text:?}: expected a number from 0"))? as i64);
    }
    let (mut count, mut ids) = (numbers[0], numbers[1..].to_vec());

    let runtime = std::env::var("ORT_DYLIB_PATH").unwrap_or("libonnxruntime.so".into());
    let environment = ort::init_from(runtime)?.build()?;
    // The folder's library is native code of whoever exported it; QUANTMOE_ORT_LIBRARY names your own.
    let library = std::env::var("QUANTMOE_ORT_LIBRARY").unwrap_or(format!("{folder}/libquantmoe_ort.so"));
    let mut session = Session::builder(&environment)?
        .with_log_level(LogLevel::Fatal)? // what it logs is in its errors
        .with_operator_library(library)?
        .commit_from_file(format!("{folder}/model.onnx"))?;
    let entry = |key| session.metadata().ok()?.custom(key);
    let stop = entry("eos_token_id").unwrap_or_default();
    let stop: Vec<&str> = stop.split(',').collect();
    let context = entry("context_length").map_or(Ok(i64::MAX), |length| length.parse())?;
    if ids.len() as i64 >= context {
        let total = ids.len();
        return Err(format!("{total} tokens and 1 for the answer do not fit into the model's context of {context} tokens").into());
    }
    count = count.min(context - ids.len() as i64);

    // Past and present are one buffer that each run writes in place, if the model takes that. Otherwise present is the past of
    // the next run.
    let shares = entry("past_present_share_buffer").as_deref() == Some("true");
    let length = if shares { ids.len() as i64 + count } else { 0 };
    let mut cache: Vec<(String, String, DynValue)> = Vec::new();
    for input in session.inputs() {
        if let ("past_key_values", ValueType::Tensor { ty, shape, .. }) = (input.name().split('.').next().unwrap(), input.dtype()) {
            // Batch 1; every dynamic dimension after the first is the cache's length.
            let size = |(i, &d)| if d >= 0 { d } else if i == 0 { 1 } else { length };
            let shape: Vec<i64> = shape.iter().enumerate().map(size).collect();
            let present = input.name().replace("past_key_values", "present");
            cache.push((input.name().into(), present, DynTensor::new(&Allocator::default(), *ty, shape)?.into_dyn()));
        }
    }
    let allocator = Allocator::default();
    let memory = allocator.memory_info().clone();
    let mut binding = session.create_binding()?;
    let mut generated = Vec::new();
    let mut past = 0;
    while (generated.len() as i64) < count {
        let total = past + ids.len() as i64;
        let row = |values: Vec<i64>| Tensor::from_array(([1, values.len()], values));
        binding.bind_input("attention_mask", &row(vec![1; total as usize])?)?;
        binding.bind_input("position_ids", &row((past..total).collect())?)?;
        binding.bind_input("input_ids", &row(ids)?)?;
        binding.bind_output_to_device("logits", &memory)?;
        for (name, present, value) in &mut cache {
            binding.bind_input(name.as_str(), &*value)?;
            if shares {
                binding.bind_output(present.as_str(), value)?;
            } else {
                binding.bind_output_to_device(present.as_str(), &memory)?;
            }
        }
        let mut outputs = session.run_binding(&binding)?;
        let best = best(&outputs["logits"])?;
        for (_, present, value) in &mut cache {
            *value = outputs.remove(&*present).ok_or_else(|| format!("no output {present}"))?;
        }
        past = total;
        ids = vec![best];
        generated.push(best.to_string());
        if stop.contains(&generated.last().unwrap().as_str()) {
            break;
        }
    }
    println!("{}", generated.join(" "));
    Ok(())
}

/// The best token at the last position of logits [1, sequence, vocabulary].
fn best(logits: &DynValue) -> Result<i64, Box<dyn Error>> {
    let (shape, values) = logits.try_extract_tensor::<f32>()?;
    let last = &values[values.len() - shape[2] as usize..];
    if last.iter().any(|value| !value.is_finite()) {
        return Err("logits are not finite".into());
    }
    let mut best = 0;
    for (i, value) in last.iter().enumerate() {
        if *value > last[best] {
            best = i;
        }
    }
    Ok(best as i64)
}
