//! Greedy decoding of an exported folder: generate FOLDER COUNT ID... prints up to COUNT token ids.

use std::error::Error;

use quantmoe::ort::logging::LogLevel;
use quantmoe::{Generator, Options, Sampling, TokenCache};

const USAGE: &str = "usage: generate FOLDER COUNT ID...";

fn main() {
    if let Err(error) = generate(&std::env::args().skip(1).collect::<Vec<_>>()) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn generate(args: &[String]) -> Result<(), Box<dyn Error>> {
    let [folder, numbers @ ..] = args else {
        return Err(USAGE.into());
    };
    let number = |text: &String| {
        text.parse::<u32>()
            .map_err(|_| format!("{text:?}: expected a number from 0"))
    };
    let numbers = numbers.iter().map(number).collect::<Result<Vec<_>, _>>()?;
    let [count, ids @ ..] = &numbers[..] else {
        return Err(USAGE.into());
    };
    if ids.is_empty() {
        return Err(USAGE.into());
    }
    // What ONNX Runtime logs is in its errors.
    let model = Generator::open_with(folder, |options| options.with_log_level(LogLevel::Fatal))?;
    let ids: Vec<i64> = ids.iter().map(|&id| id.into()).collect();
    let options = Options {
        max_new_tokens: *count as usize,
        sampling: Some(Sampling::greedy()),
        ..Options::default()
    };
    let tokens = TokenCache::new(&model)?
        .generate(&ids, &options)?
        .collect::<Result<Vec<_>, _>>()?;
    println!(
        "{}",
        tokens
            .iter()
            .map(i64::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    );
    Ok(())
}
